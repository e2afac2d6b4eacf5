"""Makes calls of modules below the root forwards of the root, if the root itself was not called. Owns nothing.

``model.base_model.model(...)``, ``model.model(...)`` for hidden states, and ``model.lm_head(...)`` on them skip the
root. After a forward without gradients nothing is gathered, so these modules would see sharded weights.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp2x.runtime.collect import managed_modules
from fsdp2x.runtime.frames import depth_of
from fsdp2x.runtime.tree import get_state

if TYPE_CHECKING:
    from fsdp2x.runtime.state import UnitState


def watch_entries(root: UnitState) -> None:
    """Hooks modules that hold units or weights of the root's unit, at the first forward without gradients.

    Without units below, only modules that hold all weights: a hook on each small module would cost time.
    """
    if torch.is_grad_enabled() or root.entered is not None:
        return
    root.entered = lambda: None
    owners = {id(module) for param in root.params for module, _ in param.owners}
    below = managed_modules(root.modules, lambda module: get_state(module) is not None)[:-1]  # the root comes last
    for module in below:
        inner = {id(each) for each in module.modules()}
        holds_units = any(get_state(each) is not None for each in module.modules())
        if holds_units or owners <= inner or len(root.tree) > 1 and id(module) in owners:
            _watch(root, module)


def _watch(root: UnitState, module: nn.Module) -> None:
    weak = weakref.ref(root)

    def enter(module: nn.Module, args: tuple, kwargs: dict):
        if torch.compiler.is_compiling():
            return None
        state = weak()
        if state.root is not None and (state.root.in_backward or not _begins_forward(state)):
            return None
        state.entered = weakref.ref(module)
        return state.hooks.pre_forward(module, args, kwargs)

    def leave(module: nn.Module, args: tuple, output):
        if torch.compiler.is_compiling() or (state := weak()).entered() is not module or depth_of(module) > 1:
            return None
        state.entered = lambda: None
        return state.hooks.post_forward(module, args, output)

    module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


def _begins_forward(state: UnitState) -> bool:
    """Whether the root is between steps and sharded, or an interrupt ended its forward."""
    if not state.root.in_forward:
        return state.unit.param_state == "SHARDED"
    entered = state.entered()
    return entered is not None and not depth_of(entered) and not depth_of(state.modules[0])
