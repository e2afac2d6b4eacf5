"""The units below a module: found, named after it, and checked before they run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from fsdp2x.runtime.state import UnitState

# A module, weakly, since its number may be another's when it is gone; and the names that it registers parameters under.
Place = tuple[weakref.ref[nn.Module], frozenset[str]]

_find_state: Callable[[nn.Module], UnitState | None] = lambda module: None  # noqa: E731


class WeakTuple:
    """An attribute for objects that hold the one it belongs to: what it is set to, held weakly.

    So a model and its engine go when nobody refers to the model any more, without Python's cycle collector.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = f"_{name}_refs"

    def __get__(self, instance: Any, owner: type | None = None) -> tuple:
        found = (ref() for ref in instance.__dict__.get(self._key, ()))
        return tuple(value for value in found if value is not None)

    def __set__(self, instance: Any, values: Iterable) -> None:
        instance.__dict__[self._key] = [weakref.ref(value) for value in values]


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


def roots_of(states: Iterable[UnitState]) -> list:
    """The engine's roots of ``states``, each once; of those that have run."""
    return list({id(state.root): state.root for state in states if state.root is not None}.values())


def units_of_root(state: UnitState) -> list[UnitState]:
    """``state`` and all units under its root; before that is made, ``state`` alone."""
    root = state.root_state()
    return [state, *(root.tree if root is not None else ())]


def running_step(model: nn.Module) -> str | None:
    """ "forward" or "backward" where a unit in ``model`` is in one, else None."""
    for state in unit_states(model):
        if state.root is not None and (state.root.in_forward or state.root.in_backward):
            return "forward" if state.root.in_forward else "backward"
    return None


def find_tree(root: UnitState) -> list[UnitState]:
    """All units below the module of ``root``, which is about to run first.

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
        tree[id(state)] = state
    return list(tree.values())


def name_units(root: UnitState, tree: list[UnitState]) -> None:
    """Tells the units the names of their modules below that of ``root``."""
    for state in tree:
        state.names = []
    for name, module in root.modules[0].named_modules():
        if (state := get_state(module)) in tree:
            state.names.append(name)


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
            joined = [group for group in state.groups if group.engine is not None]
            state.unit.rename(state.name, [[param.fqn for param in group.params] for group in joined])


def check_tree(tree: list[UnitState]) -> None:
    """Checks of upstream's lazy initialization, over all units of a root, and of settings beside each other."""
    refuse_unregistered("fully_shard", tree)
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


def refuse_unregistered(
    caller: str, tree: list[UnitState], *, separate: bool = False, registered: bool = False
) -> None:
    """Raises ValueError where reductions would have a process group that their buffers are not registered with.

    ``separate``, ``registered``: what ``caller`` is about to set.
    """
    separate = separate or any(state.comms.separate_reduction for state in tree)
    if separate and (registered or any(state.comm_memory is not None for state in tree)):
        raise ValueError(
            f"fsdp2x.{caller}: set_separate_reduce_scatter_group reduces over another process group than the one that "
            "set_symm_mem_for_comm and set_allocate_memory_from_process_group_for_comm register memory with, so that "
            "reductions would be slower than with either alone. Use one of them"
        )


def places_in(modules: Iterable[nn.Module]) -> list[Place]:
    """Where ``modules`` register parameters at the moment."""
    found = []
    for module in modules:
        if names := frozenset(name for name, param in module._parameters.items() if param is not None):
            found.append((weakref.ref(module), names))
    return found
