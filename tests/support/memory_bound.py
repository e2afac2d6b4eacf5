"""A lower bound for a memory plan, from the parameters of a model and the settings of a run.

It knows neither layouts nor flat buffers nor the schedule, so a plan can be checked against it. Let a parameter have
``n`` elements of ``b`` bytes, and let ``W`` ranks share it. Between steps each rank holds, on average:

    shards      n * b / W for every parameter
    gradients   n * b / W for every trained parameter
    optimizer   n * s / W for every trained parameter, with s bytes of state an element (AdamW in float32: 8)
    unsharded   buffers in full

The backward of a unit ``u`` needs, in addition to shards, optimizer and unsharded:

    full parameters of u, full gradients of u, full parameters of earlier units that stay gathered, and
    gradients of later units, whose backward has ended, if u trains

Full parameters have the compute dtype, full gradients the narrower of compute and reduce dtype. The peak is at least
the largest of these sums over all units, and at least what is held between steps. Every engine that gathers and reduces
one unit at a time needs as much.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.optim.muon import named_matrices
from fsdp2x.plan.facts import ModelFacts, PlannedUnit

_NUM_MOMENTS = {"adamw": 2, "muon": 2, "sgd": 0, "sgd_momentum": 1, "none": 0}
_MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 256}  # int8: a float32 scale for 256 elements


@dataclass(frozen=True)
class MemoryBound:
    """Lower bounds for the fields of a ``MemoryReport`` with the same names, in bytes of an average rank."""

    shard_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    unsharded_bytes: int
    resident_shard_bytes: int
    resting_bytes: int
    peak_bytes: int
    host_bytes: int
    device_peak_bytes: int


@dataclass
class _Unit:
    """Bytes of one rank for one unit."""

    shards: float = 0
    gradients: float = 0
    state: float = 0
    full: float = 0
    full_gradients: float = 0
    kept: float = 0  # full parameters that stay from forward to backward
    host: float = 0  # shards, gradients and state in CPU memory
    copies: float = 0  # copies on the device of shards in CPU memory
    reduced: float = 0  # gradients on the device


def memory_bound(facts: ModelFacts, optimizer: str, policy: MixedPrecisionPolicy) -> MemoryBound:
    """Counts the parameters of a planned model and returns the bound for its plan.

    Args:
        facts: result of ``planned_facts``. It has the units in the order of forward, their ranks, and their offloading.
        optimizer: a name that ``plan_memory`` takes.
        policy: dtypes of compute and reduction.
    """
    matrices = {param for _, param in named_matrices(facts.model)} if optimizer.startswith("muon") else set()
    units = [_count(unit, params, optimizer, matrices, policy) for unit, params in _params_by_unit(facts)]
    unsharded = sum(buffer.numel() * buffer.itemsize for buffer in facts.model.buffers())
    sums = [sum(values) for values in zip(*map(astuple, units), strict=True)]
    total = _Unit(*sums)
    at_rest = total.shards + total.gradients + total.state + unsharded + total.copies
    peak = at_rest - total.reduced + max(total.reduced, _backward_bytes(units))
    held = (total.shards, total.gradients, total.state, unsharded, total.copies)
    return MemoryBound(*map(int, (*held, at_rest, peak, total.host, peak - total.host)))


def _params_by_unit(facts: ModelFacts) -> list[tuple[PlannedUnit, list[nn.Parameter]]]:
    """Returns the units that have parameters. An outer unit comes before inner ones, which have the parameters."""
    found: dict[nn.Parameter, PlannedUnit] = {}
    for unit in facts.units:
        found.update((param, unit) for module in unit.modules for param in module.parameters())
    by_unit = [(unit, [param for param, owner in found.items() if owner is unit]) for unit in facts.units]
    return [(unit, params) for unit, params in by_unit if params]


def _count(
    unit: PlannedUnit,
    params: list[nn.Parameter],
    optimizer: str,
    matrices: set[nn.Parameter],
    policy: MixedPrecisionPolicy,
) -> _Unit:
    group, held = unit.groups[0], _Unit()
    world, shares = group.ranks.world, group.ranks.transport.shares_memory
    for param in params:
        dtype = policy.param_dtype if policy.param_dtype and param.is_floating_point() else param.dtype
        numel = param.numel() / unit.expert_parallel
        held.shards += numel * param.itemsize / world
        if dtype != param.dtype or not (world == 1 or shares):  # otherwise the shards are the full parameters
            held.full += numel * dtype.itemsize / (world if shares else 1)
        if param.requires_grad:
            held.gradients += numel * param.itemsize / world
            held.state += numel * (param.itemsize if param in matrices else _state_bytes(optimizer, param)) / world
            held.full_gradients += numel * min(dtype.itemsize, (policy.reduce_dtype or dtype).itemsize)
    held.kept = held.full * (1 / group.small.ranks.world if group.small else not unit.reshards_after_forward)
    on_host = (held.shards + held.gradients) * group.offloads
    held.host = on_host + held.state * (group.offloads or group.keeps_host_state)
    held.copies = held.shards * group.keeps_shards
    held.reduced = held.gradients * (not group.offloads)
    return held


def _state_bytes(optimizer: str, param: nn.Parameter) -> float:
    """Returns bytes of state for an element."""
    name = optimizer if optimizer in _NUM_MOMENTS else optimizer.rpartition("_")[0]
    moments_dtype = optimizer.removeprefix(name).removeprefix("_")
    is_narrowed = moments_dtype and param.itemsize <= 4
    return _NUM_MOMENTS[name] * (_MOMENT_BYTES[moments_dtype] if is_narrowed else param.itemsize)


def _backward_bytes(units: list[_Unit]) -> float:
    """Returns the most bytes of full tensors and of gradients on the device that a unit's backward needs."""
    most = kept = 0.0
    later = sum(unit.reduced for unit in units)
    for unit in units:
        later -= unit.reduced
        trains = unit.full_gradients > 0  # otherwise backward may not reach it
        most = max(most, unit.full + unit.full_gradients + kept + later * trains)
        kept += unit.kept
    return most
