"""``fsdp2x.profile``: writes a trace of a few steps, and the owners of memory, one file per rank each."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.lifecycle.tree import roots_of, unit_states


@checked
@contextlib.contextmanager
def profile(
    folder: str | os.PathLike,
    *,
    model: nn.Module | None = None,
    memory: bool = False,
    activities: Iterable[torch.profiler.ProfilerActivity] | None = None,
    schedule: Callable[[int], torch.profiler.ProfilerAction] | None = None,
    record_shapes: bool = False,
    with_stack: bool = False,
) -> Iterator[torch.profiler.profile]:
    """Profiles the block and writes the results to ``folder`` when it ends, also after an exception.

    The trace names the engine's work as FSDP2's does: ``FSDP::all_gather (layers.0)``,
    ``FSDP::post_backward_reduce (layers.0)`` and so on. Without a profiler these ranges cost nothing measurable.

    - ``trace-rank<R>.json.gz``: a Chrome trace, for Perfetto or ``chrome://tracing``.
    - ``memory-rank<R>.json``, with ``memory``: flat buffers of ``model`` and buffers that its units use, as
      ``{"kind", "unit", "address", "bytes"}``. Addresses are those of the snapshot.
    - ``memory-rank<R>.pickle``, with ``memory`` on CUDA: the allocator's snapshot with the history of this block.

    Args:
        folder: the output folder, made if it does not exist. Files of an earlier profile are replaced.
        model: the sharded model. Required with ``memory``.
        memory: whether to record memory as well.
        activities: activities of ``torch.profiler``. Default: the CPU, and CUDA if there is one.
        schedule: schedule of ``torch.profiler``, for which you call ``step()`` on the profiler. Default: profile
            everything.
        record_shapes: whether to record the shapes of operators' inputs.
        with_stack: whether to record the Python stack of every operator. This slows operators down.

    Yields:
        The ``torch.profiler.profile``.

    Raises:
        ValueError: ``memory`` without a sharded ``model``.
    """
    if memory and (model is None or not unit_states(model)):
        raise ValueError(
            "fsdp2x.profile: memory=True needs a sharded model to label its memory. Pass model=, after fully_shard."
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    on_cuda = torch.cuda.is_available()
    if memory and on_cuda:
        torch_private.start_memory_history()
    profiler = torch.profiler.profile(
        activities=activities, schedule=schedule, record_shapes=record_shapes, with_stack=with_stack
    )
    try:
        with profiler:
            yield profiler
    finally:
        if memory and model is not None:
            text = json.dumps(memory_of(model), indent=1)
            (folder / f"memory-rank{rank}.json").write_text(text + "\n", encoding="utf-8")
            if on_cuda:
                torch_private.stop_memory_history(str(folder / f"memory-rank{rank}.pickle"))
        if profiler.profiler is not None and profiler.profiler.kineto_results is not None:
            profiler.export_chrome_trace(str(folder / f"trace-rank{rank}.json.gz"))


def memory_of(model: nn.Module) -> list[dict]:
    """Returns the engine's buffers for ``model``: ``{"kind", "unit", "address", "bytes"}``, in bytes, largest first.

    Kinds are "shard pool", "gradient pool", and for buffers in use or kept for reuse, with their last user as the unit:
    "slot", "staging", "reduce buffer", "segment", "uploaded shards", "resident shards", "free". Shared memory is not
    listed, because no allocator owns it. A device lists only what is in use, which is hardly anything between steps.
    """
    found = []
    for state in unit_states(model):
        for group in state.groups:
            name = state.name
            if (pool := group.pool) is not None:
                found.append(_entry("shard pool", name, pool.data_ptr(), pool.nbytes))
            if group.engine is not None and (num_bytes := group.engine.gradient_pool_bytes):
                found.append(_entry("gradient pool", name, group.engine.gradient_pool_address, num_bytes))
    for root in roots_of(unit_states(model)):
        found += [_entry(*loan) for loan in root.loans()]
    return sorted(found, key=lambda entry: -entry["bytes"])


def _entry(kind: str, unit: str, address: int, num_bytes: int) -> dict:
    return {"kind": kind, "unit": unit, "address": address, "bytes": num_bytes}
