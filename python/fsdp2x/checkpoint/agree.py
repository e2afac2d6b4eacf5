"""Making ranks agree about failure: an error on one rank is raised on all, and a rank that died is named.

Nothing here may be skipped by a rank: each function is a collective of its group, by default of all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from fsdp2x.reading.errors import CheckpointError
from fsdp2x.runtime.forks import require_own_process
from fsdp2x.runtime.processes import Process, name_ended, own_host
from fsdp2x.runtime.sharing import all_gather_object

T = TypeVar("T")


Group = dist.ProcessGroup | None


def rank_and_size(group: Group = None) -> tuple[int, int]:
    """Place in the group; a process without one is rank 0 of 1."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def together(
    work: Callable[[], T], *, what: str = "", raising: type[Exception] = CheckpointError, group: Group = None
) -> T:
    """Runs `work` on every rank and returns its result; if it failed anywhere, every rank raises the same `raising`.

    `work` itself must not contain a collective: a rank that fails early would leave the others waiting in it. An
    error that is neither `raising` nor from the file system is a slip of ours and stays attached as the cause.
    """
    result, mine = _attempt(work)
    _raise_failures(exchange(None if mine is None else sentence(mine, raising), group), mine, what, raising)
    return result  # type: ignore[return-value]


def gather_all(work: Callable[[], T], *, what: str = "", group: Group = None) -> list[T]:
    """Runs `work` on every rank and returns the results of all, in rank order; failures as in `together`."""
    result, mine = _attempt(work)
    found = exchange((None if mine is None else sentence(mine), result), group)
    _raise_failures([said for said, _ in found], mine, what, CheckpointError)
    return [value for _, value in found]  # type: ignore[return-value]


def on_rank_0(work: Callable[[], T], *, what: str = "", group: Group = None) -> T:
    """Runs `work` on rank 0 and returns its result on every rank; its failure is raised on every rank."""
    rank, size = rank_and_size(group)
    result = [together(lambda: work() if rank == 0 else None, what=what, group=group)]
    if size > 1:
        dist.broadcast_object_list(result, src=_first(group), group=group)
    return result[0]  # type: ignore[return-value]


def gather_on_rank_0(work: Callable[[], T], *, what: str = "", group: Group = None) -> list[T]:
    """Runs `work` on every rank; rank 0 gets the results of all, in rank order, the others an empty list."""
    rank, size = rank_and_size(group)
    mine = together(work, what=what, group=group)
    if size == 1:
        return [mine]
    found: list[Any] = [None] * size if rank == 0 else []
    dist.gather_object(mine, found if rank == 0 else None, dst=_first(group), group=group)
    return found


def _first(group: Group) -> int:
    """Global rank of a group's rank 0."""
    return 0 if group is None else dist.get_global_rank(group, 0)


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def exchange(mine: T, group: Group = None) -> list[T]:
    """What each rank says, in rank order; for what cannot fail."""
    size = rank_and_size(group)[1]
    if size == 1:
        return [mine]
    require_own_process("agree with the other ranks")
    return all_gather_object(group, mine)


def _raise_failures(messages: list[str | None], mine: Exception | None, what: str, raising: type[Exception]) -> None:
    failures = {rank: message for rank, message in enumerate(messages) if message is not None}
    if failures:
        expected = mine is None or isinstance(mine, raising | OSError)
        raise raising(join_failures(failures, len(messages), what)) from (None if expected else mine)


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
        self.processes = exchange(Process.own())

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    @property
    def local_pids(self) -> list[int]:
        """Those of this host's ranks."""
        here = own_host()
        return [process.pid for process in self.processes if process.host == here]

    @contextlib.contextmanager
    def named(self, during: str) -> Iterator[None]:
        """Errors of the block become one that names the lost ranks, when there are any.

        A CheckpointError is what all ranks agreed on: none is lost, and nobody waits for one to end.
        """
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            lost = name_ended(dict(enumerate(self.processes))) if isinstance(error, RuntimeError) else ""
            if not lost:
                raise
            raise RuntimeError(f"{during}: lost {lost}, which ended while the others waited for it") from error
