"""Hooks of one unit on its modules: around their forward, and on modules that are called without their root.

The engine's objects cannot take part in Python's cycle collection, so they must not refer to the modules.

``model.base_model.model(...)``, ``model.model(...)`` for hidden states, and ``model.lm_head(...)`` on them skip the
root. After a forward without gradients nothing is gathered, so these modules would see sharded weights.
``watch_entries`` makes such calls forwards of the root.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn

from fsdp2x.base import torch_private
from fsdp2x.base.annotations import follow_inputs, imported_package, skips_checks
from fsdp2x.base.native import _C
from fsdp2x.lifecycle.changes import watch_loading
from fsdp2x.lifecycle.tree import depth_of, get_state, is_running
from fsdp2x.lifecycle.unit import ShardedUnit
from fsdp2x.sharding.collect import managed_modules
from fsdp2x.sharding.wrap import only_looks_up


def _held_by_modules(state: ShardedUnit) -> Callable[[], ShardedUnit]:
    """Returns a weak reference for hooks. Their modules keep the unit alive while they run."""
    return cast("Callable[[], ShardedUnit]", weakref.ref(state))


def register_hooks(state: ShardedUnit, managed: list[nn.Module], lazy_init: Callable[[ShardedUnit], None]) -> None:
    """Registers the engine's hooks for ``state``, which call ``lazy_init`` before the first forward.

    ``managed`` are the modules of its parameters.
    """
    weak = _held_by_modules(state)

    @skips_checks
    def begin() -> None:
        lazy_init(weak())

    def explain(error: BaseException) -> None:
        explain_error(error, weak())

    hooked = [weakref.ref(hooks) for hooks in torch_private.backward_hooks(managed)]
    lookups = [module for module in state.modules if only_looks_up(module)] if len(state.modules) > 1 else []
    hooks = state.hooks = _C.UnitHooks(list(state.modules), lookups, begin, explain, is_running, hooked)
    hooks.set_marks(mark_inputs, mark_output)

    # Hooks, and all Python that the engine calls from them, stay outside of compiled graphs.
    before = hooks.pre_forward
    if imported_package() is not None:
        before = follow_inputs(before)
    before = torch_private.outside_graphs(before)
    after = torch_private.outside_graphs(hooks.post_forward)
    for module in state.modules:
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)
    watch_loading(state, {id(m): m for param in state.params for m, _ in param.owners}.values())


def follow_modules_of(
    root: ShardedUnit, follow_modules: Callable[[ShardedUnit], None], check: Callable[[ShardedUnit], None]
) -> None:
    """Calls ``follow_modules`` on ``root`` before each of its forwards, and ``check`` after them."""
    weak = _held_by_modules(root)

    @torch.compiler.disable
    def follow(module, args):
        follow_modules(weak())
        watch_entries(weak())

    @torch.compiler.disable
    def look(module, args, output):
        check(weak())

    root.modules[0].register_forward_pre_hook(follow, prepend=True)
    root.modules[0].register_forward_hook(look)


# --- calls that skip the root ---


def watch_entries(root: ShardedUnit) -> None:
    """Hooks modules that hold units or weights of the root's unit, at the first forward without gradients.

    If there are no units below, only modules that hold all weights: a hook on each small module would cost time.
    """
    if torch.is_grad_enabled() or root.shared.entered is not None:
        return
    root.shared.entered = lambda: None
    owners = {id(module) for param in root.params for module, _ in param.owners}
    below = managed_modules(root.modules, lambda module: get_state(module) is not None)[:-1]  # the root comes last
    for module in below:
        inner = {id(each) for each in module.modules()}
        holds_units = any(get_state(each) is not None for each in module.modules())
        if holds_units or owners <= inner or len(root.shared.tree) > 1 and id(module) in owners:
            _watch(root, module)


def _watch(root: ShardedUnit, module: nn.Module) -> None:
    weak = _held_by_modules(root)

    def enter(module: nn.Module, args: tuple, kwargs: dict):
        if torch.compiler.is_compiling():
            return None
        state = weak()
        if state.root is not None and (state.root.in_backward or not _begins_forward(state)):
            return None
        state.shared.entered = weakref.ref(module)
        return state.hooks.pre_forward(module, args, kwargs)

    def leave(module: nn.Module, args: tuple, output):
        if torch.compiler.is_compiling():
            return None
        state = weak()
        if state.shared.entered() is not module or depth_of(module) > 1:
            return None
        state.shared.entered = lambda: None
        return state.hooks.post_forward(module, args, output)

    module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


def _begins_forward(state: ShardedUnit) -> bool:
    """Returns whether the root is between steps and sharded, or an interrupt ended its forward."""
    if state.root is None or not state.root.in_forward:
        return state.made_unit.param_state == "SHARDED"
    entered = state.shared.entered()
    return entered is not None and not depth_of(entered) and not depth_of(state.modules[0])


# --- notes on exceptions that sharding caused ---


def explain_error(error: BaseException, root: ShardedUnit) -> None:
    """Adds a note if ``error`` came from a sharded weight that was used outside of its unit's forward."""
    if not isinstance(error, RuntimeError) or "DTensor" not in str(error):
        return
    owners = {id(param.param): (param.fqn, state) for state in root.shared.tree for param in state.params}
    found = _sharded_in(error.__traceback__, owners)
    if not found:
        return
    names = " or ".join(f"{name!r} of unit '{state.name}'" for name, state in found[:4])
    error.add_note(
        f"fsdp2x: {names} is sharded at this point (rank {root.ranks.rank}). It is complete only inside the forward of "
        "its unit's module. Call that module, call unshard() on it first, use "
        "fsdp2x.register_fsdp_forward_method for another method than forward, or put both modules into one unit with "
        "fully_shard([first, second])."
    )


def _sharded_in(traceback: TracebackType | None, owners: dict) -> list:
    """Finds sharded parameters in the innermost frame whose variables hold one or whose code names one."""
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        held = []
        for value in frame.f_locals.values():
            if isinstance(value, nn.Parameter):
                held.append(value)
            elif isinstance(value, nn.Module):
                held += [param for param in value._parameters.values() if param is not None]
        found = [owners[id(param)] for param in held if id(param) in owners]
        if not found and any(isinstance(value, nn.Module) for value in frame.f_locals.values()):
            spelled = set(frame.f_code.co_names)
            found = [owner for owner in owners.values() if _attributes(owner[0]) <= spelled]
        if found:
            return list(dict.fromkeys(found))
    return []


def _attributes(fqn: str) -> set[str]:
    return {part for part in fqn.split(".") if not part.isdigit()}


# --- the two autograd nodes of a unit's call, for torch.func's transforms, which only follow Python functions ---


def mark_inputs(call, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns ``tensors`` unchanged. Their backward ends ``call``, a ``_C.UnitCall``."""
    return list(_Mark.apply(call.end, False, *tensors))


def mark_output(unit, tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` unchanged. Its backward begins that of ``unit``, a ``_C.Unit``."""
    (marked,) = _Mark.apply(unit.pre_backward, True, tensor)
    return marked


class _Mark(torch.autograd.Function):
    """Returns tensors unchanged. Their backward calls ``act``, and so does that of tangents if ``marks_tangents``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(act: Callable[[], None], marks_tangents: bool, *tensors: torch.Tensor):
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.act, ctx.marks_tangents, *_ = inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        ctx.act()
        return None, None, *grads

    @staticmethod
    def jvp(ctx: Any, act: None, marks_tangents: None, *tangents: torch.Tensor | None):
        # The tangent of an output may be differentiated as well.
        marks = ctx.marks_tangents and all(tangent is not None for tangent in tangents)
        return _Mark.apply(ctx.act, True, *tangents) if marks else tangents
