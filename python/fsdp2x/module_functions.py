"""Functions over sharded modules that upstream has beside ``FSDPModule``: shared streams, and other forward methods."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from fsdp2x.arguments import checked
from fsdp2x.module import FSDPModule, sharded_modules


@checked(own=("modules",))
def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Lets several roots share device streams, for pipeline stages. No effect on the CPU, which has none.

    Slots and reduction buffers stay each root's own, as upstream's gathered parameters do.

    Raises:
        ValueError: one of ``modules`` is not sharded.
        RuntimeError: called during forward or backward.
    """
    modules = sharded_modules("share_comm_ctx", modules)
    states = [module._get_fsdp_state() for module in modules]
    layers = next((state.layers for state in states if state.layers is not None), {})
    for state in states:
        state.layers = layers
        state.remake_transports("streams")


@checked
def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes ``module.method_name`` gather and free the parameters as ``forward`` does. No-op on unsharded modules.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    original = getattr(module, method_name)

    def call_sharded_method(self, *args: Any, **kwargs: Any):
        state = self._get_fsdp_state()
        hooks = state.hooks
        try:
            state.follow_modules()
            if (changed := hooks.pre_forward(self, args, kwargs)) is not None:
                args, kwargs = changed
            output = original(*args, **kwargs)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                hooks.post_forward(self, args, None)
            raise
        changed = hooks.post_forward(self, args, output)
        return output if changed is None else changed

    call_sharded_method.__name__ = method_name
    setattr(module, method_name, call_sharded_method.__get__(module, type(module)))
