"""Forked children of a rank: they inherit its connections and its model, and must not use them.

A child that runs a collective waits for threads that it does not have, and one that runs the model would write into
its parent's memory. The engine refuses the second by itself; ``require_own_process`` is for what Python does.
"""

from __future__ import annotations

import os
import weakref

import torch.distributed as dist

from fsdp2x.runtime.native import _C

_no_world = lambda: None  # noqa: E731
_world, _guard = _no_world, _C.ProcessGuard()


def require_own_process(what: str) -> None:
    """Before a collective.

    Raises:
        RuntimeError: this is a forked child of the process that made the default process group; names the way out.
            ``what`` ends the sentence "a forked child cannot ...".
    """
    if dist.is_initialized():
        _remember()
        _guard.require(what)


def _remember() -> None:
    """Notes which process the default process group belongs to; also before each fork."""
    global _world, _guard
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is not _world():
        _world = _no_world if world is None else weakref.ref(world)
        _guard = _C.ProcessGuard()


def _before() -> None:
    _remember()
    _C.begin_fork()


os.register_at_fork(before=_before, after_in_parent=_C.end_fork, after_in_child=_C.forbid_in_child)
