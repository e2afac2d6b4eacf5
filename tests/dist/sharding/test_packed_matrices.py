"""Fused matrices whose blocks tensor parallelism cuts (transformers' packed plans), below FSDP of their rows."""

import pytest
import torch
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp2x
from checkpoints import shared_folder
from fsdp2x.base import torch_private
from fsdp2x.checkpoint import CheckpointError, load, save
from harness import distributed
from reference import same

COLUMNS = 6


class Fused(nn.Module):
    """Its gradient is the input, since its loss is the sum of products with it."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, factors):
        return (self.weight.to_local() * factors).sum()


def local_rows(whole, blocks, mesh):
    """This rank's tensor-parallel part: its share of each block."""
    tensor = mesh.get_local_rank("tensor")
    return torch.cat([block.chunk(mesh["tensor"].size())[tensor] for block in whole.chunk(blocks)])


def packed(whole, blocks, mesh, data=None, dim=None):
    model = Fused(whole)
    placement = torch_private.StridedShard(0, split_factor=blocks)
    model.weight = nn.Parameter(distribute_tensor(whole, mesh["tensor"], [placement]))
    given = {} if dim is None else {"shard_placement_fn": lambda param: Shard(dim)}
    return fsdp2x.fully_shard(model, mesh=mesh["data"] if data is None else data, **given)


@distributed(world_sizes=(2, 4, 6))
@pytest.mark.parametrize(("blocks", "dim"), [(2, None), (4, None), (6, None), (2, 1), (3, 1)])
@pytest.mark.each_world
def test_full_tensors_have_the_rows_in_order(ctx, blocks, dim):
    tensor = 1 if ctx.world == 2 else 2
    mesh = init_device_mesh("cpu", (ctx.world // tensor, tensor), mesh_dim_names=("data", "tensor"))
    whole = torch.arange(blocks * tensor * 3.0 * COLUMNS).view(-1, COLUMNS)
    if dim is None and blocks % mesh["data"].size():
        with pytest.raises(NotImplementedError, match="weight.* cut the blocks.* shard_placement_fn"):
            packed(whole, blocks, mesh)
        return
    model = packed(whole, blocks, mesh, dim=dim)
    same(model.weight.full_tensor(), whole, "parameter")
    same(dict(fsdp2x.full_tensors(model)), {"weight": whole}, "full_tensors")
    options = StateDictOptions(full_state_dict=True)
    same(get_model_state_dict(model, options=options)["weight"], whole, "state dict")
    factors = torch.randn(whole.shape, generator=torch.Generator().manual_seed(0))
    model(local_rows(factors, blocks, mesh)).backward()
    same(model.weight.grad.full_tensor(), factors, "gradient", rtol=1e-6, atol=1e-6)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    same(model.weight.full_tensor(), whole - factors, "after a step", rtol=1e-6, atol=1e-5)


@distributed(world_sizes=(4,))
def test_replicas(ctx):
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "data", "tensor"))
    whole = torch.arange(8.0 * COLUMNS).view(-1, COLUMNS)
    model = packed(whole, 2, mesh, mesh["replicate", "data"])
    same(model.weight.full_tensor(), whole, "parameter")
    model(local_rows(whole, 2, mesh)).backward()
    same(model.weight.grad.full_tensor(), whole, "gradient")


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("blocks", [2, 4])
def test_checkpoints(ctx, blocks):
    """They keep the rows in order for other shardings, or refuse what they cannot describe."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    whole = torch.arange(blocks * 4.0 * COLUMNS).view(-1, COLUMNS)
    model = packed(whole, blocks, mesh)
    plain = fsdp2x.fully_shard(Fused(torch.zeros_like(whole)))
    with shared_folder() as folder:
        if blocks == 4:  # a rank has parts of two
            with pytest.raises(CheckpointError, match="blocks of a fused matrix"):
                save(folder / "packed", model, step=1)
            save(folder / "plain", plain, step=1)
            with pytest.raises(CheckpointError, match="blocks of a fused matrix"):
                load(folder / "plain", model)
            return
        save(folder / "packed", model, step=1)
        load(folder / "packed", plain)
        same(plain.weight.full_tensor(), whole, "rows of four ranks")
        with torch.no_grad():
            model.weight.zero_()
        save(folder / "plain", plain, step=1)
        load(folder / "plain", model)
        same(model.weight.full_tensor(), whole, "packed")


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("blocks", [2, 3])
def test_one_mesh_for_all_axes(ctx, blocks):
    if not hasattr(fsdp, "DataParallelMeshDims"):
        pytest.skip("torch 2.11 has no dp_mesh_dims")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    whole = torch.arange(blocks * 4.0 * COLUMNS).view(-1, COLUMNS)
    model = Fused(whole)
    placements = [Replicate(), torch_private.StridedShard(0, split_factor=blocks)]
    model.weight = nn.Parameter(distribute_tensor(whole, mesh, placements))
    given = {"mesh": mesh, "dp_mesh_dims": fsdp.DataParallelMeshDims(shard="data")}
    if blocks == 3:
        with pytest.raises(NotImplementedError, match="weight.* would cut the blocks again"):
            fsdp2x.fully_shard(model, **given)
        return
    fsdp2x.fully_shard(model, **given)
    same(model.weight.full_tensor(), whole, "parameter")
    model(local_rows(whole, blocks, mesh)).backward()
    same(model.weight.grad.full_tensor(), whole, "gradient")
