"""Optimizers write resting shards where the next gather finds them: for the length of each step.

Shards that rest in the slot of their unit may be read by the other ranks while those are in a forward or backward. What
is written to them stays with this rank until the next gather, which copies it. A step comes after all ranks have read,
so its writes need no copy; hooks of torch's optimizers tell when it begins and ends.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdp2x.runtime.native import _C

_OPEN = "_fsdp2x_open"  # on optimizers, while they step: what they may write to


@functools.cache
def watch_steps() -> None:
    """From now on, for every optimizer of the process."""
    register_optimizer_step_pre_hook(_open)
    register_optimizer_step_post_hook(_close)


def _open(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        optimizer.__dict__[_OPEN] = _C.WritableShards(optimizer.param_groups)


def _close(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling() and (shards := optimizer.__dict__.pop(_OPEN, None)) is not None:
        shards.close()
