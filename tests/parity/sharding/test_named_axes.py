"""``dp_mesh_dims``: random meshes whose axes shard, replicate, or belong to tensor parallelism, against stock."""

import functools
import math
from collections import OrderedDict
from random import Random

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp2x
from harness import distributed
from memory import POLICIES
from reference import (
    TORCH_MINOR,
    TRANSPORTS,
    both_transports,
    full,
    grads,
    only_fsdp2x,
    params,
    same,
    shard,
    shard_stock,
)

pytestmark = pytest.mark.skipif(not hasattr(stock, "DataParallelMeshDims"), reason="torch 2.11 has no dp_mesh_dims")
AXES = ("first", "second", "third")
WIDTH, HIDDEN = 8, 10


def sizes_of(random: Random, world: int) -> tuple[int, ...]:
    """Factors of ``world``, ones included, in any order."""
    sizes, rest = [], world
    while rest > 1 and len(sizes) < len(AXES) - 1:
        sizes.append(random.choice([size for size in range(1, rest + 1) if rest % size == 0]))
        rest //= sizes[-1]
    sizes.append(rest)
    random.shuffle(sizes)
    return tuple(sizes)


def draw(seed: int, world: int):
    """A mesh, the names of its shard, replicate, and tensor axes, and the settings of the model."""
    random = Random(seed)
    sizes = sizes_of(random, world)
    names = AXES[: len(sizes)]
    tensor = random.choice([None, *names]) if len(names) > 1 else None
    data = [name for name in names if name != tensor]
    cut = random.randint(0, len(data))
    halves = [tuple(data[:cut]), tuple(data[cut:])]
    random.shuffle(halves)
    shards, replicas = halves
    dims = {"shard": shards or None, "replicate": replicas or None}
    dims = {kind: found[0] if found and len(found) == 1 else found for kind, found in dims.items()}
    settings = {"reshard": random.choice([True, False]), "columns": random.choice([True, False])}
    return mesh_of(sizes, names), dims, tensor, settings


@functools.cache
def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...]):
    """One mesh for equal arguments: DTensor's caches may give a parameter the object of an equal, earlier mesh, which
    stock refuses.
    """
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def distribute(model: nn.Module, mesh, tensor: str | None) -> nn.Module:
    """Makes DTensors of the parameters, replicated on all axes but the one of tensor parallelism."""
    for name, linear in model.named_children():
        for key, param in list(linear.named_parameters()):
            dim = {("up", "weight"): 0, ("up", "bias"): 0, ("down", "weight"): 1}.get((name, key))
            placements = [
                Shard(dim) if axis == tensor and dim is not None else Replicate() for axis in mesh.mesh_dim_names
            ]
            setattr(linear, key, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))
    return model


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu())


def avoid_tensor_dim(param) -> Shard | None:
    """Cuts matrices along the dim that tensor parallelism does not cut."""
    cut = {one.dim for one in param.placements if isinstance(one, Shard)}
    return Shard(1) if param.ndim == 2 and 0 in cut else None


def train(model: nn.Module, mesh, data_axes) -> list:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place = [mesh.get_local_rank(axis) for axis in data_axes]
    results = []
    for step in range(2):
        torch.manual_seed(hash((step, *place)) % 2**31)
        x = DTensor.from_local(torch.randn(4, WIDTH), mesh, [Replicate()] * mesh.ndim, run_check=False)
        loss = model(x).square().mean()
        loss.backward()
        results += [loss.full_tensor().detach(), grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, params(model)]


def layout(model: nn.Module) -> dict:
    """Where the parameters are, and their values."""
    return {
        name: [param.placements, param.device_mesh.mesh.tolist(), param.to_local().shape, full(param.data)]
        for name, param in model.named_parameters()
    }


def are_adjacent(mesh, names) -> bool:
    """Stock replaces that many axes from the first shard axis on by one, whatever their names are."""
    positions = [mesh.mesh_dim_names.index(name) for name in names]
    return all(after == before + 1 for before, after in zip(positions, positions[1:], strict=False))


@distributed(world_sizes=(1, 2, 4))
@pytest.mark.parametrize("seed", range(24))
def test_random_meshes(ctx, seed):
    mesh, dims, tensor, settings = draw(seed, ctx.world)
    data_axes = tuple(axis for axis in mesh.mesh_dim_names if axis != tensor)
    model, twin = (distribute(Perceptron(), mesh, tensor) for _ in range(2))
    options = {"mesh": mesh, "reshard_after_forward": settings["reshard"]}
    as_stock = are_adjacent(mesh, stock.DataParallelMeshDims(**dims).shard_names)
    theirs = dims if as_stock else {"replicate": data_axes}
    if settings["columns"] and theirs.get("shard"):  # stock takes no function without a shard axis
        options["shard_placement_fn"] = avoid_tensor_dim
    twin = shard_stock(twin, ["up"], dp_mesh_dims=stock.DataParallelMeshDims(**theirs), **options)
    ours = stock.DataParallelMeshDims(**dims)
    model = shard(ctx, model, ["up"], transport=TRANSPORTS[seed % 2], dp_mesh_dims=ours, **options)
    if as_stock:
        same(layout(model), layout(twin), "layout")
    num_data = math.prod(mesh.size(mesh.mesh_dim_names.index(axis)) for axis in data_axes)
    exact = {} if num_data <= 2 else {"rtol": 1e-5, "atol": 1e-7}
    same(train(model, mesh, data_axes), train(twin, mesh, data_axes), **exact)


@distributed(world_sizes=(2, 4))
@both_transports
def test_replicate(ctx, transport):
    """torch's ``replicate`` on a mesh with a tensor axis is a ``fully_shard`` without a shard axis."""
    mesh = mesh_of((ctx.world // 2, 2), ("copies", "tensor"))
    dims = stock.DataParallelMeshDims(replicate="copies")
    model, twin = (distribute(Perceptron(), mesh, "tensor") for _ in range(2))
    replicate(twin, mesh=mesh, dp_mesh_dims=dims)
    model = shard(ctx, model, transport=transport, mesh=mesh, dp_mesh_dims=dims)
    same(layout(model), layout(twin), "layout")
    same(train(model, mesh, ["copies"]), train(twin, mesh, ["copies"]))


@distributed(world_sizes=(1, 2))
@both_transports
def test_a_part_that_torch_replicates(ctx, transport):
    """torch's engine reduces its gradients, and ours those of the rest."""
    model, twin = Perceptron(), Perceptron()
    mesh = mesh_of((ctx.world,), ("copies",))
    for one in (model, twin):
        replicate(one.up, mesh=mesh)
    shard_stock(twin)
    shard(ctx, model, transport=transport)
    for step in range(2):
        for one in (model, twin):
            torch.manual_seed(ctx.world * step + ctx.rank)
            one(torch.randn(4, WIDTH)).square().mean().backward()
        same(grads(model), grads(twin))


class TwoExperts(nn.Module):
    """One of two experts that expert parallelism cuts computes."""

    def __init__(self, mesh):
        super().__init__()
        for name in ("used", "unused"):
            whole = torch.arange(32.0).view(8, 4)
            self.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))

    def forward(self, x):
        return (self.used.to_local() * x).sum()


@distributed(world_sizes=(2, 4))
@both_transports
def test_unused_experts(ctx, transport):
    """They get gradients of zeros, or none."""
    mesh = mesh_of((ctx.world // 2, 2), ("data", "experts"))
    results = []
    for zeros in (True, False):
        made = [TwoExperts(mesh["experts"]) for _ in range(2)]
        twin = shard_stock(made[0], mesh=mesh["data"])
        model = shard(ctx, made[1], mesh=mesh["data"], transport=transport)
        for one in (twin, model):
            one.set_reduce_scatter_unused_params(zeros)
            one(torch.full((), 1.0 + mesh.get_local_rank("data"))).backward()
        results.append(grads(model))
        same(results[-1], grads(twin), f"gradients, zeros: {zeros}")
    assert results[0]["unused"].count_nonzero() == 0 and results[1]["unused"] is None


class Mixture(nn.Module):
    """A dense layer, and experts of which each rank of the expert mesh has some."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(3)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(distribute_tensor(torch.randn(4, WIDTH, 6), mesh, [Shard(0)]))

    def forward(self, x):
        return torch.einsum("tw,ewh->teh", self.dense(x), self.experts.to_local()).square().mean()


@pytest.mark.skipif(TORCH_MINOR < 15, reason="no ShardPlacementResult before torch 2.15")
@distributed(world_sizes=(4,))
@both_transports
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_experts_with_a_mesh_of_their_own(ctx, transport, dim, policy):
    """In one unit with dense parameters on another mesh, as torchtitan places them."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    dense = mesh_of((4,), ("dense",))
    sparse = mesh_of((2, 2), ("efsdp", "ep"))
    infos = {True: FSDPMeshInfo(sparse["efsdp"], shard_mesh_dim=0), False: FSDPMeshInfo(dense, shard_mesh_dim=0)}

    def place(param):
        cut = dim if param.ndim == 3 else 0
        return ShardPlacementResult(placement=Shard(cut), mesh_info=infos[param.ndim == 3])

    def run(apply, **options):
        model = nn.Sequential(OrderedDict(mixture=Mixture(sparse["ep"])))
        options |= {"mesh": dense, "shard_placement_fn": place, "mp_policy": POLICIES[policy]}
        model = apply(model, ["mixture"], **options)
        for module in (model, model.mixture):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        found = [layout(model)]
        for step in range(3):
            loss = model(torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + ctx.rank)))
            loss.backward()
            found.append([loss.detach(), grads(model)])
            optimizer.step()
            optimizer.zero_grad()
        return [*found, params(model)]

    exact = {"rtol": 2e-2, "atol": 2e-3} if policy == "bf16" else {"rtol": 1e-5, "atol": 1e-7}
    same(run(functools.partial(shard, ctx), transport=transport), run(shard_stock), **exact)


MISTAKES = {
    "not replicated": ({"shard": "data"}, True, ValueError, "Expected Replicate"),
    "not a copy": ({"replicate": "data"}, True, ValueError, "Expected Replicate"),
    "unknown axis": ({"shard": "nonexistent"}, None, ValueError, "not found in mesh.mesh_dim_names"),
    "plain parameter": ({"shard": "data"}, None, ValueError, "must be DTensors"),
    "int": ({"shard": "data", "reshard": 2}, False, NotImplementedError, "reshard_after_forward as int"),
    "other mesh": ({"shard": "data", "mesh": "other"}, False, ValueError, "same mesh"),
    "twice": ({"shard": "data", "replicate": "data"}, False, ValueError, "names an axis twice"),
    "reversed": ({"shard": ("tensor", "data")}, False, ValueError, "in the order of the mesh"),
}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(ctx, name):
    """The first six messages contain words of stock's."""
    only_fsdp2x(ctx)
    given, is_cut, kind, said = MISTAKES[name]
    mesh, options = mesh_of((2, 1), ("data", "tensor")), {}
    model = Perceptron() if is_cut is None else distribute(Perceptron(), mesh, "data" if is_cut else "tensor")
    if given.get("mesh"):
        mesh = mesh_of((1, 2), ("other", "data"))
    if given.get("reshard"):
        options["reshard_after_forward"] = given["reshard"]
    dims = stock.DataParallelMeshDims(**{key: given[key] for key in ("shard", "replicate") if key in given})
    with pytest.raises(kind, match=said):
        fsdp2x.fully_shard(model, mesh=mesh, dp_mesh_dims=dims, **options)
    if list(MISTAKES).index(name) < 6:
        with pytest.raises(kind, match=said):
            stock.fully_shard(model, mesh=mesh, dp_mesh_dims=dims, **options)
