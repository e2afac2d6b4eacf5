"""``install()``: replaces the functions of ``torch.distributed.fsdp`` by fsdp2x's, wherever they were imported.

It also replaces gradient clipping of ``torch.nn.utils`` (``optim/clip.py``).

It replaces functions by identity: every global of a loaded module that *is* FSDP2's function becomes fsdp2x's, whatever
its name. Classes stay, because fsdp2x's classes are subclasses of FSDP2's. So ``isinstance`` works for both kinds of
models; a replaced class would break it for models that FSDP2 sharded. FSDP2 stays usable: each replacement passes
modules and calls that do not belong to fsdp2x to the original function.

It does not find functions in closures, default arguments, or instances. Import such code after ``install()``.
"""

from __future__ import annotations

import contextlib
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
from fsdp2x.lifecycle.contexts import unsharded
from fsdp2x.lifecycle.module import FSDPModule, register_fsdp_forward_method, share_comm_ctx
from fsdp2x.lifecycle.tree import get_state, unit_states
from fsdp2x.optim import clip

logger = logging.getLogger("fsdp2x")

_active: Installation | None = None


class Installation:
    """Handle that ``install()`` returns. As a context manager it uninstalls at the end of the block.

    Attributes:
        places: rebound globals, as ``module.name``.
        auto_wrap: the argument of ``install``.
    """

    def __init__(self, replacements: dict[str, tuple[Callable, Callable]], auto_wrap: bool) -> None:
        self._replacements, self.auto_wrap = replacements, auto_wrap
        self._followers = [
            _Follower("accelerate.state", _shard_on_cpus),
            _Follower("accelerate.accelerator", _prepare_to_evaluate),
            _Follower("trl.models.utils", _unshard_once),
        ]
        self.places = _rebind({id(old): new for old, new in replacements.values()})

    @property
    def active(self) -> bool:
        """Whether fsdp2x's functions are in place."""
        return _active is self

    def uninstall(self) -> None:
        """Restores FSDP2's functions, also in modules imported since. Sharded models stay as they are. May repeat."""
        global _active
        if not self.active:
            return
        _rebind({id(new): old for old, new in self._replacements.values()})
        for follower in self._followers:
            follower.end()
        _active = None
        logger.log(_level(), "fsdp2x: uninstalled")

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.uninstall()


@checked
def install(*, auto_wrap: bool = False) -> Installation:
    """Replaces FSDP2's functions by fsdp2x's in all loaded modules and in modules that are imported later.

    Use it for scripts and frameworks that import ``fully_shard`` from torch. Code written for FSDP2 chooses its own
    units, so ``fully_shard`` then splits a HuggingFace model only if you pass ``auto_wrap=True``.
    ``fully_shard.state`` works for models of both engines.

    On CPU, accelerate and transformers' Trainer ignore FSDP and take DDP, or let every rank train alone. After
    ``install()`` they shard if the plugin has version 2. For version 1 a warning says that nothing is sharded.

    ``Accelerator.prepare`` takes a model without an optimizer, so ``trainer.evaluate()`` may come before ``train()``.

    TRL's trainers generate inside ``fsdp2x.unsharded``, which gathers the model once instead of once for each token.
    ``ds3_gather_for_generation=False`` in their config keeps the model sharded, if it does not fit otherwise.

    Args:
        auto_wrap: whether one call for the root of a HuggingFace model splits it into units, as
            ``fsdp2x.fully_shard(model)`` does. Calls for submodules, for models with sharded parts, for lists, and for
            other modules do not change.

    Returns:
        A handle with ``uninstall()``. Repeated calls return the same handle.

    Raises:
        TypeError: ``auto_wrap`` is not a bool.
        ValueError: fsdp2x is already installed with another ``auto_wrap``.
        RuntimeError: accelerate was already initialized without FSDP, for a single process.
    """
    global _active
    if _active is not None and _active.auto_wrap != auto_wrap:
        raise ValueError(
            f"fsdp2x.install: it is already installed with auto_wrap={_active.auto_wrap}, got {auto_wrap}. "
            "Call fsdp2x.uninstall() first."
        )
    if _active is None:
        _active = Installation(_replacements(auto_wrap), auto_wrap)
        modules = {place.rpartition(".")[0] for place in _active.places}
        logger.log(_level(), "fsdp2x: installed in %d modules", len(modules))
    return _active


def uninstall() -> None:
    """Restores FSDP2's functions. Does nothing if fsdp2x is not installed."""
    if _active is not None:
        _active.uninstall()


def _replacements(auto_wrap: bool) -> dict[str, tuple[Callable, Callable]]:
    """Returns name -> (FSDP2's function, its replacement)."""
    pairs: dict[str, tuple[Callable, Callable]] = {
        "fully_shard": (torch_fsdp.fully_shard, _shard_as_upstream(torch_fsdp.fully_shard, auto_wrap))
    }
    for ours in (register_fsdp_forward_method, share_comm_ctx):
        theirs = getattr(torch_fsdp, ours.__name__)
        pairs[ours.__name__] = theirs, _ours_for_our_modules(theirs, ours)
    for name, (_, new) in pairs.items():
        # pickle finds the function by this name, as it finds FSDP2's.
        new.__module__, new.__qualname__ = torch_fsdp.__name__, name
    return pairs | {theirs.__name__: (theirs, ours) for theirs, ours in clip.replacements()}


def _shard_as_upstream(upstream: Any, auto_wrap: bool) -> Callable:
    @functools.wraps(api.fully_shard)
    def sharded(module: nn.Module | list[nn.Module], **options: Any):
        options.setdefault("auto_wrap", None if auto_wrap else False)
        return api.fully_shard(module, **options)

    def state(module: nn.Module):
        # While FSDP2's function shards, it calls its own global name, which is fsdp2x's function now.
        ours = get_state(module)
        return upstream.state(module) if ours is None else ours

    fully_shard: Any = sharded
    fully_shard.state = state
    return fully_shard


def _ours_for_our_modules(theirs: Callable, ours: Callable) -> Callable:
    """Calls ``ours`` if the first argument is, or contains, a module that fsdp2x sharded; otherwise ``theirs``."""

    @functools.wraps(ours)
    def call(modules: nn.Module | list[nn.Module], *args: Any, **kwargs: Any):
        some = [modules] if isinstance(modules, nn.Module) else list(modules)
        chosen = ours if any(isinstance(module, FSDPModule) for module in some) else theirs
        return chosen(modules, *args, **kwargs)

    return call


def _rebind(by_id: dict[int, Callable]) -> list[str]:
    """Replaces globals by identity and returns their names."""
    places = []
    for module_name, names in _modules():
        for name, value in list(names.items()):
            if id(value) in by_id:
                names[name] = by_id[id(value)]
                places.append(f"{module_name}.{name}")
    return sorted(places)


def _modules() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the globals of other loaded modules. Reads ``__dict__``: attribute access would load lazy modules."""
    seen = set()
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and name.split(".")[0] != "fsdp2x" and id(module) not in seen:
            seen.add(id(module))
            yield name, vars(module)


def _level() -> int:
    return logging.INFO if os.environ.get("RANK", "0") == "0" else logging.DEBUG


# --- modules of other packages, patched now or when they are imported ---


class _Follower(importlib.abc.MetaPathFinder):
    """Patches the module ``name``, now or when it is imported, until ``end()``. ``patch`` returns what undoes it."""

    def __init__(self, name: str, patch: Callable[[types.ModuleType], Callable[[], Any]]) -> None:
        self._name, self._patch = name, patch
        self._undo: Callable[[], Any] | None = None
        if name in sys.modules:
            self._undo = patch(sys.modules[name])
        else:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._undo is not None:
            self._undo()
            self._undo = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._undo = self._patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# --- accelerate: it uses FSDP on accelerators only, and DDP on a CPU ---


def _shard_on_cpus(module: types.ModuleType) -> Callable[[], None]:
    cls = module.AcceleratorState
    original = cls.__init__

    @functools.wraps(original)
    def init(self, *args: Any, **kwargs: Any) -> None:
        are_many = "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
        is_on_cpus = are_many and not torch.accelerator.is_available()
        if kwargs.get("fsdp_plugin") is not None and len(args) < 2 and is_on_cpus:
            kwargs["cpu"] = True  # otherwise accelerate looks for GPUs only, and every rank would train alone
        original(self, *args, **kwargs)
        if kwargs.get("fsdp_plugin") is not None:
            _take_fsdp(module, self, kwargs["fsdp_plugin"])

    cls.__init__ = init
    return lambda: setattr(cls, "__init__", original)


def _take_fsdp(module: types.ModuleType, state: Any, plugin: Any) -> None:
    """Does what accelerate does for a plugin on an accelerator."""
    kinds = module.DistributedType
    if state.distributed_type is kinds.NO and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            "fsdp2x: accelerate was initialized without FSDP on a machine without an accelerator, so every rank "
            "would train alone. Pass use_cpu=True to TrainingArguments, or cpu=True to whatever the script creates "
            "first (Accelerator, PartialState)."
        )
    if plugin.fsdp_version != 2:
        is_fsdp1 = state.distributed_type is kinds.FSDP
        logger.warning(
            "fsdp2x: accelerate uses %s for this model, %s. Its FSDP plugin has version %s. "
            "Pass FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp_config={'version': 2} to the Trainer.",
            "torch's FSDP1" if is_fsdp1 else "DDP" if state.use_distributed else "one process",
            "not fsdp2x" if is_fsdp1 else "nothing is sharded",
            plugin.fsdp_version,
        )
        return
    if state.distributed_type is not kinds.MULTI_CPU:
        return
    state.distributed_type = module.PartialState._shared_state["distributed_type"] = kinds.FSDP
    if state._mixed_precision != "no":
        plugin.set_mixed_precision(state._mixed_precision)
    state.fsdp_plugin = plugin


# --- accelerate: with FSDP2 it prepares a model only together with an optimizer, which an evaluation does not have ---


def _prepare_to_evaluate(module: types.ModuleType) -> Callable[[], None]:
    cls = module.Accelerator
    original = cls.prepare

    @functools.wraps(original)
    def prepare(self, *args: Any, **options: Any) -> Any:
        models = [arg for arg in args if isinstance(arg, nn.Module)]
        has_optimizer = any(isinstance(arg, torch.optim.Optimizer) for arg in args)
        if not self.is_fsdp2 or len(models) != 1 or (has_optimizer and not isinstance(models[0], FSDPModule)):
            return original(self, *args, **options)
        if not isinstance(models[0], FSDPModule):
            *prepared, unused = original(self, *args, torch.optim.SGD(models[0].parameters()))
            self._optimizers.remove(unused)
        else:
            # The model was prepared before. accelerate would look for its parameters by the addresses of their shards,
            # and all empty shards have the same one. The optimizer has the sharded parameters already.
            prepared = [arg if arg is models[0] else _prepare_one(self, original, arg) for arg in args]
            if models[0] not in self._models:
                self._models.append(models[0])
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    cls.prepare = prepare
    return lambda: setattr(cls, "prepare", original)


def _prepare_one(accelerator: Any, prepare: Callable, value: Any) -> Any:
    if isinstance(value, torch.optim.Optimizer):
        return accelerator.prepare_optimizer(value)
    return prepare(accelerator, value)


# --- TRL: it generates with a sharded model, whose units every token would gather ---


def _unshard_once(module: types.ModuleType) -> Callable[[], Any]:
    original = module.unwrap_model_for_generation

    @functools.wraps(original)
    @contextlib.contextmanager
    def unwrap(model: nn.Module, accelerator: Any, gather_deepspeed3_params: bool = True, **options: Any):
        gathers = gather_deepspeed3_params and bool(unit_states(model))
        with (
            unsharded(model) if gathers else contextlib.nullcontext(),
            original(model, accelerator, gather_deepspeed3_params, **options) as unwrapped,
        ):
            # With this mark, transformers would exchange a flag for each token, and compute for rows that have ended.
            is_marked = gathers and vars(unwrapped).pop("_is_fsdp_managed_module", False)
            try:
                yield unwrapped
            finally:
                if is_marked:
                    vars(unwrapped)["_is_fsdp_managed_module"] = True

    _rebind({id(original): unwrap})
    return lambda: _rebind({id(unwrap): original})
