"""Starts the collectives of the CPU's process groups, under the names that upstream's FSDP2 uses, and waits."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp2x.runtime import torch_private
from fsdp2x.runtime.annotations import skips_checks


@skips_checks
def all_gather(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor):
    """Starts an all-gather of ``source`` into ``output``; returns the work."""
    gather = _gather()
    if source.nbytes < _LARGE_BYTES or gather is not _GATHER or not _is_unobserved_gloo(group):
        return gather(output, source, group=group, async_op=True)
    # gloo's own gathers into memory that it allocates each time, and copies it.
    parts = output.view(dist.get_world_size(group), -1).view(torch.uint8)
    own = parts[dist.get_rank(group)]
    if own.data_ptr() != source.data_ptr():
        own.copy_(source.view(-1).view(torch.uint8))
    return _Parts([dist.broadcast(part, group=group, group_src=i, async_op=True) for i, part in enumerate(parts)])


def _is_unobserved_gloo(group: dist.ProcessGroup) -> bool:
    """Whether other collectives may stand for those that a dispatch mode would see."""
    return torch_private.is_gloo(group) and not torch_private.is_observed()


# Upstream's FSDP2 of this torch uses one of two names. Looked up at each call: patches and counters must see it.
def _gather() -> Callable[..., Any]:
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Parts:
    """The work of the broadcasts that stand for an all-gather."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, *timeout: timedelta) -> bool:
        for work in self._works:
            work.wait(*timeout)
        return True


@skips_checks
def reduce_scatter(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor, average: bool):
    """Starts a reduce-scatter of ``source``, which it may overwrite, into ``output``; returns the work."""
    scatter = _scatter()
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    if scatter is not _SCATTER or not _is_unobserved_gloo(group):
        return scatter(output, source, op=op, group=group, async_op=True)
    # gloo's own is an all-reduce of a copy, whose work waits without a limit.
    return _PartOfSum(dist.all_reduce(source, group=group, async_op=True), output, source, group, average)


def _scatter() -> Callable[..., Any]:
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_GATHER, _SCATTER = _gather(), _scatter()  # as long as nobody patches them
_LARGE_BYTES = 1 << 20  # below, one operation is faster than several


class _PartOfSum:
    """The work of an all-reduce that stands for a reduce-scatter: this rank's part goes into ``output`` at its end."""

    def __init__(
        self, work: dist.Work, output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, average: bool
    ) -> None:
        self._work, self._output = work, output
        self._divisor = dist.get_world_size(group) if average else 1
        self._part = source.narrow(0, dist.get_rank(group) * output.numel(), output.numel())
        self.is_completed = work.is_completed

    def wait(self, *timeout: timedelta) -> bool:
        self._work.wait(*timeout)
        self._output.copy_(self._part)
        if self._divisor != 1:
            self._output.div_(self._divisor)
        return True


@skips_checks
def all_to_all(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor):
    """Starts an all-to-all of equal parts of ``source``, one for each rank, into ``output``; returns the work."""
    return dist.all_to_all_single(output, source, group=group, async_op=True)


@skips_checks
def wait(work, timeout: timedelta | None = None) -> bool:
    """Waits for what a collective returned; ``timeout``: as long as this, in place of its process group's."""
    # Synchronous process groups (fake, threaded) return nothing to wait for.
    if work is not None and hasattr(work, "wait"):
        work.wait() if timeout is None else work.wait(timeout)
    return True
