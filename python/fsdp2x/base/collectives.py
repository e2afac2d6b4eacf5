"""Collectives of CPU process groups: starts them under FSDP2's names, packs them, and waits for them.

``explained`` adds rank, operation and unit to the error of a failed collective.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from fsdp2x.base import torch_private
from fsdp2x.base.memory_file import aligned_starts
from fsdp2x.base.processes import introduced, name_ended, own_host

# Part of a rank below which one collective is faster than messages between each two ranks, over gloo.
MESSAGE_BYTES = 1 << 18


Count = Callable[[], Any]


def post(count: Count | None, *posts: Callable[[], Any], works: list | None = None) -> list:
    """Calls ``posts``, then ``count``, and returns the works, which it adds to ``works``.

    This is one call in C. So an exception of a signal handler comes before all of it or after all of it.
    """
    works = [] if works is None else works
    works.extend(filter(None, map(operator.call, posts if count is None else (*posts, count))))
    return works


def all_gather(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor, count: Count | None = None):
    """Starts an all-gather of ``source`` into ``output`` and returns the work. ``count`` notes that it is posted.

    Over gloo, ranks exchange large parts as messages. gloo's own gather copies into memory that it allocates.
    """
    is_large = source.nbytes >= MESSAGE_BYTES and group is not None
    if not (is_large and torch_private.is_gloo(group) and may_replace()):
        return plain_all_gather(group, output, source, count)
    own = output.view(group.size(), -1)[group.rank()]
    if own.data_ptr() != source.data_ptr():
        own.copy_(source.view(-1))
    return gather_in_place(group, [output], [own], count)


def plain_all_gather(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor, count: Count | None = None):
    """Starts one all-gather, also if ``all_gather`` would exchange messages. Returns the work."""
    if group is not None and torch_private.is_gloo(group) and may_replace():
        gather = functools.partial(group._allgather_base, output, source, _GATHER_IN_BACKGROUND)
    else:
        gather = functools.partial(_gather(), output, source, group=group, async_op=True)
    return _only(post(count, gather))


def _only(works: list) -> Any:
    # Synchronous process groups (fake, threaded) return nothing.
    return works[0] if works else None


def gather_in_place(
    group: dist.ProcessGroup, outputs: list[torch.Tensor], sources: list[torch.Tensor], count: Count | None = None
) -> Exchange:
    """Starts all-gathers of ``sources`` over gloo into ``outputs``. Returns the work of all.

    This rank's part of an output is not written. Its source may be that part.
    """
    world = group.size()
    received = [output.view(world, -1).unbind() for output in outputs]
    return Exchange(group, received, [[source] * world for source in sources], count)


class Exchange:
    """Collectives over gloo in which each rank sends a part to each other rank, in messages posted at once.

    ``received`` and ``sent`` are lists of parts by rank. Those of this rank are not used. None: there is no message.

    ``posted`` is the work of an all-reduce of one byte. It ends when all ranks have posted their messages, which then
    end without the peers' main threads.

    Only a wait shows whether a message has ended. If that times out, gloo closes the connections of the whole group. A
    message whose work is gone is never sent, and its connection stops. So the works of an exchange whose caller gave up
    are kept, with their memory, until a later exchange of the group has ended.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        received: Sequence[Sequence[torch.Tensor | None]],
        sent: Sequence[Sequence[torch.Tensor | None]],
        count: Count | None = None,
    ) -> None:
        world, rank = group.size(), group.rank()
        later = [(rank + distance) % world for distance in range(1, world)]
        posts: list[Callable[[], Any]] = []
        for tag, parts in enumerate(received, _TAG):
            parts_of = ((parts[peer], peer) for peer in later)
            posts += [functools.partial(group.recv, [part], peer, tag) for part, peer in parts_of if part is not None]
        for tag, parts in enumerate(sent, _TAG):
            parts_of = ((parts[peer], peer) for peer in reversed(later))
            posts += [functools.partial(group.send, [part], peer, tag) for part, peer in parts_of if part is not None]
        mark = torch.zeros(1, dtype=torch.uint8, device="cpu")
        posts.append(functools.partial(group.allreduce, [mark], _IN_BACKGROUND))
        self._messages: list[dist.Work] = []
        self._started = _started.setdefault(group, [])
        self._started.append(self)  # before the posts, because their works must be kept
        self.posted = post(count, *posts, works=self._messages)[-1]

    def wait(self, *timeout: timedelta) -> bool:
        """Waits for the messages, and for those of earlier exchanges, which two ranks send in the same order."""
        while self in self._started:
            messages = self._started[0]._messages
            if messages:  # otherwise its caller was interrupted before the posts
                messages[-1].wait(*timeout)
            while len(messages) > 1:
                # A second wait for a message would not end. There is one if a signal handler raised after the first.
                if not (messages[0].is_completed() and messages[0].is_success()):
                    messages[0].wait(*timeout)
                del messages[0]
            del self._started[0]
        return True


def unfinished_exchanges(group: dist.ProcessGroup) -> list[Exchange]:
    """Returns the exchanges for which no wait has ended, in the order of their start."""
    return list(_started.get(group, ()))


_started: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Exchange]] = weakref.WeakKeyDictionary()
_TAG = 1 << 30  # of an exchange's first messages; torch and users count from 0
_IN_BACKGROUND = dist.AllreduceOptions()
_IN_BACKGROUND.asyncOp = True
_GATHER_IN_BACKGROUND = AllgatherOptions()
_GATHER_IN_BACKGROUND.asyncOp = True


def may_replace() -> bool:
    """Returns whether other collectives may replace gathers and reduce-scatters: no mode and no patch sees them."""
    return _gather() is _GATHER and _scatter() is _SCATTER and not torch_private.is_observed()


# FSDP2 uses one of two names, depending on torch. Looked up at each call, because patches and counters must see it.
def _gather() -> Callable[..., Any]:
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter(
    group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor, average: bool, count: Count | None = None
):
    """Starts a reduce-scatter of ``source`` into ``output``; returns the work."""
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    return _only(post(count, functools.partial(_scatter(), output, source, op=op, group=group, async_op=True)))


def _scatter() -> Callable[..., Any]:
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_GATHER, _SCATTER = _gather(), _scatter()  # valid unless patched


def all_to_all(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor, count: Count | None = None) -> Any:
    """Starts an all-to-all of equal parts of ``source``, one per rank, into ``output``. Returns the work.

    This rank's part of ``output`` may stay unwritten, because over gloo, ranks exchange large parts as messages.
    """
    over_gloo = group is not None and torch_private.is_gloo(group)
    if over_gloo and source.nbytes >= MESSAGE_BYTES * group.size():
        sent, received = (tensor.view(group.size(), -1).unbind() for tensor in (source, output))
        return Exchange(group, [received], [sent], count)
    if over_gloo and may_replace():
        exchange = functools.partial(group.alltoall_base, output, source, [], [])
    else:
        exchange = functools.partial(dist.all_to_all_single, output, source, group=group, async_op=True)
    return _only(post(count, exchange))


def wait(work, timeout: timedelta | None = None) -> bool:
    """Waits for the result of a collective call, or of several. ``timeout`` replaces that of its process group."""
    # Synchronous process groups (fake, threaded) return nothing to wait for.
    if work is not None and hasattr(work, "wait"):
        work.wait() if timeout is None else work.wait(timeout)
    elif isinstance(work, list):
        for one in work:
            wait(one, timeout)
    return True


# --- several gathers in one ---

# Dtypes that every backend supports. Inputs of several dtypes, or of others (float8, int16), travel as bytes.
_TRANSPORTED = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
)
Gather = Callable[..., Any]


def gather_packed(
    gather: Gather, world: int, rank: int, pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor]]
) -> Any:
    """Starts ``gather(output, source)`` for all pairs at once. Returns the work to ``wait`` for, or None.

    Args:
        gather: the collective, asynchronous or not.
        world: number of ranks.
        rank: this rank.
        pairs: contiguous (output, source) tensors. An output holds ``world`` sources in sequence, in their dtype, or is
            None if this rank does not need it.
    """
    dtypes = {source.dtype for _, source in pairs}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    if dtype not in _TRANSPORTED:
        dtype = torch.uint8
    columns = [
        (None if output is None else output.reshape(-1).view(dtype), source.reshape(-1).view(dtype))
        for output, source in pairs
    ]
    if len(columns) == 1:
        return gather(*columns[0])
    starts, width = aligned_starts(source.numel() for _, source in columns)
    staging = torch.empty(world, width, dtype=dtype, device=columns[0][1].device)
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
                if output is not None:
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
    where, known = f"{_place_in(group)} was in the {what}", introduced()
    if isinstance(error, Diverged):
        # A peer may have left because a rank has ended with which only the peer shares a group.
        ended = name_ended(known, wait_s=0)
        if not ended:
            return error
    elif not isinstance(error, RuntimeError) or isinstance(error, NotImplementedError):
        error.add_note(f"fsdp2x: {where}")
        return error
    else:
        ended = name_ended(known)
    if ended:
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
