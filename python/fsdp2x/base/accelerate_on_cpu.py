"""accelerate on a CPU: it knows FSDP for accelerators only, and takes DDP without a word where a script asks for FSDP.

While ``install()`` holds, its state decides as it does on a device, whether it was imported before or comes later.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import types
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("fsdp2x")

_STATE = "accelerate.state"


class FollowAccelerate(importlib.abc.MetaPathFinder):
    """Follows ``accelerate.state``, now or when it is imported, until ``end()``."""

    def __init__(self) -> None:
        self._undo: Callable[[], None] | None = None
        if _STATE in sys.modules:
            self._follow(sys.modules[_STATE])
        else:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._undo is not None:
            self._undo()
            self._undo = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != _STATE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._follow(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _follow(self, module: types.ModuleType) -> None:
        cls = module.AcceleratorState
        original = cls.__init__

        @functools.wraps(original)
        def init(self, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if kwargs.get("fsdp_plugin") is not None:
                _take_fsdp(module, self, kwargs["fsdp_plugin"])

        def undo() -> None:
            cls.__init__ = original

        cls.__init__, self._undo = init, undo


def _take_fsdp(module: types.ModuleType, state: Any, plugin: Any) -> None:
    """What accelerate itself does with a plugin on a device."""
    kinds = module.DistributedType
    if state.distributed_type is kinds.NO and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        logger.warning(
            "fsdp2x: accelerate found no accelerator and lets every rank train alone, nothing is sharded: pass "
            "Accelerator(cpu=True), use_cpu=True to the Trainer, or set ACCELERATE_USE_CPU=true"
        )
    if state.distributed_type is not kinds.MULTI_CPU:
        return
    if plugin.fsdp_version != 2:
        logger.warning(
            "fsdp2x: accelerate takes DDP for this model, nothing is sharded: its FSDP plugin is of version %s; pass "
            "FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp_config={'version': 2} to the Trainer",
            plugin.fsdp_version,
        )
        return
    state.distributed_type = module.PartialState._shared_state["distributed_type"] = kinds.FSDP
    if state._mixed_precision != "no":
        plugin.set_mixed_precision(state._mixed_precision)
    state.fsdp_plugin = plugin
