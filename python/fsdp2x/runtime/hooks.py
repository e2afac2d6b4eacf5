"""Registers the hooks of one unit on its modules: around their forward, and around their state dicts. Owns nothing.

The engine's objects cannot take part in Python's cycle collection: they must not lead back to the modules.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from fsdp2x.runtime import annotations, replicas, torch_private, transforms
from fsdp2x.runtime.explain import explain_error
from fsdp2x.runtime.frames import is_running
from fsdp2x.runtime.native import _C
from fsdp2x.runtime.past_root import watch_entries
from fsdp2x.runtime.swapped import refuse_swapped

if TYPE_CHECKING:
    from fsdp2x.runtime.state import UnitState


def register_hooks(state: UnitState, managed: list[nn.Module]) -> None:
    """Gives ``state`` its engine's hooks; ``managed``: the modules of its parameters."""
    weak = weakref.ref(state)

    @annotations.skips_checks
    def lazy_init() -> None:
        weak().lazy_init()

    def explain(error: BaseException) -> None:
        explain_error(error, weak())

    hooked = [weakref.ref(hooks) for hooks in torch_private.backward_hooks(managed)]
    hooks = state.hooks = _C.UnitHooks(list(state.modules), lazy_init, explain, is_running, hooked)
    hooks.set_marks(transforms.mark_inputs, transforms.mark_output)

    # Hooks stay outside of compiled graphs, with all Python that the engine calls from them.
    # They do not hold the engine's: Dynamo's wrappers live until the cycle collector runs.
    def engine_pre_forward(module, args, kwargs):
        return weak().hooks.pre_forward(module, args, kwargs)

    if annotations.imported_package() is not None:
        engine_pre_forward = annotations.follow_inputs(engine_pre_forward)

    @torch_private.never_compiled
    def pre_forward(module, args, kwargs):
        return engine_pre_forward(module, args, kwargs)

    @torch_private.never_compiled
    def checked_pre_forward(module, args, kwargs):
        weak().check_pools()
        return engine_pre_forward(module, args, kwargs)

    if os.environ.get("FSDP2X_DEBUG", "0") not in ("", "0"):
        pre_forward = checked_pre_forward

    @torch_private.never_compiled
    def post_forward(module, args, output):
        return weak().hooks.post_forward(module, args, output)

    for module in state.modules:
        module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(post_forward, always_call=True)
    watch_loading(state, {id(m): m for param in state.params for m, _ in param.owners}.values())


def watch_loading(state: UnitState, modules: Iterable[nn.Module]) -> None:
    """State dicts of ``modules`` are read from, and loaded into, the sharded parameters of ``state``."""
    weak = weakref.ref(state)
    for module in modules:
        module.register_state_dict_pre_hook(lambda *args: weak().reshard())
        module._register_load_state_dict_pre_hook(lambda *args: before_load(weak()))
        module.register_load_state_dict_post_hook(lambda *args: weak().adopt())
        module.register_load_state_dict_post_hook(lambda *args: replicas.check_again(weak()))


def before_load(state: UnitState) -> None:
    refuse_swapped("load_state_dict", (param.param for param in state.params))
    state.reshard()


def follow_modules_of(root: UnitState) -> None:
    """``root`` looks at its modules before each of its forwards."""
    weak = weakref.ref(root)

    @torch_private.never_compiled
    def follow(module, args):
        weak().follow_modules()
        watch_entries(weak())

    root.modules[0].register_forward_pre_hook(follow, prepend=True)
