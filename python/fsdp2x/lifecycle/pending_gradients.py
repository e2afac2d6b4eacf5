"""Methods of ``FSDPModule`` for gradients that wait for a reduction or an all-reduce: clear, show and reduce them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule  # before install()
from torch.distributed.tensor import DTensor, Partial

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.base.native import _C
from fsdp2x.lifecycle.tree import get_state, roots_of, unit_states
from fsdp2x.lifecycle.unit import ShardedUnit
from fsdp2x.sharding.sharded_param import ShardedParam
from fsdp2x.sharding.spec import ParamSpec

Waiting = tuple[torch.Tensor | None, torch.Tensor | None]


@checked
def zero_grad(self: Any, set_to_none: bool = True) -> None:
    """Clears ``.grad`` of all parameters in this module, and gradients that wait for a reduction.

    Such gradients come from backwards without gradient sync or without all-reduce. Other parameters of a unit keep
    theirs. From the first forward on, ``zero_grad`` of a plain module inside or around units does the same.
    ``optimizer.zero_grad()`` does not: the next forward or backward warns once if they still wait.

    Args:
        set_to_none: whether to drop the gradients. False sets existing ones to zero.
    """
    super(TorchFSDPModule, self).zero_grad(set_to_none)
    mine = {id(module) for module in self.modules()}
    records = (record for state in unit_states(self) for record in state.params)
    params = [record.param for record in records if any(id(owner) in mine for owner, _ in record.owners)]
    for param in params:  # modules do not register these while their unit is gathered
        if set_to_none:
            param.grad = None
        elif param.grad is not None:
            with torch.no_grad():
                param.grad.zero_()
    _C.clear_waiting_gradients(params, set_to_none)


@checked
def get_pending_gradients(self: nn.Module, *, recurse: bool = True) -> dict[nn.Parameter, Waiting]:
    """Returns the gradients that wait for a reduction, in this module's unit and all units below. Not collective.

    Each tensor is the sum itself, so in-place writes are reduced. It stays the same object over later backwards,
    ``reshard()``, and calls of this method, until it is reduced. On accelerators, the next backward replaces
    ``partial``.

    Args:
        recurse: whether to include the units below.

    Returns:
        ``(unreduced, partial)`` for each sharded parameter that has one of them, in the reduce dtype.
        ``unreduced`` is this rank's gradient of the full parameter, in its unsharded shape and not yet divided. It is a
        DTensor if modules see the parameter as one, with ``Partial`` where ranks hold summands. ``partial`` is this
        rank's rows, reduced over the shard ranks, that wait for the all-reduce over the replicas.
    """
    pending = {}
    for state in _states(self, recurse):
        for number, group in enumerate(state.groups):
            for index, sharded in enumerate(group.params):
                whole, rows = (None, None) if state.unit is None else state.unit.waiting_gradient(number, index)
                shown = _shown(sharded, "whole", whole), _shown(sharded, "rows", rows)
                if any(one is not None for one in shown):
                    pending[sharded.param] = shown
    return pending


@checked
def synchronize_gradients(self: nn.Module, *, recurse: bool = True) -> None:
    """Reduces gradients that wait in this module's unit and all units below, and adds them to ``.grad``. Collective.

    It divides as a backward does, all-reduces over the replicas, and ignores ``set_requires_gradient_sync`` and
    ``set_requires_all_reduce``. If no gradients wait, nothing happens. ``recurse=False`` leaves out the units below.

    Raises:
        RuntimeError: called during forward or backward, or gradients were lost with those of a failed backward.
    """
    states = _states(self, recurse)
    options = [state.options for state in states]
    before = [(each.requires_gradient_sync, each.requires_all_reduce) for each in options]
    try:
        for each in options:
            each.requires_gradient_sync = each.requires_all_reduce = True
        for root in roots_of(states):
            if root.in_forward or root.in_backward:
                raise RuntimeError("synchronize_gradients cannot be called during forward or backward")
            root.synchronize_gradients([state.unit for state in states if state.root is root])
    finally:
        for each, (sync, all_reduce) in zip(options, before, strict=True):
            each.requires_gradient_sync, each.requires_all_reduce = sync, all_reduce


def _states(module: nn.Module, recurse: bool) -> list[ShardedUnit]:
    own = get_state(module)
    return [own] if own is not None and not recurse else unit_states(module)


def _shown(sharded: ShardedParam, kind: str, flat: torch.Tensor | None) -> torch.Tensor | None:
    """Returns ``flat`` as users see it: the same object while they hold it, over the engine's memory."""
    if flat is None:
        sharded.shown.pop(kind, None)
        return None
    last = sharded.shown.get(kind, lambda: None)()
    if last is not None:
        local = torch_private.local_tensor(last) if isinstance(last, DTensor) else last
        if local.data_ptr() == flat.data_ptr():
            return last
    spec = sharded.spec
    shape = sharded.local_size if kind == "whole" else spec.local_shape
    with torch.no_grad():
        if sharded.param.is_complex():
            flat = torch.view_as_complex(flat.reshape(-1, 2))
        seen = flat.view(shape)
        if kind == "whole" and spec.is_wrapped:
            seen = _over_model_parallel(spec, seen)
    sharded.shown[kind] = weakref.ref(seen)
    return seen


def _over_model_parallel(spec: ParamSpec, local: torch.Tensor) -> torch.Tensor:
    whole = spec.unsharded
    assert whole is not None and whole.tensor_meta is not None, "modules see a DTensor"
    placements = [Partial() if axis in spec.dp_axes else kept for axis, kept in enumerate(whole.placements)]
    meta = whole.tensor_meta
    return torch_private.dtensor(
        local, torch_private.dtensor_spec(whole.mesh, tuple(placements), meta.shape, meta.stride, local.dtype)
    )
