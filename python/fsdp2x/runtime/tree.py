"""The units below a module: found, named after it, and checked before they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from fsdp2x.runtime.state import UnitState


_find_state: Callable[[nn.Module], UnitState | None] = lambda module: None  # noqa: E731


def find_states_by(find: Callable[[nn.Module], UnitState | None]) -> None:
    """``find`` looks up what ``fully_shard`` has registered on a module."""
    global _find_state
    _find_state = find


def get_state(module: nn.Module) -> UnitState | None:
    """The state of the unit that ``module`` is a root of, if any."""
    return _find_state(module)


def unit_states(model: nn.Module) -> list[UnitState]:
    """All units in ``model``, in the order of ``named_modules``."""
    found = {}
    for module in model.modules():
        if (state := get_state(module)) is not None:
            found.setdefault(id(state), state)
    return list(found.values())


def running_step(model: nn.Module) -> str | None:
    """ "forward" or "backward" where a unit in ``model`` is in one, else None."""
    for state in unit_states(model):
        if state.root is not None and (state.root.in_forward or state.root.in_backward):
            return "forward" if state.root.in_forward else "backward"
    return None


def find_tree(root: UnitState) -> list[UnitState]:
    """All units below the module of ``root``, which is about to run first; tells them the names of their modules.

    Raises:
        RuntimeError: one of them has run before, or was set up as if it were the root.
    """
    tree: dict[int, UnitState] = {}
    for name, module in root.modules[0].named_modules():
        state = get_state(module)
        if state is None:
            continue
        if state is not root and state.is_root is not None:
            raise RuntimeError(
                f"FSDP state has already been lazily initialized for {name}\n"
                "FSDP requires running forward through the root module first"
            )
        if state is not root and state.manual_finalization:
            raise RuntimeError(
                f"set_manual_backward_finalization must be called on the root FSDP module, not on '{name}'"
            )
        if id(state) not in tree:
            state.names = []
            tree[id(state)] = state
        state.names.append(name)
    return list(tree.values())


def set_names(root: UnitState, tree: list[UnitState]) -> None:
    """Gives the parameters their first names from the module of ``root``, whatever it registers at the moment."""
    records = {(id(m), name): param for state in tree for param in state.params for m, name in param.owners}
    named = set()
    for prefix, module in root.modules[0].named_modules():
        for name in module._parameters:
            param = records.get((id(module), name))
            if param is not None and id(param) not in named:
                named.add(id(param))
                param.fqn = f"{prefix}.{name}" if prefix else name
    for state in tree:
        for group in state.groups:
            group.module_fqn = ", ".join(state.names)
        if state.unit is not None:
            state.unit.rename(state.name, [[param.fqn for param in group.params] for group in state.groups])


def check_tree(tree: list[UnitState]) -> None:
    """Checks of upstream's lazy initialization, over all units of a root."""
    seen: dict[int, str] = {}
    for state in tree:
        meta = [param.fqn or param.owners[0][1] for param in state.params if param.param.is_meta]
        if meta:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the following were "
                f"still on meta device: {meta}\nFor example, call module.to_empty(device) to materialize to device and "
                "call module.reset_parameters() on each module to initialize values."
            )
        for param in state.params:
            if param.original in seen:
                raise ValueError(
                    f"Parameter '{param.fqn}' is shared with a parameter already managed by another FSDP group. "
                    "For shared/tied parameters, use fully_shard([module_a, module_b]) to place them in the same "
                    "FSDP group."
                )
            seen[param.original] = param.fqn
