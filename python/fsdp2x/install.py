"""``install()``: makes the names of ``torch.distributed.fsdp`` stand for ours, wherever they were imported.

Gradient clipping of ``torch.nn.utils`` is replaced, too (``optim/clip.py``).

What is replaced are functions, by identity: every global of a loaded module that *is* upstream's function becomes ours,
whatever its name there. Classes stay: ours are subclasses of upstream's, so ``isinstance`` holds for both kinds of
model, and a replaced class would break it for models that upstream sharded. Upstream's engine stays usable: each
replacement hands modules and calls that are not ours to the original.

Not found: a function kept in a closure, a default argument or an instance. Import such code after ``install()``.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.lifecycle import api
from fsdp2x.lifecycle.module import FSDPModule, register_fsdp_forward_method, share_comm_ctx
from fsdp2x.lifecycle.tree import get_state
from fsdp2x.optim import clip

logger = logging.getLogger("fsdp2x")

_active: Installation | None = None


class Installation:
    """What ``install()`` returns. As a context manager it uninstalls at the end of the block.

    Attributes:
        places: the globals that were rebound, as ``module.name``.
        auto_wrap: what ``install`` was given.
    """

    def __init__(self, replacements: dict[str, tuple[Callable, Callable]], auto_wrap: bool) -> None:
        self._replacements, self.auto_wrap = replacements, auto_wrap
        self._accelerate = _FollowAccelerate()
        self.places = _rebind({id(old): new for old, new in replacements.values()})

    @property
    def active(self) -> bool:
        """Whether the names still stand for ours."""
        return _active is self

    def uninstall(self) -> None:
        """Gives the names back to upstream, also in modules imported since. Sharded models stay ours. No-op if done."""
        global _active
        if not self.active:
            return
        _rebind({id(new): old for old, new in self._replacements.values()})
        self._accelerate.end()
        _active = None
        logger.log(_level(), "fsdp2x: uninstalled")

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.uninstall()


@checked
def install(*, auto_wrap: bool = False) -> Installation:
    """Rebinds upstream's functions to ours in all loaded modules; modules imported later find ours by themselves.

    ``fully_shard`` then behaves as upstream's does in one respect where ``fsdp2x.fully_shard`` differs: it never splits
    a HuggingFace model by itself (``auto_wrap=False`` unless passed), because who calls that name makes the units
    himself, or wants one. ``fully_shard.state`` knows the models of both.

    On CPUs accelerate, and so transformers' Trainer, would take DDP, or let every rank train alone, if a script asks
    for FSDP. With a plugin of version 2 it takes its FSDP path there, too. With one of version 1 a warning says that
    nothing is sharded. If accelerate was initialized before for one process, it raises ``RuntimeError``.

    Args:
        auto_wrap: for callers that shard a HuggingFace model by one call for the root alone: it is split into units as
            ``fsdp2x.fully_shard(model)`` splits it. Calls for parts, for models with sharded parts, for lists and for
            other modules are not changed.

    Returns:
        A handle with ``uninstall()``; the same one while installed.

    Raises:
        TypeError: ``auto_wrap`` is not a bool.
        ValueError: it is installed already with another ``auto_wrap``.
    """
    global _active
    if _active is not None and _active.auto_wrap != auto_wrap:
        raise ValueError(
            f"fsdp2x.install: it is installed with auto_wrap={_active.auto_wrap}, not {auto_wrap}: "
            "call fsdp2x.uninstall() before"
        )
    if _active is None:
        _active = Installation(_replacements(auto_wrap), auto_wrap)
        modules = {place.rpartition(".")[0] for place in _active.places}
        logger.log(_level(), "fsdp2x: installed in %d modules", len(modules))
    return _active


def uninstall() -> None:
    """Undoes :func:`install`; no-op when nothing is installed."""
    if _active is not None:
        _active.uninstall()


def _replacements(auto_wrap: bool) -> dict[str, tuple[Callable, Callable]]:
    """Name -> (upstream's function, what takes its place)."""
    pairs: dict[str, tuple[Callable, Callable]] = {
        "fully_shard": (torch_fsdp.fully_shard, _shard_as_upstream(torch_fsdp.fully_shard, auto_wrap))
    }
    for ours in (register_fsdp_forward_method, share_comm_ctx):
        theirs = getattr(torch_fsdp, ours.__name__)
        pairs[ours.__name__] = theirs, _ours_for_our_modules(theirs, ours)
    for name, (_, new) in pairs.items():
        # By this name pickle finds it, as it finds upstream's.
        new.__module__, new.__qualname__ = torch_fsdp.__name__, name
    return pairs | {theirs.__name__: (theirs, ours) for theirs, ours in clip.replacements()}


def _shard_as_upstream(upstream: Any, auto_wrap: bool) -> Callable:
    @functools.wraps(api.fully_shard)
    def sharded(module: nn.Module | list[nn.Module], **options: Any):
        options.setdefault("auto_wrap", None if auto_wrap else False)
        return api.fully_shard(module, **options)

    def state(module: nn.Module):
        # Upstream's function asks through its own global name, which is ours now, while it shards.
        ours = get_state(module)
        return upstream.state(module) if ours is None else ours

    fully_shard: Any = sharded
    fully_shard.state = state
    return fully_shard


def _ours_for_our_modules(theirs: Callable, ours: Callable) -> Callable:
    """``ours`` if the first argument is, or holds, a module that we sharded."""

    @functools.wraps(ours)
    def call(modules: nn.Module | list[nn.Module], *args: Any, **kwargs: Any):
        some = [modules] if isinstance(modules, nn.Module) else list(modules)
        chosen = ours if any(isinstance(module, FSDPModule) for module in some) else theirs
        return chosen(modules, *args, **kwargs)

    return call


def _rebind(by_id: dict[int, Callable]) -> list[str]:
    """Replaces globals by identity; returns where."""
    places = []
    for module_name, names in _modules():
        for name, value in list(names.items()):
            if id(value) in by_id:
                names[name] = by_id[id(value)]
                places.append(f"{module_name}.{name}")
    return sorted(places)


def _modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Globals of the loaded modules but our own. Read from ``__dict__``: attribute access would load lazy modules."""
    seen = set()
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and name.split(".")[0] != "fsdp2x" and id(module) not in seen:
            seen.add(id(module))
            yield name, vars(module)


def _level() -> int:
    return logging.INFO if os.environ.get("RANK", "0") == "0" else logging.DEBUG


# --- accelerate, which knows FSDP for accelerators only and takes DDP on a CPU ---

_STATE = "accelerate.state"


class _FollowAccelerate(importlib.abc.MetaPathFinder):
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
            if kwargs.get("fsdp_plugin") is not None and len(args) < 2 and _are_ranks_on_cpus():
                kwargs["cpu"] = True  # else accelerate would look for a GPU alone, and let every rank train by itself
            original(self, *args, **kwargs)
            if kwargs.get("fsdp_plugin") is not None:
                _take_fsdp(module, self, kwargs["fsdp_plugin"])

        def undo() -> None:
            cls.__init__ = original

        cls.__init__, self._undo = init, undo


def _are_ranks_on_cpus() -> bool:
    launched = "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    return launched and not torch.accelerator.is_available()


def _take_fsdp(module: types.ModuleType, state: Any, plugin: Any) -> None:
    """What accelerate itself does with a plugin on a device."""
    kinds = module.DistributedType
    if state.distributed_type is kinds.NO and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            "fsdp2x: accelerate was initialized without FSDP on a machine without an accelerator, so that every rank "
            "would train alone. Pass use_cpu=True to TrainingArguments, or cpu=True to whatever the script creates "
            "first (Accelerator, PartialState)"
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
