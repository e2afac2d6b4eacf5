"""What ``fully_shard`` does to modules and parameters, before anything runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2x.conformance.behavior import (
    UNITS,
    Block,
    Context,
    Net,
    behavior,
    close,
    data,
    full,
    is_sharded,
    mean_square,
    raises,
    same_weights,
)


@behavior()
def returns_its_argument(t: Context) -> None:
    """fully_shard shards in place and returns the module or list that it was given."""
    model = Net()
    pair = [model.blocks[0], model.blocks[1]]
    assert t.engine(pair, **t.options) is pair
    assert t.engine(model, **t.options) is model


class Chain(nn.ModuleList):
    """Has a forward, so it can be a unit. Slices of it are of this class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


@behavior()
def changes_the_class(t: Context) -> None:
    """A sharded module is an FSDPModule and still an instance of its own class, under the name FSDP<class>."""
    model = t.shard(Net(), UNITS)
    for module, cls in ((model, Net), (model.blocks[0], Block)):
        assert isinstance(module, torch_fsdp.FSDPModule) and isinstance(module, cls)
        assert type(module).__name__ == f"FSDP{cls.__name__}"
    assert not isinstance(model.head, torch_fsdp.FSDPModule)
    assert type(model.blocks[:2]) is nn.ModuleList
    chain = t.shard(Chain([nn.Linear(6, 6), nn.Linear(6, 6)]))
    assert type(chain[:1]) is Chain and chain(data()).shape == (4, 6)


@behavior()
def makes_dtensors(t: Context) -> None:
    """Parameters become DTensor parameters, sharded on dim 0, with the same names, global shapes, and dtypes."""
    plain, model = Net(), t.shard(Net(), UNITS)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for param, old in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(param, nn.Parameter) and isinstance(param, DTensor)
        assert param.placements == (Shard(0),) and param.device_mesh.size() == t.world
        assert param.shape == old.shape and param.dtype == old.dtype and param.requires_grad


@behavior()
def cuts_as_torch_chunk(t: Context) -> None:
    """A rank holds its part of torch.chunk on dim 0; ranks without rows hold an empty tensor."""
    plain, model = Net(), t.shard(Net())
    for param, old in zip(model.parameters(), plain.parameters(), strict=True):
        chunks = old.chunk(t.world)
        expected = chunks[t.rank] if t.rank < len(chunks) else old[:0]
        assert torch.equal(param.to_local(), expected), f"{tuple(param.to_local().shape)}, not {tuple(expected.shape)}"


@behavior()
def keeps_values(t: Context) -> None:
    """Gathered parameters are equal to those before sharding."""
    same_weights(t.shard(Net(), UNITS), Net(), rtol=0, atol=0)


@behavior()
def keeps_properties(t: Context) -> None:
    """Sharding keeps which parameters train, their dtype, and the contiguous layout of shards."""
    model = Net()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].bfloat16()
    model = t.shard(model, UNITS)
    assert not any(param.requires_grad for param in model.blocks[0].parameters())
    assert {param.dtype for param in model.blocks[1].parameters()} == {torch.bfloat16}
    assert all(param.to_local().is_contiguous() for param in model.parameters())


@behavior()
def leaves_buffers(t: Context) -> None:
    """Buffers stay plain tensors."""
    model = t.shard(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    assert all(not isinstance(buffer, DTensor) for buffer in model.buffers())


@behavior()
def nested_units_keep_their_parameters(t: Context) -> None:
    """A later call for the parent takes only what nested calls have left."""
    model = Net()
    t.engine(model.blocks[0], **t.options)
    inner = model.blocks[0].up.weight
    assert not isinstance(model.head.weight, DTensor)
    t.engine(model, **t.options)
    assert model.blocks[0].up.weight is inner and is_sharded(model)


@behavior()
def lists_are_one_unit(t: Context) -> None:
    """Modules of a list are gathered together when the first of them runs."""
    model = t.shard(Net(), ("blocks.0+blocks.1",))
    model(data(t.rank)).sum().backward()
    model.blocks[0].unshard()
    assert not isinstance(model.blocks[1].up.weight, DTensor)
    model.blocks[0].reshard()
    assert is_sharded(model.blocks[1])


@behavior()
def has_a_state(t: Context) -> None:
    """fully_shard.state(module) is the state of a sharded module, and None for other modules."""
    model = t.shard(Net(), UNITS)
    state = getattr(t.engine, "state")  # noqa: B009
    assert state(model) is not None and state(model.head) is None


ERRORS = {
    "scalar": (ValueError, "scalar", lambda: _with_parameter(torch.ones(()))),
    "no forward": (ValueError, "forward", lambda: nn.ModuleList([nn.Linear(2, 2)])),
}


def _with_parameter(tensor: torch.Tensor) -> nn.Module:
    module = nn.Linear(2, 2)
    module.extra = nn.Parameter(tensor)
    return module


@behavior(rows=ERRORS)
def refuses(t: Context, kind: type[Exception], text: str, make: Callable[[], Any]) -> None:
    """Scalar parameters, and modules without a forward, raise an error that says so."""
    raises(kind, lambda: t.engine(make(), **t.options), text)


@behavior()
def takes_or_refuses_strided_parameters(t: Context) -> None:
    """Parameters that are not contiguous keep their values, or raise NotImplementedError."""
    model, value = _with_parameter(torch.arange(24.0).view(4, 6).t()), torch.arange(24.0).view(4, 6).t()
    try:
        t.engine(model, **t.options)
    except NotImplementedError:
        return
    assert torch.equal(full(model.extra), value)


@behavior()
def refuses_a_second_call(t: Context) -> None:
    """The same module cannot be sharded twice."""
    model = t.shard(Net())
    raises((AssertionError, ValueError, RuntimeError), lambda: t.engine(model, **t.options))


@behavior()
def refuses_deepcopy(t: Context) -> None:
    """A sharded module cannot be deep-copied; the error says to copy before sharding."""
    model = t.shard(Net())
    raises(AssertionError, lambda: copy.deepcopy(model), "copy")


@behavior(ranks=2)
def takes_a_mesh(t: Context) -> None:
    """The parameters have the mesh that was passed."""
    mesh = t.mesh(-1, names=("data",))
    assert all(param.device_mesh == mesh for param in t.shard(Net(), mesh=mesh).parameters())


@behavior(ranks=2)
def hybrid_meshes_replicate_and_shard(t: Context) -> None:
    """On a mesh of two dims, parameters are replicated on the first and sharded on the second."""
    model = t.shard(Net(), mesh=t.mesh(-1, 2, names=("replicate", "shard")))
    assert all(param.placements == (Replicate(), Shard(0)) for param in model.parameters())


@behavior()
def refuses_three_dims(t: Context) -> None:
    """A mesh must have one or two dims."""
    mesh = t.mesh(1, 1, -1, names=("a", "b", "c"))
    raises(ValueError, lambda: t.shard(Net(), mesh=mesh), "mesh")


@behavior(rows={"dim 1": (1, (3, 4)), "dim 2": (2, (3, 2, 4)), "dim 1 of three": (1, (3, 4, 2)), "last": (-1, (3, 4))})
def places_shards(t: Context, dim: int, shape: tuple[int, ...]) -> None:
    """shard_placement_fn chooses the dim of each parameter, and gathers give the same values."""
    value = torch.arange(float(torch.Size(shape).numel())).view(shape)
    model = t.shard(
        _with_parameter(value), shard_placement_fn=lambda param: Shard(dim) if param.shape == shape else None
    )
    assert model.extra.placements == (Shard(dim % len(shape)),) and model.bias.placements == (Shard(0),)
    assert torch.equal(model.extra.to_local(), value.chunk(t.world, dim)[t.rank])
    model.unshard()
    assert torch.equal(model.extra, value)


@behavior(torch=(2, 7))
def ignores_parameters(t: Context) -> None:
    """ignored_params stay plain, and their gradients stay local."""
    model = Net()
    ignored = set(model.blocks[1].parameters())
    model = t.shard(model, ("blocks.0", "blocks.2"), ignored_params=ignored)
    assert all(not isinstance(param, DTensor) for param in ignored) and isinstance(model.head.weight, DTensor)
    plain = Net()
    mean_square(plain, t.rank).backward()
    mean_square(model, t.rank).backward()
    close(model.blocks[1].up.weight.grad, plain.blocks[1].up.weight.grad, "its own gradient")


@behavior()
def shards_meta_modules(t: Context) -> None:
    """A module on the meta device is sharded there; to_empty() and loading give it values."""
    with torch.device("meta"):
        model = Net()
    model = t.shard(model, UNITS)
    assert all(isinstance(param, DTensor) and param.device.type == "meta" for param in model.parameters())
    model.to_empty(device="cpu")
    plain = Net()
    for param, value in zip(model.parameters(), plain.parameters(), strict=True):
        with torch.no_grad():
            param.copy_(torch.distributed.tensor.distribute_tensor(value.detach(), param.device_mesh, param.placements))
    close(model(data(t.rank)), plain(data(t.rank)), "output")


@behavior()
def refuses_to_run_on_meta(t: Context) -> None:
    """A forward with parameters on the meta device raises an error that says so."""
    with torch.device("meta"):
        model = Net()
    model = t.shard(model, UNITS)
    raises(RuntimeError, lambda: model(data()), "meta")


@behavior()
def shares_parameters_in_a_unit(t: Context) -> None:
    """Modules of one unit may share a parameter, which stays one object."""
    model = Net()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model = t.shard(model, ("blocks.0+blocks.1", "blocks.2"))
    assert model.blocks[1].up.weight is model.blocks[0].up.weight
    model(data(t.rank)).sum().backward()
    assert model.blocks[1].up.weight is model.blocks[0].up.weight


@behavior(torch=(2, 13))
def refuses_parameters_shared_by_units(t: Context) -> None:
    """A parameter that two units would shard raises an error, at the latest in the first forward."""
    model = Net()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    raises((ValueError, RuntimeError), lambda: t.shard(model, UNITS)(data(t.rank)))


@behavior(rows=("named_parameters", "modules", "state_dict"))
def keeps_names(t: Context, what: str) -> None:
    """Names and order of parameters, modules, and the state dict do not change."""
    plain, model = Net(), t.shard(Net(), UNITS)
    named = {"named_parameters": "named_parameters", "modules": "named_modules"}.get(what)
    if named is None:
        assert list(model.state_dict()) == list(plain.state_dict())
    else:
        assert [name for name, _ in getattr(model, named)()] == [name for name, _ in getattr(plain, named)()]


@behavior(torch=(2, 12))
def takes_the_data_dims_of_a_mesh(t: Context) -> None:
    """dp_mesh_dims names the data-parallel dims of a mesh on which the parameters are replicated DTensors."""
    from torch.distributed.tensor import distribute_module

    mesh, dims = t.mesh(-1, names=("data",)), t.find("DataParallelMeshDims")
    model = Net()
    distribute_module(model, mesh)
    model = t.shard(model, mesh=mesh, dp_mesh_dims=dims(shard="data"))
    assert all(param.placements == (Shard(0),) for param in model.parameters())
    same_weights(model, Net(), rtol=0, atol=0)


@behavior()
def gathers_with_full_tensor(t: Context) -> None:
    """full_tensor() of a parameter is the complete value on every rank, after a step too."""
    model = t.shard(Net(), UNITS)
    mean_square(model, t.rank).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert t.all_equal([full(param).tolist() for param in model.parameters()])
