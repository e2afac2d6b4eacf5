"""Hooks torch's optimizers and ``zero_grad``, which know nothing of sharding. The hooks are process-wide.

- *Stale parameters* are originals that sharding replaced, and gathered parameters. An optimizer that was built before
  ``fully_shard``, or while parameters were gathered, would silently train nothing. Each optimizer is checked at its
  first step, and again after it got parameters or a model was sharded.
- *Swapped values* are temporary values of parameters. Calls that keep, move, or change them raise.
- *Shards in gather buffers*: other ranks may read a shard there during forward and backward. A step comes after all
  ranks have read, so it writes in place, without a copy.
- *Waiting gradients* are not in ``.grad`` yet. ``zero_grad`` of a module clears those of its parameters. That of an
  optimizer keeps them, as FSDP2 does, and the next forward or backward warns.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp2x.base.native import _C
from fsdp2x.base.processes import require_own_process

_NUMBER = "_fsdp2x_number"  # on originals and gathered parameters: number of the original
_GATHERED = "_fsdp2x_gathered"  # on gathered ones: their name
_CHECKED = "_fsdp2x_checked"  # on optimizers: their state at the last check
MARKS = (_NUMBER, _GATHERED)
_last_number = 0


@functools.cache
def _watch_for_stale() -> None:
    register_optimizer_step_pre_hook(_check_step)


def mark_original(param: nn.Parameter) -> int:
    """Records that a sharded parameter replaces ``param``. Returns a unique number."""
    if _NUMBER not in param.__dict__:
        param.__dict__[_NUMBER] = new_number()
    return param.__dict__[_NUMBER]


def new_number() -> int:
    """Returns a unique number. Optimizers are checked again at their next step."""
    global _last_number
    _watch_for_stale()
    _last_number += 1
    return _last_number


def mark_gathered(param: nn.Parameter, number: int, name: str) -> None:
    """Records that ``param`` is the gathered form of the parameter whose original has ``number``."""
    param.__dict__.update({_NUMBER: number, _GATHERED: name})


def original_number(param: torch.Tensor) -> int | None:
    """Returns the number of ``param``, an original or gathered parameter. None if ``fully_shard`` does not know it."""
    return param.__dict__.get(_NUMBER)


def refuse_stale(caller: str, params: Iterable[nn.Parameter]) -> None:
    """Checks an optimizer's new parameters. ``caller`` is its name.

    Raises:
        ValueError: some of them are stale.
    """
    if found := _stale(params, steps=False):
        raise ValueError(f"fsdp2x.{caller}: {_describe(found)}")


def refuse_unmeasured(caller: str, params: Iterable[torch.Tensor]) -> None:
    """Raises RuntimeError if some of ``params`` have no gradient because the model's shards have it."""
    found = [p for p in params if original_number(p) is not None and p.requires_grad and p.grad is None]
    if found:
        require_own_process("clip gradients")
        raise RuntimeError(
            f"fsdp2x.{caller}: got {_kinds(found)}. Their gradients belong to the sharded parameters and would not be "
            "measured. Pass the parameters of the optimizer, or call reshard() on each unit first."
        )


def _stale(params: Iterable[nn.Parameter], *, steps: bool) -> list[nn.Parameter]:
    stale = [param for param in params if original_number(param) is not None]
    if steps:  # a user who set a gradient on a gathered parameter wants it stepped
        stale = [param for param in stale if _GATHERED not in param.__dict__ or param.grad is None]
    return stale


def _describe(stale: list[nn.Parameter]) -> str:
    return (
        f"the optimizer holds {_kinds(stale)}. Stepping them does not change the model. Build the optimizer after "
        "fully_shard while the model is sharded (model.reshard()), or call fsdp2x.rebind_optimizer(optimizer, model)."
    )


def _kinds(stale: list[Any]) -> str:
    gathered = [param for param in stale if _GATHERED in param.__dict__]
    kinds = []
    if len(gathered) < len(stale):
        shape = next(tuple(param.shape) for param in stale if _GATHERED not in param.__dict__)
        kinds.append(
            f"{len(stale) - len(gathered)} parameter(s) from before fully_shard (the first has shape {shape}), which "
            "the model no longer uses"
        )
    if gathered:
        kinds.append(
            f"{len(gathered)} gathered parameter(s) (the first is {gathered[0].__dict__[_GATHERED]!r}), which modules "
            "register after unshard(), in fsdp2x.unsharded and from a forward to the end of its backward"
        )
    return " and ".join(kinds)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    now = (_last_number, sum(len(group["params"]) for group in optimizer.param_groups))
    if optimizer.__dict__.get(_CHECKED) == now:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    stale = _stale(params, steps=True)
    if stale:
        name = f"{type(optimizer).__name__}.step: "
        if len(stale) == len(params) or getattr(optimizer, "refuses_stale_params", False):
            raise RuntimeError(name + _describe(stale))
        warnings.warn(name + _describe(stale), stacklevel=3)
    optimizer.__dict__[_CHECKED] = now


# --- swapped values ---

_swapped: list[set[int]] = []


@contextlib.contextmanager
def swapped_values(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Lists ``params`` during the block, in which the caller stores other values in them."""
    ids = {id(param) for param in params}
    _swapped.append(ids)
    hook = register_optimizer_step_pre_hook(_before_step)
    try:
        yield
    finally:
        hook.remove()
        _swapped.remove(ids)


def why_swapped(params: Iterable[torch.Tensor]) -> str:
    """Returns the problem if one of ``params`` holds other values, else an empty string."""
    if not _swapped or not any(id(param) in ids for param in params for ids in _swapped):
        return ""
    return "the parameters hold averages inside of EMA.swapped(), whose end gives them their own values. Leave it first"


def refuse_swapped(caller: str, params: Iterable[torch.Tensor]) -> None:
    """Raises RuntimeError if one of ``params`` holds other values. ``caller`` begins the message."""
    if why := why_swapped(params):
        raise RuntimeError(f"{caller}: {why}.")


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    params = (param for group in optimizer.param_groups for param in group["params"])
    refuse_swapped(f"{type(optimizer).__name__}.step", params)


# --- shards in gather buffers ---

_OPEN = "_fsdp2x_open"  # on optimizers, while they step: what they may write to


@functools.cache
def watch_steps() -> None:
    """Hooks the steps of every optimizer of the process from now on."""
    register_optimizer_step_pre_hook(_open)
    register_optimizer_step_post_hook(_close)


def _open(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        optimizer.__dict__[_OPEN] = _C.WritableShards(optimizer.param_groups)


def _close(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling() and (shards := optimizer.__dict__.pop(_OPEN, None)) is not None:
        shards.close()


# --- waiting gradients ---


@functools.cache
def watch_zero_grad() -> None:
    """Hooks ``zero_grad`` of every module and every optimizer of the process from now on."""
    of_module, of_optimizer = nn.Module.zero_grad, torch.optim.Optimizer.zero_grad

    @functools.wraps(of_module)
    def zero_module(self: nn.Module, set_to_none: bool = True) -> None:
        of_module(self, set_to_none)
        if not torch.compiler.is_compiling():
            _C.clear_waiting_gradients(list(self.parameters()), set_to_none)

    @functools.wraps(of_optimizer)
    def zero_optimizer(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        of_optimizer(self, set_to_none)
        if not torch.compiler.is_compiling():
            _C.note_zeroed_gradients([param for group in self.param_groups for param in group["params"]])

    nn.Module.zero_grad = zero_module
    torch.optim.Optimizer.zero_grad = zero_optimizer
