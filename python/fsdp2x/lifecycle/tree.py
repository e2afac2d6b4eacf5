"""Finds the units below a module, names them after it, and checks them before they run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

from torch import nn

from fsdp2x.base import torch_private
from fsdp2x.lifecycle.unit import ShardedUnit
from fsdp2x.sharding.sharded_param import ShardedParam


def get_state(module: nn.Module) -> ShardedUnit | None:
    """Returns the state of the unit whose root module is ``module``, if any."""
    return torch_private.state_of(module, ShardedUnit)


def unit_states(model: nn.Module) -> list[ShardedUnit]:
    """Returns all units in ``model``, in the order of ``named_modules``."""
    found = {}
    for module in model.modules():
        if (state := get_state(module)) is not None:
            found.setdefault(id(state), state)
    return list(found.values())


def roots_of(states: Iterable[ShardedUnit]) -> list:
    """Returns the engine's roots of ``states``, each once, for those that have run."""
    return list({id(state.root): state.root for state in states if state.root is not None}.values())


def running_step(model: nn.Module) -> str | None:
    """Returns "forward" or "backward" if a unit in ``model`` is in one, else None."""
    for state in unit_states(model):
        if state.root is not None and state.is_running:
            return "forward" if state.root.in_forward else "backward"
    return None


def find_tree(root: ShardedUnit) -> list[ShardedUnit]:
    """Returns all units below the module of ``root``, which is about to run first.

    Raises:
        RuntimeError: one of them has already run, or was set up as the root.
    """
    tree: dict[int, ShardedUnit] = {}
    for name, module in root.modules[0].named_modules():
        state = get_state(module)
        if state is None:
            continue
        if state is not root and state.is_root is not None:
            raise RuntimeError(
                f"FSDP state has already been lazily initialized for {name}\n"
                "FSDP requires running forward through the root module first"
            )
        if state is not root and state.shared.settings.manual_finalization:
            raise RuntimeError(
                f"set_manual_backward_finalization must be called on the root FSDP module, not on '{name}'"
            )
        tree[id(state)] = state
    return list(tree.values())


def name_units(root: ShardedUnit, tree: Sequence[ShardedUnit]) -> None:
    """Gives the units the names of their modules below that of ``root``."""
    for state in tree:
        state.names = []
    for name, module in root.modules[0].named_modules():
        if (state := get_state(module)) is not None and state in tree:
            state.names.append(name)


def set_names(root: ShardedUnit, tree: Sequence[ShardedUnit]) -> None:
    """Gives the parameters their first names from the module of ``root``, whatever it registers now."""
    records = {(id(m), name): param for state in tree for param in state.params for m, name in param.owners}
    named = set()
    for prefix, module in root.modules[0].named_modules():
        for name in module._parameters:
            param = records.get((id(module), name))
            if param is not None and id(param) not in named:
                named.add(id(param))
                param.fqn = f"{prefix}.{name}" if prefix else name
    for state in tree:
        if state.unit is not None:
            joined = [group for group in state.groups if group.engine is not None]
            state.unit.rename(state.name, [[param.fqn for param in group.params] for group in joined])


def check_tree(tree: Sequence[ShardedUnit]) -> None:
    """Runs the checks of FSDP2's lazy initialization over all units of a root, and checks that settings agree."""
    refuse_unregistered("fully_shard", tree)
    seen: dict[int, str] = {}
    for state in tree:
        meta = [param.label for param in state.params if param.param.is_meta]
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
    caller: str, tree: Sequence[ShardedUnit], *, separate: bool = False, registered: bool = False
) -> None:
    """Raises ValueError if reductions would use a process group that their buffers are not registered with.

    ``separate`` and ``registered`` are what ``caller`` is about to set.
    """
    separate = separate or any(state.comms.separate_reduction for state in tree)
    if separate and (registered or any(state.comms.memory is not None for state in tree)):
        raise ValueError(
            f"fsdp2x.{caller}: set_separate_reduce_scatter_group reduces over another process group than the one with "
            "registered memory. Reductions would be slower than with one setting alone. Use either it, or "
            "set_symm_mem_for_comm or set_allocate_memory_from_process_group_for_comm."
        )


def units_of(model: nn.Module, caller: str) -> list[ShardedUnit]:
    """Returns all units in ``model``, in the order of ``named_modules``.

    Raises:
        ValueError: there is none. The message starts with ``caller``.
    """
    states = unit_states(model)
    if not states:
        raise ValueError(
            f"fsdp2x.{caller}: nothing in this {type(model).__name__} is sharded by fsdp2x. Call "
            "fsdp2x.fully_shard(model) first."
        )
    return states


def named_params(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ShardedParam | None]]:
    """Yields (FQN, parameter, its record) in the order of ``model.named_parameters()``, ties once.

    The parameter is the sharded one, even while its unit is unsharded. The record is None outside of any unit.
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


# --- calls on the stack of this thread ---

# Code that calls a sharded module between its hooks: nn.Module's, also as Dynamo cuts it, and fsdp2x's for methods.
_CALLERS = re.compile(r"(?<!_wrapped)_call_impl|call_sharded_method")


def is_running(module: nn.Module) -> bool:
    """Returns whether an outer call of ``module`` is running on this thread. Call it from its pre-forward hook."""
    num_calls = 0
    frame = sys._getframe(1)
    while frame is not None:
        if _CALLERS.search(frame.f_code.co_name) and frame.f_locals.get("self") is module:
            num_calls += 1
        frame = frame.f_back
    return num_calls > 1


def is_on_a_stack(root: nn.Module) -> bool:
    """Returns whether a call of ``root`` or of a module inside it is running on any thread."""
    inside = {id(module) for module in root.modules()}
    return any(id(called) in inside for frame in sys._current_frames().values() for called in _called(frame))


def depth_of(module: nn.Module) -> int:
    """Returns how many calls of ``module`` are on the stack of this thread."""
    return sum(called is module for called in _called(sys._getframe(1)))


def _called(frame: FrameType | None) -> Iterator[Any]:
    """Yields the modules whose calls are on the stack of ``frame``, the innermost first."""
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            yield frame.f_locals.get("self")
        frame = frame.f_back
