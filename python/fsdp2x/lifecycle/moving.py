"""Operations that give parameters other memory behind the engine: refused at a wrong moment, undone, or followed."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fsdp2x.base import torch_private
from fsdp2x.base.failures import all_units
from fsdp2x.lifecycle.tree import depth_of
from fsdp2x.lifecycle.unit import ShardedUnit, refuse_unreduced
from fsdp2x.sharding.param_group import ShardedParamGroup
from fsdp2x.sharding.sharded_param import ShardedParam, user_attributes

Convert = Callable[[torch.Tensor], torch.Tensor]


class _RefuseSharing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.share_memory_ and isinstance(args[0], DTensor):  # torch would read a null pointer
            raise NotImplementedError(
                "fsdp2x: share_memory() cannot share sharded parameters with other processes. Share copies from "
                "fsdp2x.full_tensors(model), or call share_memory_() on each param.to_local()."
            )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def moving(state: ShardedUnit, fn: Convert) -> Iterator[None]:
    """While the unit's modules apply ``fn`` to their parameters, whose attributes stay and whose shards follow.

    Raises:
        RuntimeError: the unit cannot change now; nothing has changed.
        NotImplementedError: ``fn`` shares the memory of parameters with other processes.
    """
    _refuse_moment(state, fn)
    state.reshard()
    # Before: a gradient that somebody else has, too, cannot be exchanged.
    for group in state.groups:
        if group.engine is not None:
            group.engine.forget_gradients()
    kept = [user_attributes(sharded.param) for sharded in state.params]
    try:
        with _RefuseSharing():
            yield
    finally:  # what fn has changed before it raised, too
        try:
            adopt_all(state.groups)
        finally:
            for sharded, attributes in zip(state.params, kept, strict=True):
                sharded.param.__dict__.update({**attributes, **user_attributes(sharded.param)})
    if getattr(fn, "__qualname__", "").startswith("Module.to_empty."):
        buffers = (buffer for module in state.modules for buffer in module.buffers())
        state.raw_buffers = [(weakref.ref(buffer), buffer._version) for buffer in buffers]


def _refuse_moment(state: ShardedUnit, fn: Convert) -> None:
    units = state.units_of_root
    if _is_running(state, units):
        if state.made_unit.param_state != "SHARDED" or _changes(state, fn):
            raise RuntimeError(
                f"fsdp2x: unit '{state.name}' cannot be moved or converted during forward or backward. Do it between "
                "two steps."
            )
    elif any(group.holds_unreduced for one in units for group in one.groups) and _changes(state, fn):
        refuse_unreduced(units)


def _is_running(state: ShardedUnit, units: Iterable[ShardedUnit]) -> bool:
    if state.root is None or not state.root.in_forward:
        return state.root is not None and state.root.in_backward
    return any(depth_of(module) for one in units for module in one.modules)  # else it was interrupted


def _changes(state: ShardedUnit, fn: Convert) -> bool:
    """Whether ``fn`` gives parameters another dtype or device, tried on empty tensors."""
    for dtype, device in {(sharded.param.dtype, sharded.param.device) for sharded in state.params}:
        changed = fn(torch.empty(0, dtype=dtype, device=device))
        if (changed.dtype, changed.device) != (dtype, device):
            return True
    return False


def adopt_all(groups: Iterable[ShardedParamGroup]) -> None:
    """Each of ``groups`` takes its parameters, whatever others raise; the first error is raised then."""
    errors = []
    for group in groups:
        try:
            _vacate(group.params)
            group.adopt()
        except (ValueError, RuntimeError) as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _vacate(places: Iterable[ShardedParam]) -> None:
    """Gives memory of their own to parameters that lie in the places of others, as after ``swap_tensors``.

    Else a shard that comes back to its place would overwrite them.
    """
    owners = {
        one.storage._cdata: one
        for one in places
        if one.storage is not None and not one.was_moved(torch_private.local_tensor(one.param))
    }
    for state in all_units if owners else ():
        for guest in state.params:
            local = torch_private.local_tensor(guest.param)
            if guest.is_wrapper or guest.is_alias or local.is_meta:
                continue
            if owners.get(local.untyped_storage()._cdata, guest) is not guest:
                torch_private.set_local_tensor(guest.param, local.clone())


def warn_of_raw_buffers(root: ShardedUnit) -> None:
    """Names buffers that nobody has written since ``to_empty``, once. Writes through ``.data`` do not show."""
    raw = [entry for state in root.tree for entry in state.raw_buffers]
    if not raw:
        return
    for state in root.tree:
        state.raw_buffers = []
    untouched = {id(buffer) for ref, version in raw if (buffer := ref()) is not None and buffer._version == version}
    names = [name for name, buffer in root.modules[0].named_buffers() if id(buffer) in untouched and buffer.numel()]
    if names:
        warnings.warn(
            f"fsdp2x: nothing has written the buffers {', '.join(map(repr, names))} since to_empty(), so they hold "
            "undefined values. Checkpoints do not contain non-persistent buffers: compute them again before the first "
            "forward, or load the model by fsdp2x.from_pretrained.",
            stacklevel=2,
        )
