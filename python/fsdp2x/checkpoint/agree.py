"""Making ranks agree about failure: an error on one rank is raised on all, and a rank that died is named.

Nothing here may be skipped by a rank: each function is a collective of the whole default group.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used; the message names the file, parameter or rank."""


def together(work: Callable[[], T], *, what: str = "", raising: type[Exception] = CheckpointError) -> T:
    """Runs `work` on every rank and returns its result; if it failed anywhere, every rank raises the same `raising`.

    `work` itself must not contain a collective: a rank that fails early would leave the others waiting in it. An
    error that is neither `raising` nor from the file system is a slip of ours and stays attached as the cause.
    """
    result = mine = None
    try:
        result = work()
    except Exception as error:
        mine = error
    messages: list[str | None] = [None if mine is None else sentence(mine, raising)]
    if dist.is_initialized():
        messages = [None] * dist.get_world_size()
        dist.all_gather_object(messages, None if mine is None else sentence(mine, raising))
    failures = {rank: message for rank, message in enumerate(messages) if message is not None}
    if not failures:
        return result  # type: ignore[return-value]
    expected = mine is None or isinstance(mine, raising | OSError)
    raise raising(join_failures(failures, len(messages), what)) from (None if expected else mine)


def on_rank_0(work: Callable[[], T], *, what: str = "") -> T:
    """Runs `work` on rank 0 and returns its result on every rank; its failure is raised on every rank."""
    if not dist.is_initialized():
        return together(work, what=what)
    result = [together(lambda: work() if dist.get_rank() == 0 else None, what=what)]
    dist.broadcast_object_list(result, src=0)
    return result[0]  # type: ignore[return-value]


def join_failures(failures: Mapping[int, str], num_ranks: int, what: str) -> str:
    """One message from those of the ranks; the same sentence from several ranks is said once."""
    by_text: dict[str, list[str]] = {}
    for rank, text in sorted(failures.items()):
        by_text.setdefault(text, []).append(str(rank))
    if len(by_text) == 1 and len(failures) == num_ranks:
        said = next(iter(by_text))
    else:
        said = "; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in by_text.items())
    return f"{what}: {said}" if what else said


def sentence(error: BaseException, known: type[Exception] = CheckpointError) -> str:
    """What an error says: alone when we wrote it, else with its type or file."""
    if isinstance(error, known | CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


class LostRanks:
    """Knows every rank's process, and turns the failure of a collective into an error that names the ranks that ended.

    Built by all ranks together. Only processes of this host can be looked at; ranks elsewhere are never reported.
    """

    def __init__(self) -> None:
        mine = (socket.gethostname(), _boot_id(), os.getpid(), _start_time(os.getpid()))
        self.processes = [mine]
        if dist.is_initialized():
            self.processes = [mine] * dist.get_world_size()
            dist.all_gather_object(self.processes, mine)
        self._here = mine[:2]

    @property
    def pids(self) -> list[int]:
        return [process[2] for process in self.processes]

    def find(self, wait_s: float = 1.0) -> list[int]:
        """Ranks of this host whose process has ended; sockets close before processes end, so it looks for `wait_s`."""
        deadline = time.monotonic() + wait_s
        while True:
            lost = [
                rank
                for rank, (host, boot, pid, start) in enumerate(self.processes)
                if (host, boot) == self._here and _start_time(pid) != start
            ]
            if lost or time.monotonic() > deadline:
                return lost
            time.sleep(0.05)

    @contextlib.contextmanager
    def named(self, during: str) -> Iterator[None]:
        """Errors of the block become one that names the lost ranks, when there are any."""
        try:
            yield
        except Exception as error:
            lost = self.find() if isinstance(error, RuntimeError) else []
            if not lost:
                raise
            ranks = ", ".join(f"{rank} (process {self.processes[rank][2]})" for rank in lost)
            raise RuntimeError(f"{during}: lost rank {ranks}, which ended while the others waited for it") from error


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """Kernel's start time of a process, which tells a reused pid apart; None when it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
