"""Finds the units and sharded parameters of a model for the helpers above the engine; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fsdp2x.runtime.sharded_param import ShardedParam
from fsdp2x.runtime.state import UnitState
from fsdp2x.runtime.tree import unit_states


def units_of(model: nn.Module, caller: str) -> list[UnitState]:
    """All units in ``model``, in the order of ``named_modules``.

    Raises:
        ValueError: there is none; the message starts with ``caller``.
    """
    states = unit_states(model)
    if not states:
        raise ValueError(
            f"fsdp2x.{caller}: nothing in this {type(model).__name__} is sharded by fsdp2x; call "
            "fsdp2x.fully_shard(model) first"
        )
    return states


def named_params(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ShardedParam | None]]:
    """(FQN, parameter, its record) as ``model.named_parameters()`` orders them, ties once.

    The parameter is the sharded one also while its unit is unsharded; the record is None for one outside of any unit.
    """
    sharded = {
        (id(module), name): record
        for state in unit_states(model)
        for record in state.params
        for module, name in record.owners
    }
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            record = sharded.get((id(module), name))
            current = param if record is None else record.param
            if current is not None and id(current) not in seen:
                seen.add(id(current))
                yield f"{prefix}.{name}" if prefix else name, current, record
