"""Collectives of CPU process groups: starts them under FSDP2's names, packs them, and waits for them.

``explained`` adds rank, operation and unit to the error of a failed collective.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp2x.base import torch_private
from fsdp2x.base.memory_file import aligned_starts
from fsdp2x.base.processes import introduced, name_ended, own_host

# Part of a rank below which one gather is faster than a broadcast from each rank, over gloo.
BROADCAST_BYTES = 1 << 18


def all_gather(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor):
    """Starts an all-gather of ``source`` into ``output`` and returns the work.

    Over gloo, a large one is a broadcast from each rank. gloo's own gather copies into memory that it allocates.
    """
    is_large = source.nbytes >= BROADCAST_BYTES and group is not None
    if not (is_large and torch_private.is_gloo(group) and may_replace()):
        return _gather()(output, source, group=group, async_op=True)
    own = output.view(group.size(), -1)[group.rank()]
    if own.data_ptr() != source.data_ptr():
        own.copy_(source.view(-1))
    return _Parts(_broadcasts(group, output, own))


def plain_all_gather(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor):
    """Starts one all-gather, also if ``all_gather`` would start broadcasts. Returns the work."""
    return _gather()(output, source, group=group, async_op=True)


def gather_in_place(group: dist.ProcessGroup, outputs: list[torch.Tensor], sources: list[torch.Tensor]):
    """Starts all-gathers of ``sources`` over gloo into ``outputs``. Returns the work of all.

    This rank's part of an output is not written. Its source may be that part.
    """
    pairs = zip(outputs, sources, strict=True)
    return _Parts([work for output, source in pairs for work in _broadcasts(group, output, source)])


def _broadcasts(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor) -> list[Any]:
    if source.nbytes < BROADCAST_BYTES:
        return [_GATHER(output, source, group=group, async_op=True)]
    # Not by dist.broadcast, whose checks and logs take a third of its time.
    parts = list(output.view(group.size(), -1).view(torch.uint8).unbind())
    parts[group.rank()] = source.view(torch.uint8)
    return [group.broadcast([part], options) for part, options in zip(parts, _from_each(group.size()), strict=True)]


@functools.cache
def _from_each(world: int) -> list[dist.BroadcastOptions]:
    """Options of a broadcast from each rank."""
    options = [dist.BroadcastOptions() for _ in range(world)]
    for rank, one in enumerate(options):
        one.rootRank, one.rootTensor, one.asyncOp = rank, 0, True
    return options


def may_replace() -> bool:
    """Returns whether other collectives may replace gathers and reduce-scatters: no mode and no patch sees them."""
    return _gather() is _GATHER and _scatter() is _SCATTER and not torch_private.is_observed()


# FSDP2 uses one of two names, depending on torch. Looked up at each call, because patches and counters must see it.
def _gather() -> Callable[..., Any]:
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Parts:
    """Work of the broadcasts that replace an all-gather."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        """Returns whether all have ended. Raises what one of them raised, also while others run."""
        ended = [work for work in self._works if work.is_completed()]
        for work in ended:
            work.wait()
        return len(ended) == len(self._works)

    def wait(self, *timeout: timedelta) -> bool:
        for work in self._works:
            work.wait(*timeout)
        return True


def reduce_scatter(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor, average: bool):
    """Starts a reduce-scatter of ``source`` into ``output``; returns the work."""
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    return _scatter()(output, source, op=op, group=group, async_op=True)


def _scatter() -> Callable[..., Any]:
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_GATHER, _SCATTER = _gather(), _scatter()  # valid unless patched


def all_to_all(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor) -> Any:
    """Starts an all-to-all of equal parts of ``source``, one per rank, into ``output``. Returns the work."""
    return dist.all_to_all_single(output, source, group=group, async_op=True)


def wait(work, timeout: timedelta | None = None) -> bool:
    """Waits for the result of a collective call. ``timeout`` replaces that of its process group."""
    # Synchronous process groups (fake, threaded) return nothing to wait for.
    if work is not None and hasattr(work, "wait"):
        work.wait() if timeout is None else work.wait(timeout)
    return True


# --- several gathers in one ---

# Dtypes that every backend supports. Inputs of several dtypes, or of others (float8, int16), travel as bytes.
_TRANSPORTED = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
)
Gather = Callable[[torch.Tensor, torch.Tensor], Any]


def gather_packed(gather: Gather, world: int, rank: int, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Starts ``gather(output, source)`` for all pairs at once. Returns the work to ``wait`` for, or None.

    Args:
        gather: the collective, asynchronous or not.
        world: number of ranks.
        rank: this rank.
        pairs: contiguous (output, source) tensors. An output holds ``world`` sources in sequence, in their dtype.
    """
    dtypes = {source.dtype for _, source in pairs}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    if dtype not in _TRANSPORTED:
        dtype = torch.uint8
    columns = [(output.reshape(-1).view(dtype), source.reshape(-1).view(dtype)) for output, source in pairs]
    if len(columns) == 1:
        return gather(*columns[0])
    starts, width = aligned_starts(source.numel() for _, source in columns)
    staging = torch.empty(world, width, dtype=dtype, device=columns[0][0].device)
    for start, (_, source) in zip(starts, columns, strict=True):
        staging[rank, start : start + source.numel()].copy_(source)
    work = gather(staging.view(-1), staging[rank])
    return _Unpack(work, staging, starts, columns)


class _Unpack:
    """A work whose end distributes the gathered bytes."""

    def __init__(self, work: Any, staging: torch.Tensor, starts: list[int], columns: list) -> None:
        self._work, self._staging, self._starts, self._columns = work, staging, starts, columns

    def wait(self) -> bool:
        if self._columns:
            wait(self._work)
            for start, (output, source) in zip(self._starts, self._columns, strict=True):
                rows = self._staging[:, start : start + source.numel()]
                output.view(self._staging.shape[0], source.numel()).copy_(rows)
            self._columns = []
        return True


# --- explanation of failures ---


class Diverged(RuntimeError):
    """The ranks of a process group were about to post different collectives, or one of them has left. All raise it."""


@contextlib.contextmanager
def explained(group: dist.ProcessGroup | None, what: str) -> Iterator[None]:
    """Explains a failed collective over ``group`` inside the block, as ``explain_collective`` does."""
    try:
        yield
    except Exception as error:
        told = explain_collective(group, error, what)
        if told is error:
            raise
        raise told  # noqa: B904 (it has its cause)


def explain_collective(group: dist.ProcessGroup | None, error: BaseException, what: str) -> BaseException:
    """Returns the exception to raise in place of ``error``, which a collective of ``group`` raised on this rank.

    ``what`` is the operation, with its unit if it has one. Errors that do not come from the backend get a note and are
    returned. Ranks are those of the default group.
    """
    if isinstance(error, Diverged):
        return error
    where = f"{_place_in(group)} was in the {what}"
    if not isinstance(error, RuntimeError) or isinstance(error, NotImplementedError):
        error.add_note(f"fsdp2x: {where}")
        return error
    known = introduced()
    if ended := name_ended(known):
        said = f"{ended} ended meanwhile. Its own output says why. Restart all ranks."
    else:
        here = own_host()
        said = "no rank of this host has ended"
        if len(known) < dist.get_world_size():
            said = f"none of the {len(known)} ranks that this one has met has ended"
        if any(process.host != here for process in known.values()):
            said += ", one of another host may have"
        said += ". Otherwise one hangs, has raised and lives, or runs other modules: look at the stacks of all ranks."
    explained = RuntimeError(f"process group: {where}, when it failed: {said} (the backend says: {error})")
    explained.__cause__ = error
    return explained


def _place_in(group: dist.ProcessGroup | None) -> str:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if world == dist.get_world_size():
        return f"rank {rank} of {world}"
    return f"rank {dist.get_rank()}, which is {rank} of the {world} of its group,"
