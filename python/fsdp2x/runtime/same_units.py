"""Every rank of a group must shard the same parameters in the same units: compared when the ranks meet, before any
collective whose sizes would differ. A backend meets those with an abort of the process, or with wrong numbers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.runtime import wire_formats

if TYPE_CHECKING:
    from fsdp2x.runtime.params import GroupParams

Facts = tuple[Any, ...]


@dataclass(frozen=True)
class UnitParams:
    """What of one unit, or of its part over one mesh, decides about the sizes of collectives."""

    name: str
    params: tuple[tuple[str, Facts], ...]  # (name, facts) in order


def facts_of(name: str, policy: MixedPrecisionPolicy, group: GroupParams, *, with_training: bool = False) -> UnitParams:
    """The facts of one group of the unit ``name``; with which of its parameters are trained, where that counts."""
    params = []
    shapes = group.shapes(policy.param_dtype, policy.reduce_dtype)
    for sharded, (_, _, _, original, compute, reduce, _) in zip(group.params, shapes, strict=True):
        facts = [tuple(sharded.local_size), f"cut along {sharded.spec.shard_dim}", str(original)]
        facts += [f"gathered as {compute}", f"reduced as {reduce}"]
        if with_training:
            facts.append("trained" if sharded.param.requires_grad else "frozen")
        if (state := group.unit_state()) is not None:
            facts += wire_formats.told(state.live_options())
        params.append((sharded.fqn or sharded.owners[0][1], tuple(facts)))
    return UnitParams(name, tuple(params))


def facts_of_model(name: str) -> UnitParams:
    """Tells models of the same units apart. ``name``: class, and number in the order of ``fully_shard`` calls."""
    return UnitParams(f"model {name}", ())


def digest(facts: list) -> bytes:
    """Equal for equal facts, such as ``UnitParams``."""
    return hashlib.sha256(repr(facts).encode()).digest()


def disagreement(of_rank: dict[int, list[UnitParams]]) -> str:
    """The first difference between the units of the first rank and of another one; "" when there is none."""
    first = next(iter(of_rank))
    for rank, units in of_rank.items():
        for is_unit in (True, False):  # a unit that differs tells more than the number of the model
            sides = ([one for one in side if bool(one.params) is is_unit] for side in (of_rank[first], units))
            for here, there in zip_longest(*sides):
                if here != there:
                    return f"rank {first} has {_text(here, there)}, rank {rank} {_text(there, here)}"
    return ""


def _text(unit: UnitParams | None, beside: UnitParams | None) -> str:
    if unit is None:
        return "no more units"
    text = f"unit {unit.name!r}" if unit.params else unit.name
    for param, other in zip_longest(unit.params, beside.params if beside is not None else unit.params):
        if param is None:
            return f"{text} with {len(unit.params)} parameters"
        if param != other:
            return f"{text} with {param[0]!r} ({', '.join(str(fact) for fact in param[1])})"
    return text
