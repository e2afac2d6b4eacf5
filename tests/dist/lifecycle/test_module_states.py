"""Replicas must begin equal: compared at the first forward and after loads, made equal by sync_module_states."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import fsdp2x
from fsdp2x.lifecycle import replicas
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import full, params, same, shard
from training import shared_folder


def replicated(ctx, transport: str, model: nn.Module | None = None, **options) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, ctx.world // 2), mesh_dim_names=("replicate", "shard"))
    return shard(ctx, model or Stack(), STACK_UNITS, mesh=mesh, transport=transport, **options)


def change(ctx, model: nn.Module, name: str, how: str) -> None:
    """One element of one shard of the second replica, in its bits alone where that is possible."""
    if ctx.rank < ctx.world // 2:
        return
    local = model.get_parameter(name).to_local().detach().flatten()
    if local.numel() == 0:
        return
    if how == "value":
        local[-1] += 1
    elif how == "sign of zero":
        local[0] = -0.0
    else:
        local[:1].view(torch.int32)[0] = 0x7FC00001  # a NaN of another payload


def set_special(model: nn.Module, name: str, how: str) -> None:
    with torch.no_grad():
        local = model.get_parameter(name).to_local().flatten()
        local[:1] = 0.0 if how == "sign of zero" else float("nan") if how == "payload" else 1.0


def of_all(mine) -> list:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


@distributed(world_sizes=(2, 4))
@pytest.mark.parametrize("transport", ["shm", "process_group"])
@pytest.mark.parametrize("how", ["value", "sign of zero", "payload"])
def test_first_forward_names_what_differs(ctx, transport, how):
    model = replicated(ctx, transport)
    set_special(model, "blocks.1.up.weight", how)
    change(ctx, model, "blocks.1.up.weight", how)
    for _ in range(2):  # it does not count as the first forward
        with pytest.raises(ValueError, match="different values of 'blocks.1.up.weight'") as caught:
            model(inputs(ctx.rank))
    message = str(caught.value)
    assert f"ranks 0 and {ctx.world // 2} are replicas" in message and "fsdp2x.sync_module_states(model)" in message
    assert of_all(message) == [message] * ctx.world, "every rank says the same"
    fsdp2x.sync_module_states(model)
    model(inputs(ctx.rank)).square().mean().backward()
    fsdp2x.check_module_states(model)


@distributed(world_sizes=(2, 4))
@pytest.mark.parametrize("transport", ["shm", "process_group"])
def test_replicas_of_other_seeds_train_as_the_first(ctx, transport):
    model = replicated(ctx, transport, Stack(seed=ctx.rank // (ctx.world // 2)))
    with pytest.raises(ValueError, match=", and [0-9]+ more"):
        model(inputs(ctx.rank))
    fsdp2x.sync_module_states(model)
    optimizer = fsdp2x.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        model(inputs(ctx.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in of_all(params(model)):
        same(weights, params(model))


def _load_state_dict(model, weights, folder):
    cut = {}
    for name, value in weights.items():
        param = model.get_parameter(name)
        cut[name] = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
    model.load_state_dict(cut)


def _set_model_state_dict(model, weights, folder):
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))


def _checkpoint(model, weights, folder):
    fsdp2x.checkpoint.save(folder / "saved", model, step=1)
    fsdp2x.checkpoint.load(folder / "saved", model)


LOADS = {"load_state_dict": _load_state_dict, "set_model_state_dict": _set_model_state_dict, "checkpoint": _checkpoint}


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("transport", ["shm", "process_group"])
@pytest.mark.parametrize("load", LOADS)
def test_loads_are_checked_at_the_next_forward(ctx, transport, load):
    model = replicated(ctx, transport)
    weights = {name: value.clone() for name, value in full(model.state_dict()).items()}
    model(inputs(ctx.rank)).square().mean().backward()
    with shared_folder(ctx) as folder:
        LOADS[load](model, weights, folder)
        model(inputs(ctx.rank)).square().mean().backward()
        weights["blocks.0.up.weight"] += ctx.rank // 2
        LOADS[load](model, weights, folder)
        if load != "load_state_dict":  # these give all replicas the values of one
            change(ctx, model, "blocks.0.up.weight", "value")
    for _ in range(2):
        with pytest.raises(ValueError, match="different values of 'blocks.0.up.weight'"):
            model(inputs(ctx.rank))
    fsdp2x.sync_module_states(model)
    model(inputs(ctx.rank)).square().mean().backward()


@distributed(world_sizes=(2, 4))
@pytest.mark.parametrize("shape", ["one axis", "replicas"])
def test_buffers_and_ignored_parameters_on_request(ctx, shape):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    ignored = {model[2].weight}
    mesh = (ctx.world,) if shape == "one axis" else (2, ctx.world // 2)
    mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    fsdp2x.fully_shard(model, mesh=mesh, ignored_params=ignored)
    model[1].running_mean.fill_(float(ctx.rank))
    model(torch.ones(3, 4))  # buffers and ignored parameters are not looked at by themselves
    fsdp2x.check_module_states(model, buffers=False)
    with pytest.raises(ValueError, match="check_module_states: ranks 0 and [12] .* '1.running_mean'"):
        fsdp2x.check_module_states(model)
    with torch.no_grad():
        model[2].weight.fill_(float(ctx.rank))
    with pytest.raises(ValueError, match="different values of '2.weight'"):
        fsdp2x.check_module_states(model, buffers=False)
    fsdp2x.sync_module_states(model)
    fsdp2x.check_module_states(model)
    assert model[2].weight.sum() == 0.0


@distributed(world_sizes=(2,))
def test_what_cannot_be_synchronized(ctx):
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    for call in (fsdp2x.sync_module_states, fsdp2x.check_module_states):
        with pytest.raises(ValueError, match="nothing in this Linear is sharded"):
            call(model)
    fsdp2x.fully_shard(model)
    for call in (fsdp2x.sync_module_states, fsdp2x.check_module_states):
        with pytest.raises(RuntimeError, match="'weight' is on the meta device"):
            call(model)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.complex64, torch.bool]
)
def test_checksums_see_every_bit(dtype):
    """Also past one chunk; one or two elements that change, move or are missing."""
    of = replicas.checksum
    for numel in (0, 1, 7, 33, 1_100_001):
        generator = torch.Generator().manual_seed(0)
        bits = torch.randint(0, 2, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        tensor = bits.view(dtype)
        expected = of(tensor)
        assert of(tensor.clone()) == expected
        last = torch.arange(numel) * dtype.itemsize + dtype.itemsize - 1  # the byte of the sign
        for indices in [[0], [numel // 2], [numel - 1], [0, numel - 1], [numel // 3, numel // 2]] if numel else ():
            other = bits.clone()
            other[last[list(set(indices))]] ^= 1 if dtype is torch.bool else 0x80
            assert of(other.view(dtype)) != expected, indices
        if numel > 1:
            assert of(tensor[:-1]) != expected and of(bits.clone().fill_(1).view(dtype)) != expected
    moved = torch.arange(10.0)
    assert of(moved) != of(moved.flip(0))
