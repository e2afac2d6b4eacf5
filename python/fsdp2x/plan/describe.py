"""``describe``: reports the units of a sharded model in a readable form, from the layouts that run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.base.native import _C
from fsdp2x.lifecycle.tree import roots_of, unit_states
from fsdp2x.lifecycle.unit import ShardedUnit
from fsdp2x.optim.muon import Muon
from fsdp2x.optim.muon.split import describe_groups
from fsdp2x.plan.report import columns


@dataclass(frozen=True)
class UnitReport:
    """One unit. Bytes are per rank. ``slot_bytes`` is the full unit in the compute dtype."""

    name: str
    params: tuple[str, ...]
    num_elements: int
    trainable_elements: int
    shard_bytes: int
    slot_bytes: int
    reshard_after_forward: bool
    param_state: str


@dataclass(frozen=True)
class ModelReport:
    """All units of a model. ``str()`` prints a table.

    ``matrices``: the blocks that ``Muon`` orthogonalizes, one line for all layers.
    """

    units: tuple[UnitReport, ...]
    world: int
    transport: str
    stats: dict
    matrices: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = ("unit", "params", "elements", "shard bytes", "slot bytes", "reshard", "state")
        rows = [
            (
                unit.name,
                str(len(unit.params)),
                f"{unit.num_elements:,}",
                f"{unit.shard_bytes:,}",
                f"{unit.slot_bytes:,}",
                "yes" if unit.reshard_after_forward else "no",
                unit.param_state.lower(),
            )
            for unit in self.units
        ]
        total = (
            "total",
            str(sum(len(unit.params) for unit in self.units)),
            f"{sum(unit.num_elements for unit in self.units):,}",
            f"{sum(unit.shard_bytes for unit in self.units):,}",
            f"{max((unit.slot_bytes for unit in self.units), default=0):,} max",
            "",
            "",
        )
        tail = f"{self.world} rank(s), transport {self.transport}"
        if self.stats:
            tail += (
                f", gather slots owned {self.stats['gather_slots_owned']} "
                f"(peak {self.stats['peak_gather_bytes']:,} bytes), owners: {'; '.join(self.stats['owners']) or 'none'}"
            )
        return "\n".join([*columns([head, *rows, total]), tail, *self.matrices])


@checked
def describe(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> ModelReport:
    """Reports the units of ``model`` with their parameters, elements, bytes and gather buffers. Not collective.

    With a ``Muon`` as ``optimizer`` it also lists which parameters fall into blocks. Others add nothing.

    Raises:
        ValueError: nothing in ``model`` is sharded.
    """
    states = unit_states(model)
    if not states:
        raise ValueError(f"fsdp2x.describe: {type(model).__name__} has no unit. Call fsdp2x.fully_shard(model) first.")
    names = {id(module): name for name, module in model.named_modules()}
    fqns = {id(param): name for name, param in model.named_parameters(remove_duplicate=True)}
    root = next(iter(roots_of(states)), None)
    return ModelReport(
        units=tuple(_report(state, names, fqns) for state in states),
        world=states[0].ranks.world,
        transport=_transports(states),
        stats=root.stats() if root is not None else {},
        matrices=tuple(describe_groups(optimizer.param_groups, fqns)) if isinstance(optimizer, Muon) else (),
    )


def _transports(states: list[ShardedUnit]) -> str:
    groups = [group for state in states for group in state.groups if not group.is_replicated]
    engines = [group.engine for group in groups if group.engine is not None]
    return ", ".join(dict.fromkeys(engine.transport_name for engine in engines)) or (
        f"{states[0].settings.transport} (not initialized)"
    )


def _report(state: ShardedUnit, names: dict[int, str], fqns: dict[int, str]) -> UnitReport:
    params = state.params
    layouts = [_C.Layout(group.shapes(), group.ranks.world, group.ranks.rank) for group in state.groups]
    return UnitReport(
        name=", ".join(names.get(id(module), "?") or "<root>" for module in state.modules),
        params=tuple(fqns.get(id(param.param), param.label) for param in params),
        num_elements=sum(param.local_size.numel() for param in params),
        trainable_elements=sum(param.local_size.numel() for param in params if param.param.requires_grad),
        shard_bytes=sum(layout.shard_pool_bytes for layout in layouts),
        slot_bytes=sum(layout.slot_bytes for layout in layouts),
        reshard_after_forward=state.options.reshard_after_forward,
        param_state=state.unit.param_state if state.unit is not None else "SHARDED",
    )
