"""Exchanges objects between the ranks, and raises the failure of one rank on all of them.

No rank may skip a call: each function is a collective of its group, by default of all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from fsdp2x.base import torch_private
from fsdp2x.base.agreement import agreement_of
from fsdp2x.base.calls import current_call, require_same_call
from fsdp2x.base.collectives import explained
from fsdp2x.base.errors import CheckpointError
from fsdp2x.base.processes import Process, name_ended, own_host, require_own_process

T = TypeVar("T")
Group = dist.ProcessGroup | None


def rank_and_size(group: Group = None) -> tuple[int, int]:
    """Returns the place in the group. A process without a group is rank 0 of 1."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def exchange(mine: T, group: Group = None, what: str = "meeting of the ranks") -> list[T]:
    """Returns the objects of all ranks, in rank order.

    Errors name the public call that this rank is in, or ``what`` outside of any.

    Raises:
        ValueError, Diverged: on every rank, if the ranks are in different calls.
    """
    if rank_and_size(group)[1] == 1:
        return [mine]
    require_own_process("agree with the other ranks")
    call = current_call(what)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    if (agreement := agreement_of(group or dist.group.WORLD)) is not None:
        agreement.meet(str(call))
    with torch_private.unobserved(), explained(group, str(call)):
        dist.all_gather_object(everyone, (call, mine), group=group)
    ranks = dist.get_process_group_ranks(group)
    require_same_call({rank: call for rank, (call, _) in zip(ranks, everyone, strict=True)})
    return [theirs for _, theirs in everyone]


def run_on_all_ranks(
    work: Callable[[], T], *, what: str = "", raising: type[Exception] = CheckpointError, group: Group = None
) -> T:
    """Runs ``work`` on every rank and returns its result. If it fails anywhere, every rank raises the same ``raising``.

    ``work`` itself must not contain a collective: a rank that fails early would leave the others waiting in it. An
    error that is neither ``raising`` nor from the file system is our mistake and stays attached as the cause.
    """
    result, error = _attempt(work)
    _raise_failures(exchange(None if error is None else sentence(error, raising), group), error, what, raising)
    return result  # type: ignore[return-value]


def gather_all(work: Callable[[], T], *, what: str = "", group: Group = None) -> list[T]:
    """Runs ``work`` on every rank and returns all results in rank order. Fails as ``run_on_all_ranks`` does."""
    result, error = _attempt(work)
    found = exchange((None if error is None else sentence(error), result), group)
    _raise_failures([text for text, _ in found], error, what, CheckpointError)
    return [value for _, value in found]  # type: ignore[return-value]


def on_rank_0(work: Callable[[], T], *, what: str = "", group: Group = None) -> T:
    """Runs ``work`` on rank 0 and returns its result on every rank. Fails as ``run_on_all_ranks`` does."""
    rank, size = rank_and_size(group)
    result = [run_on_all_ranks(lambda: work() if rank == 0 else None, what=what, group=group)]
    if size > 1:
        dist.broadcast_object_list(result, src=_first(group), group=group)
    return result[0]  # type: ignore[return-value]


def gather_on_rank_0(work: Callable[[], T], *, what: str = "", group: Group = None) -> list[T]:
    """Runs ``work`` on every rank. Rank 0 gets all results in rank order, the others an empty list."""
    rank, size = rank_and_size(group)
    mine = run_on_all_ranks(work, what=what, group=group)
    if size == 1:
        return [mine]
    found: list[Any] = [None] * size if rank == 0 else []
    dist.gather_object(mine, found if rank == 0 else None, dst=_first(group), group=group)
    return found


def problems_of_all(problem: str | None, group: Group = None, what: str = "meeting of the ranks") -> str:
    """Returns the problems of all ranks in one sentence, the same on each. Empty if no rank has one."""
    said = exchange(problem, group, what)
    ranks = [0] if len(said) == 1 else dist.get_process_group_ranks(group)
    return "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, said, strict=True) if text is not None)


def _first(group: Group) -> int:
    """Returns the global rank of a group's rank 0."""
    return 0 if group is None else dist.get_global_rank(group, 0)


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _raise_failures(messages: list[str | None], mine: Exception | None, what: str, raising: type[Exception]) -> None:
    failures = {rank: message for rank, message in enumerate(messages) if message is not None}
    if failures:
        expected = mine is None or isinstance(mine, raising | OSError)
        raise raising(join_failures(failures, len(messages), what)) from (None if expected else mine)


def join_failures(failures: Mapping[int, str], num_ranks: int, what: str) -> str:
    """Joins the messages of the ranks. A sentence that several ranks share stands there once."""
    by_text: dict[str, list[str]] = {}
    for rank, text in sorted(failures.items()):
        by_text.setdefault(text, []).append(str(rank))
    if len(by_text) == 1 and len(failures) == num_ranks:
        joined = next(iter(by_text))
    else:
        joined = "; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in by_text.items())
    return f"{what}: {joined}" if what else joined


def sentence(error: BaseException, known: type[Exception] = CheckpointError) -> str:
    """Returns the text of an error: alone if fsdp2x wrote it, else with its type or file."""
    if isinstance(error, known | CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


class LostRanks:
    """Knows every rank's process, and turns the failure of a collective into an error that names the ranks that ended.

    Building one is a collective. It looks at the processes of this host only and never reports ranks elsewhere.
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
        """Replaces errors of the block by one that names the lost ranks, if there are any.

        A ``CheckpointError`` passes: all ranks agreed on it, so none is lost.
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
