"""Identifies the processes of ranks, to find those that ended and forked children that must not act for their parent.

A process is identified by its host, its number and its start time, without a handle. A forked child inherits the
connections and the model of its rank. A collective in the child would wait for threads that it does not have, and a
forward would write into its parent's memory. The engine itself raises for the second. ``require_own_process`` protects
Python code.
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
# For each default process group, the processes of the ranks that have introduced themselves, by rank.
_introduced: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Process:
    """A process of some host. ``start`` is the kernel's start time, which distinguishes reused numbers."""

    host: tuple[str, str, str]
    pid: int
    start: str | None

    @classmethod
    def own(cls) -> Process:
        return cls(own_host(), os.getpid(), start_time(os.getpid()))


def remember(processes: dict[int, Process]) -> None:
    """Records ranks that introduced themselves to this one or to another one that reports them."""
    _introduced.setdefault(dist.group.WORLD, {}).update(processes)


def introduced() -> dict[int, Process]:
    """Returns the processes that this one knows, by rank of the default group."""
    return dict(sorted(_introduced.get(dist.group.WORLD, {}).items()))


def own_host() -> tuple[str, str, str]:
    """Returns the host's name, an id of its boot, and the namespace of its process numbers. Empty: cannot be read.

    Containers of one host may share its name, but not see each other's processes.
    """
    name = socket.gethostname()
    try:
        return name, boot_id(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return name, "", ""


def boot_id() -> str:
    """Returns the kernel's number for this boot of the host. Raises OSError if it is hidden."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def name_ended(processes: Mapping[int, Process], wait_s: float = 1.0) -> str:
    """Returns this host's ranks whose process has ended: "rank 1 (pid 7), rank 3 (pid 9)", or an empty string.

    Ranks on other hosts are never reported. Sockets close before processes end, so it looks for ``wait_s`` until it
    finds one.
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
    """Returns the kernel's start time of a process, or None after its end."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()  # the name, in parentheses, may contain anything
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


_no_world = lambda: None  # noqa: E731
_world, _guard = _no_world, _C.ProcessGuard()


def require_own_process(what: str) -> None:
    """Checks, before a collective, that this process is not a forked child.

    Raises:
        RuntimeError: this is a forked child of the process that made the default process group. ``what`` ends the
            sentence "a forked child cannot ...".
    """
    if dist.is_initialized():
        _remember()
        _guard.require(what)


def _remember() -> None:
    """Records which process the default process group belongs to. Also runs before each fork."""
    global _world, _guard
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is not _world():
        _world = _no_world if world is None else weakref.ref(world)
        _guard = _C.ProcessGuard()


def _before() -> None:
    _remember()
    _C.begin_fork()


os.register_at_fork(before=_before, after_in_parent=_C.end_fork, after_in_child=_C.forbid_in_child)
