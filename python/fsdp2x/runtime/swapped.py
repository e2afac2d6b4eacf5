"""Lists parameters that hold other values for a while, so that calls which keep, move, or change them raise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_swapped: list[set[int]] = []


@contextlib.contextmanager
def swapped_values(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Lists ``params`` during the block, in which the caller keeps other values in them."""
    ids = {id(param) for param in params}
    _swapped.append(ids)
    hook = register_optimizer_step_pre_hook(_before_step)
    try:
        yield
    finally:
        hook.remove()
        _swapped.remove(ids)


def why_swapped(params: Iterable[torch.Tensor]) -> str:
    """Returns what is wrong if one of ``params`` holds other values, else an empty string."""
    if not _swapped or not any(id(param) in ids for param in params for ids in _swapped):
        return ""
    return "the parameters hold averages inside of EMA.swapped(), whose end gives them their own values. Leave it first"


def refuse_swapped(caller: str, params: Iterable[torch.Tensor]) -> None:
    """Raises RuntimeError if one of ``params`` holds other values; ``caller`` begins the message."""
    if why := why_swapped(params):
        raise RuntimeError(f"{caller}: {why}.")


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    params = (param for group in optimizer.param_groups for param in group["params"])
    refuse_swapped(f"{type(optimizer).__name__}.step", params)
