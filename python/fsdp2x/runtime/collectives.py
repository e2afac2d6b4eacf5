"""The collectives of the CPU's process groups: each starts one, under the name that upstream's FSDP2 uses, and waits."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp2x.runtime.annotations import skips_checks


@skips_checks
def all_gather(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor):
    """Starts an all-gather of ``source`` into ``output``; returns the work."""
    # Looked up at each call, under the name upstream's FSDP2 of this torch uses: patches and counters must see it.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, source, group=group, async_op=True)


@skips_checks
def reduce_scatter(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor, average: bool):
    """Starts a reduce-scatter of ``source`` into ``output``; returns the work."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    return scatter(output, source, op=op, group=group, async_op=True)


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
