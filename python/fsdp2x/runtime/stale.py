"""Parameters that a step does not reach: originals that sharding has replaced, and gathered ones. Owns their marks.

An optimizer that was built before ``fully_shard``, or while parameters were gathered, holds such and trains nothing, in
silence. That shows neither in forward nor in backward, where nobody knows of optimizers; so each optimizer is looked at
in its first step, and again when it got parameters or a model was sharded.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

_NUMBER = "_fsdp2x_number"  # on originals and gathered parameters: of the original
_GATHERED = "_fsdp2x_gathered"  # on gathered ones: their name
_CHECKED = "_fsdp2x_checked"  # on optimizers: what they were like
MARKS = (_NUMBER, _GATHERED)

_last_number = 0


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_check_step)


def mark_original(param: nn.Parameter) -> int:
    """Remembers that a sharded parameter takes the place of ``param``; returns a number that no other one ever had."""
    if _NUMBER not in param.__dict__:
        param.__dict__[_NUMBER] = new_number()
    return param.__dict__[_NUMBER]


def new_number() -> int:
    """A number that no parameter ever had; optimizers are looked at again in their next step."""
    global _last_number
    _watch_steps()
    _last_number += 1
    return _last_number


def mark_gathered(param: nn.Parameter, number: int, name: str) -> None:
    """Remembers that ``param`` is the gathered form of the parameter whose original has ``number``."""
    param.__dict__.update({_NUMBER: number, _GATHERED: name})


def original_number(param: nn.Parameter) -> int | None:
    """The number under which ``fully_shard`` knows ``param``, from before sharding or gathered; None: it does not."""
    return param.__dict__.get(_NUMBER)


def refuse_stale(caller: str, params: Iterable[nn.Parameter]) -> None:
    """For an optimizer's new parameters; ``caller``: its name.

    Raises:
        ValueError: some of them are stale.
    """
    if found := _describe(_stale(params, steps=False)):
        raise ValueError(f"fsdp2x.{caller}: {found}")


def _stale(params: Iterable[nn.Parameter], *, steps: bool) -> list[nn.Parameter]:
    stale = [param for param in params if original_number(param) is not None]
    if steps:  # who gave a gathered parameter a gradient wants it stepped
        stale = [param for param in stale if _GATHERED not in param.__dict__ or param.grad is None]
    return stale


def _describe(stale: list[nn.Parameter]) -> str:
    if not stale:
        return ""
    gathered = [param for param in stale if _GATHERED in param.__dict__]
    kinds = []
    if len(gathered) < len(stale):
        shape = next(tuple(param.shape) for param in stale if _GATHERED not in param.__dict__)
        kinds.append(
            f"{len(stale) - len(gathered)} parameter(s) from before fully_shard (the first has shape {shape}), which "
            "the model does not use any more"
        )
    if gathered:
        kinds.append(
            f"{len(gathered)} gathered parameter(s) (the first is {gathered[0].__dict__[_GATHERED]!r}), which modules "
            "register after unshard(), in fsdp2x.unsharded and from a forward to the end of its backward"
        )
    return (
        f"the optimizer holds {' and '.join(kinds)}: stepping them does not change the model. Build the optimizer "
        "after fully_shard while the model is sharded (model.reshard()), or call "
        "fsdp2x.rebind_optimizer(optimizer, model)"
    )


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
