"""References for parity tests: the same model under FSDP2, under the implementation on trial, and unsharded.

`--impl torch` puts FSDP2 on both sides. It shows that a test expects FSDP2's own behavior.
"""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2x.sharding.wrap import UnitPlan, plan_units
from harness import context

# Minor version of torch 2. FSDP2's behavior has changed between versions, and tests name the version.
TORCH_MINOR = int(torch.__version__.split(".")[1])
TRANSPORTS = ("shm", "process_group")
# "streams" is the process group with the plans, lanes and events of an accelerator, played on the CPU (streams.py).
both_transports = pytest.mark.parametrize("transport", [*TRANSPORTS, pytest.param("streams", marks=pytest.mark.full)])

# For tests that need only one of the CPU transports.
and_streams = pytest.mark.parametrize("transport", ["auto", pytest.param("streams", marks=pytest.mark.full)])

# Module paths that a test shards, each as a unit. Paths joined by "+" become one unit of a list of modules.
Units = Iterable[str]


def only_fsdp2x(ctx) -> None:
    """Skips under --impl torch, because only fsdp2x has this behavior."""
    if ctx.impl != "fsdp2x":
        pytest.skip("upstream does not have this")


def skip_transport(ctx, transport: str) -> None:
    """Under --impl torch one run is enough for both transports."""
    if ctx.impl == "torch" and transport in ("process_group", "streams"):
        pytest.skip("stock has no transports to choose from")


def _resolve(model: nn.Module, units: Units | list[UnitPlan]) -> list[tuple[list[nn.Module], bool | None]]:
    resolved = []
    for unit in units:
        if isinstance(unit, UnitPlan):
            resolved.append(([model.get_submodule(name) for name in unit.names], unit.reshard_after_forward))
        else:
            resolved.append(([model.get_submodule(name) for name in unit.split("+")], None))
    return resolved


def _apply(fully_shard: Callable, model: nn.Module, units: Units | list[UnitPlan], **options: Any) -> nn.Module:
    reshard = options.pop("reshard_after_forward", None)
    for modules, own in _resolve(model, units):
        module = modules[0] if len(modules) == 1 else modules
        fully_shard(module, reshard_after_forward=reshard if own is None else own, **options)
    return fully_shard(model, reshard_after_forward=reshard, **options)


def shard_stock(model: nn.Module, units: Units | list[UnitPlan] = (), **options: Any) -> nn.Module:
    """Upstream's fully_shard on the units and the root."""
    return _apply(stock.fully_shard, model, units, **options)


def shard(ctx, model: nn.Module, units: Units | list[UnitPlan] = (), *, transport="auto", **options: Any) -> nn.Module:
    """The implementation on trial, unit by unit as a user of upstream's call writes it."""
    skip_transport(ctx, transport)
    if ctx.impl == "torch":
        return shard_stock(model, units, **options)
    import fsdp2x

    return _apply(fsdp2x.fully_shard, model, units, transport=_known(transport), auto_wrap=False, **options)


def shard_auto(ctx, model: nn.Module, *, transport: str = "auto", **options: Any) -> nn.Module:
    """The one call that users of HuggingFace models write; stock gets the same plan."""
    if ctx.impl == "torch":
        return shard(ctx, model, plan_units(model), transport=transport, **options)
    import fsdp2x

    return fsdp2x.fully_shard(model, transport=_known(transport), **options)


def _known(transport: str) -> str:
    if transport == "streams":
        install_streams()
    return transport


def install_streams() -> None:
    """Makes ``transport="streams"`` the device transport until the body ends. Then checks its record for races."""
    import streams

    recorder = streams.install()
    if not context.at_end:
        context.at_end.append(lambda: _no_races(recorder.entries))


def _no_races(entries: list[tuple]) -> None:
    import streams

    found = streams.races(entries)
    assert not found, found[:5]


def mesh_of(kind: str, world: int) -> DeviceMesh:
    """Makes a mesh of one axis ("1d"), or of two axes with two replicas."""
    if kind == "1d":
        return init_device_mesh("cpu", (world,))
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))


def everyone(ctx, mine: Any) -> list[Any]:
    """Gathers each rank's value."""
    found = [None] * ctx.world
    dist.all_gather_object(found, mine)
    return found


def full(value: Any) -> Any:
    """Gathered copies of DTensors (collective), clones of tensors, recursively."""
    found: list[DTensor] = []
    _replace(value, found.append)
    gathered = iter(_gathered(found))
    return _replace(value, lambda _: next(gathered))


def _replace(value: Any, gather: Callable[[DTensor], Any]) -> Any:
    if isinstance(value, DTensor):
        return gather(value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _replace(item, gather) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace(item, gather) for item in value]
    return value


@torch.no_grad()
def _gathered(values: list[DTensor]) -> list[torch.Tensor]:
    """Returns `full_tensor()` of each. One gather collects all that one group shards, as separate calls cost more."""
    together: dict[Any, list[tuple[int, int, torch.Tensor]]] = {}
    results: dict[int, torch.Tensor] = {}
    for i, value in enumerate(values):
        axes = [axis for axis, placement in enumerate(value.placements) if placement != Replicate()]
        local = value.to_local()
        if len(axes) == 1 and type(local) is torch.Tensor and local.is_cpu and type(value.placements[axes[0]]) is Shard:
            key = (value.device_mesh, axes[0])
            together.setdefault(key, []).append((i, value.placements[axes[0]].dim, local))
        else:
            results[i] = value.full_tensor().clone()
    for (mesh, axis), members in together.items():
        if len(members) == 1:
            results[members[0][0]] = values[members[0][0]].full_tensor().clone()
            continue
        group, own = mesh.get_group(axis), mesh.get_local_rank(axis)
        ranks = range(group.size())
        shapes = [[_shard_shape(values[i].shape, dim, rank, len(ranks)) for i, dim, _ in members] for rank in ranks]
        assert [local.shape for *_, local in members] == shapes[own], "shards of other shapes than torch.chunk's"
        widths = [local.itemsize for *_, local in members]
        sizes = [[math.prod(shape) * width for shape, width in zip(row, widths, strict=True)] for row in shapes]
        sent = torch.zeros(max(map(sum, sizes)), dtype=torch.uint8)
        sent[: sum(sizes[own])] = torch.cat([local.flatten().view(torch.uint8) for *_, local in members])
        received = sent.new_empty(len(ranks) * len(sent))
        dist.all_gather_into_tensor(received, sent, group=group)
        rows = received.view(len(ranks), len(sent))
        parts = [rows[rank, : sum(sizes[rank])].split(sizes[rank]) for rank in ranks]
        for k, (i, dim, local) in enumerate(members):
            pieces = [parts[rank][k].clone().view(local.dtype).view(shapes[rank][k]) for rank in ranks]
            results[i] = torch.cat(pieces, dim)
    return [results[i] for i in range(len(values))]


def _shard_shape(shape: torch.Size, dim: int, rank: int, world: int) -> torch.Size:
    rows = -(-shape[dim] // world)
    return torch.Size([*shape[:dim], min(max(shape[dim] - rank * rows, 0), rows), *shape[dim + 1 :]])


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Gathered gradients by name; checks that each lies as its parameter does. Collective."""
    found = {}
    for name, param in model.named_parameters():
        grad = found[name] = param.grad
        if isinstance(param, DTensor) and grad is not None:
            assert isinstance(grad, DTensor) and grad.placements == param.placements, name
            assert grad.dtype == (getattr(param, "grad_dtype", None) or param.dtype), name
            assert grad.to_local().shape == param.to_local().shape, name
    return full(found)


def params(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gathered parameters by name. Collective."""
    return full(dict(model.named_parameters()))


def same(got: Any, expected: Any, where: str = "", **tolerance: float) -> None:
    """Asserts equality of nested results: bit for bit without a tolerance."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{where}: a tensor expected, got {got!r}"
        assert got.dtype == expected.dtype and got.shape == expected.shape, f"{where}: {got.dtype} {got.shape}"
        if tolerance:
            torch.testing.assert_close(got, expected, **tolerance, msg=lambda text: f"{where}: {text}")
        elif not torch.equal(got, expected):
            worst = (got.double() - expected.double()).abs().max().item()
            raise AssertionError(f"{where}: not bitwise equal, largest difference {worst:.3e}\n{got}\n{expected}")
    elif isinstance(expected, dict):
        assert list(got) == list(expected), f"{where}: keys {list(got)} instead of {list(expected)}"
        for key in expected:
            same(got[key], expected[key], f"{where}.{key}", **tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), f"{where}: {len(got)} items instead of {len(expected)}"
        for i, item in enumerate(expected):
            same(got[i], item, f"{where}[{i}]", **tolerance)
    else:
        assert got == expected, f"{where}: {got!r} instead of {expected!r}"


def tolerance(ctx) -> dict[str, float]:
    """Two ranks add in one order only; with more, upstream's backend may sum in another order than ours."""
    return {} if ctx.world <= 2 else {"rtol": 1e-5, "atol": 1e-7}


def parity(
    ctx,
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    units: Units | list[UnitPlan] = (),
    *,
    transport: str = "auto",
    exact: dict[str, float] | None = None,
    twin: nn.Module | None = None,
    **options: Any,
) -> Any:
    """Runs `run` on a stock twin and on ours, and returns the results: equal bit for bit at up to two ranks.

    `twin`: what stock runs instead of a copy of `model`.
    """
    skip_transport(ctx, transport)
    twin = shard_stock(copy.deepcopy(model) if twin is None else twin, units, **options)
    torch.manual_seed(7 + ctx.rank)
    expected = run(twin)
    ours = shard(ctx, model, units, transport=transport, **options)
    torch.manual_seed(7 + ctx.rank)
    got = run(ours)
    same(got, expected, **(tolerance(ctx) if exact is None else exact))
    return expected


def changes(values: Iterable[Any]) -> bool:
    """Whether a sequence of losses moves at all: a test on constant losses would show nothing."""
    values = [float(value) for value in values]
    return len(values) > 1 and len(set(values)) == len(values)


def mean_of_ranks(model: nn.Module, loss_of: Callable[[nn.Module, int], torch.Tensor], world: int) -> torch.Tensor:
    """On an unsharded model: sets `.grad` to the mean over ranks of each rank's gradient; returns the ranks' losses."""
    total: dict[nn.Parameter, torch.Tensor] = {}
    losses = []
    for rank in range(world):
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, rank)
        loss.backward()
        losses.append(loss.detach())
        for param in model.parameters():
            if param.grad is not None:
                total[param] = param.grad if param not in total else total[param] + param.grad
    for param in model.parameters():
        param.grad = total[param] / world if param in total else None
    return torch.stack(losses)


def trained(
    model: nn.Module, loss_of: Callable[[nn.Module, int], torch.Tensor], num: int = 2, lr: float = 0.1
) -> list[list[Any]]:
    """[loss, gradients] of steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    results = []
    for step in range(num):
        loss = loss_of(model, step)
        loss.backward()
        results.append([loss.detach(), grads(model)])
        optimizer.step()
        optimizer.zero_grad()
    return results


def even_out(ours: nn.Module, reference: nn.Module) -> None:
    """Sets missing gradients to zero if the other model has zeros, as for experts without tokens. Collective."""
    for (name, param), other in zip(ours.named_parameters(), reference.parameters(), strict=True):
        for given, missing in ((param, other), (other, param)):
            if missing.grad is None and given.grad is not None:
                assert not full(given.grad).any(), f"{name}: a gradient on one side only"
                missing.grad = torch.zeros_like(missing)


def adamw_of(*models: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3) for model in models]


def train_alike(
    ctx,
    reference: nn.Module,
    ours: nn.Module,
    loss_of: Callable[[nn.Module, int, int], torch.Tensor],
    optimizers: Iterable[torch.optim.Optimizer] = (),
    *,
    num_steps: int = 3,
    evens: bool = False,
    before_step: Callable[[], None] = lambda: None,
    **exact: float,
) -> list[torch.Tensor]:
    """Steps of the sharded model on each rank's data against one process on everybody's; returns the mean losses.

    `loss_of(model, rank, step)`; `evens`: whether `even_out` comes first.
    """
    optimizers = optimizers or adamw_of(reference, ours)
    losses = []
    for step in range(num_steps):
        expected = mean_of_ranks(reference, lambda model, rank, step=step: loss_of(model, rank, step), ctx.world)
        loss = loss_of(ours, ctx.rank, step)
        loss.backward()
        same(loss.detach(), expected[ctx.rank], f"loss of step {step}", **exact)
        if evens:
            even_out(ours, reference)
        same(grads(ours), grads(reference), f"gradients of step {step}", **exact)
        before_step()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(expected.mean())
    same(params(ours), params(reference), "parameters", **exact)
    return losses
