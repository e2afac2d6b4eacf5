"""The processes behind the ranks: which of them have ended, and forked children, which must not act for their parent.

A process is identified by its host, its number and its start time; no handle is held. A forked child inherits the
connections and the model of its rank. A collective in the child would wait for threads that it does not have, and a
forward would write into the memory of its parent. The engine refuses the second by itself; ``require_own_process`` is
for what Python does.
"""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from fsdp2x.base.native import _C

_LOOK_S = 0.05
# Of each default process group: the processes of the ranks that have introduced themselves, by rank.
_introduced: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Process:
    """A process of some host. ``start`` is the kernel's start time, which tells a reused number apart."""

    host: tuple[str, str]
    pid: int
    start: str | None

    @classmethod
    def own(cls) -> Process:
        return cls(own_host(), os.getpid(), start_time(os.getpid()))


def remember(processes: dict[int, Process]) -> None:
    """These ranks have introduced themselves, to this one or to one that tells of them."""
    _introduced.setdefault(dist.group.WORLD, {}).update(processes)


def introduced() -> dict[int, Process]:
    """The processes that this one knows of, by rank of the default group."""
    return dict(sorted(_introduced.get(dist.group.WORLD, {}).items()))


def own_host() -> tuple[str, str]:
    """Name of the host, and which boot of it this is; the second is empty where it cannot be read."""
    try:
        return socket.gethostname(), boot_id()
    except OSError:
        return socket.gethostname(), ""


def boot_id() -> str:
    """The kernel's number for this boot of the host. Raises OSError where it is hidden."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def name_ended(processes: Mapping[int, Process], wait_s: float = 1.0) -> str:
    """The ranks of this host, of these, whose process has ended: "rank 1 (pid 7), rank 3 (pid 9)", or nothing.

    Those elsewhere are never reported. Sockets close before processes end: it looks for ``wait_s`` until it finds one.
    """
    here = own_host()
    deadline = time.monotonic() + wait_s
    while True:
        ended = [
            f"rank {rank} (pid {process.pid})"
            for rank, process in processes.items()
            if process.host == here and start_time(process.pid) != process.start
        ]
        if ended or time.monotonic() > deadline:
            return ", ".join(ended)
        time.sleep(_LOOK_S)


def start_time(pid: int) -> str | None:
    """Kernel's start time of a process; None when it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()  # the name, in parentheses, may hold anything
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


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
