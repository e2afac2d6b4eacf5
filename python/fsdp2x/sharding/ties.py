"""Makes a list of planned units legal: each parameter in one unit, inner units before outer ones.

A parameter with several owners (tied weights), or an owner that is reachable through several units (a shared module),
may be gathered by one unit only. The owners' units are joined:

* an owner that is itself a module of a unit brings the whole unit (embedding and head);
* a leaf owner inside a larger unit is carved out and becomes a module of the joined unit (a Linear shared by blocks);
* any other owner inside a unit brings the whole unit (a block with a parameter of its own);
* an owner outside of all units joins by itself, unless it is the root, a container or holds other units: then nothing
  can be joined, the units involved are dissolved, and their parameters belong to the root.

The root is gathered from the start of forward to the end of backward, so that dissolving is always correct.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

# Its parent reads the weight directly and never calls it, so that hooks on it would not run.
_NEVER_CALLED = ("NonDynamicallyQuantizableLinear",)


@dataclass(frozen=True)
class UnitPlan:
    """One call of ``fully_shard``: the modules to shard together, none of which contains another.

    ``names`` are their paths from the model, in the same order. ``reshard_after_forward`` None means "what the caller
    asked for". ``reason`` is one sentence for reports.
    """

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    reshard_after_forward: bool | None
    reason: str


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called, so that hooks on it run (ModuleList and ModuleDict cannot)."""
    return type(module).forward is not nn.Module.forward


def join_ties(model: nn.Module, units: list[UnitPlan], ignored: Collection[int] = ()) -> list[UnitPlan]:
    """Joins, carves out or dissolves units until no parameter is owned by two. ``ignored`` holds ids of parameters."""
    names = {module: name for name, module in model.named_modules()}
    rooted: set[nn.Module] = set()  # owners that only the root can hold; grows with each dissolution, so the loop ends
    while (tie := next(_ties(model, units, ignored), None)) is not None:
        label, owners = tie
        joined = _joined(model, units, owners, rooted)
        involved = {i for _, i in owners if i is not None}
        if joined is None:
            rooted.update(owner for owner, _ in owners)
            units = [unit for i, unit in enumerate(units) if i not in involved]
            continue
        whole = {i for i in involved if any(module in joined for module in units[i].modules)}
        carved = any(owner in joined and i not in whole for owner, i in owners)
        kept = carved or any(units[i].reshard_after_forward is False for i in whole)
        tied = dict.fromkeys(f"{names[owner]}.{label.rpartition('.')[2]}" for owner, _ in owners)
        reason = f"tied: {' = '.join(tied)}" if len(tied) > 1 else f"shared module: {names[owners[0][0]]}"
        unit = UnitPlan(tuple(joined), tuple(names[m] for m in joined), False if kept else None, reason)
        units = [other for i, other in enumerate(units) if i not in whole] + [unit]
    return units


def _ties(
    model: nn.Module, units: list[UnitPlan], ignored: Collection[int]
) -> Iterator[tuple[str, list[tuple[nn.Module, int | None]]]]:
    """(path of the parameter, [(owner, index of its unit or None for the root)]) for parameters of several units."""
    unit_of = {module: i for i, unit in enumerate(units) for module in unit.modules}
    owners: dict[nn.Parameter, tuple[str, dict[tuple[nn.Module, int | None], None]]] = {}
    visited: set[tuple[nn.Module, int | None]] = set()

    def visit(name: str, module: nn.Module, unit: int | None) -> None:
        unit = unit_of.get(module, unit)
        if (module, unit) in visited:
            return
        visited.add((module, unit))
        for key, param in module._parameters.items():
            if param is not None and id(param) not in ignored and not isinstance(param, DTensor):
                owners.setdefault(param, (name + key, {}))[1][module, unit] = None
        for key, child in module.named_children():
            visit(f"{name}{key}.", child, unit)

    visit("", model, None)
    for label, pairs in owners.values():
        if len({unit for _, unit in pairs}) > 1:
            yield label, list(pairs)


def _joined(
    model: nn.Module, units: list[UnitPlan], owners: list[tuple[nn.Module, int | None]], rooted: set[nn.Module]
) -> list[nn.Module] | None:
    """The modules of the unit that holds the parameter of these owners, or None when only the root can."""
    planned = {module for unit in units for module in unit.modules}
    joined: dict[nn.Module, None] = {}
    for owner, i in owners:
        called = has_forward(owner) and type(owner).__name__ not in _NEVER_CALLED
        leaf = called and not any(True for _ in owner.children())
        if owner in rooted or owner is model:
            return None
        if i is not None and (owner in units[i].modules or not leaf):
            joined.update(dict.fromkeys(units[i].modules))
        elif called:
            joined[owner] = None
        else:
            return None
    joined_below = {module for outer in joined for module in outer.modules() if module is not outer}
    outside = [owner for owner, i in owners if i is None]
    if any(module in planned and module not in joined for owner in outside for module in owner.modules()):
        return None
    return [module for module in joined if module not in joined_below]


def sort_bottom_up(model: nn.Module, units: list[UnitPlan]) -> list[UnitPlan]:
    """Inner units first, otherwise in order of registration. Two units that contain parts of each other are joined."""
    position = {module: i for i, module in enumerate(model.modules())}
    waiting = sorted(units, key=lambda unit: max(position[module] for module in unit.modules))
    ordered: list[UnitPlan] = []
    while waiting:
        ready = next((unit for unit in waiting if not any(_contains(unit, o) for o in waiting if o is not unit)), None)
        if ready is None:
            waiting.append(_union(waiting.pop(0), waiting.pop(0)))
        else:
            waiting.remove(ready)
            ordered.append(ready)
    return ordered


def _contains(outer: UnitPlan, inner: UnitPlan) -> bool:
    below = {module for top in outer.modules for module in top.modules()}
    return any(module in below for module in inner.modules)


def _union(one: UnitPlan, other: UnitPlan) -> UnitPlan:
    named = dict(zip(one.modules + other.modules, one.names + other.names, strict=True))
    below = {module for top in named for module in top.modules() if module is not top}
    outermost = {module: name for module, name in named.items() if module not in below}
    kept = False in (one.reshard_after_forward, other.reshard_after_forward)
    reason = f"{one.reason}; {other.reason}"
    return UnitPlan(tuple(outermost), tuple(outermost.values()), False if kept else None, reason)
