"""What a step did: collectives from a profiler's trace, and with copies from the record of a device transport."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

# c10d's operations -> the collective, and which argument is whole: all ranks' bytes.
_WHOLE = {
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
}
# Entries of a record that launch a kernel or a copy.
_COPIES = ("copy", "pack", "write_rows", "divide", "add", "assign", "transfer")
# As traces name them.
_ITEM_BYTES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8, "unsigned char": 1}


def collectives_of(run: Callable[[], object]) -> dict[str, list[int]]:
    """Kind -> bytes of all ranks together, of each call that ``run`` makes, largest first."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    with tempfile.TemporaryDirectory(prefix="fsdp2x-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    found: dict[str, list[int]] = defaultdict(list)
    sums = [event["args"] for event in events if event.get("name") == "gloo:all_reduce"]
    # Over gloo, an all-reduce of ours stands for the reduce-scatter of a unit.
    is_ours = not any(event.get("name") == "c10d::_reduce_scatter_base_" for event in events)
    reduces = [event for event in events if is_ours and event.get("name", "").startswith("FSDP::post_backward_reduce")]
    types = {tuple(one["Input Dims"][0]): one["Input type"][0] for one in sums}
    for event in events:
        arguments = event.get("args", {})
        if event.get("name") in _WHOLE:
            kind, place = _WHOLE[event["name"]]
            dims, name = arguments["Input Dims"][place], arguments["Input type"][place]
            if kind == "all_reduce":  # of a list, whose dtypes traces do not say
                ((*dims,),) = dims
                name = types[tuple(dims)]
                if any(one["ts"] <= event["ts"] <= one["ts"] + one["dur"] for one in reduces):
                    kind = "reduce_scatter"
            found[kind].append(torch.Size(dims).numel() * _ITEM_BYTES[name])
    return {kind: sorted(sizes, reverse=True) for kind, sizes in found.items()}


def collectives_of_record(entries: list[tuple]) -> dict[str, list[int]]:
    """Likewise, of a record's entries: operation, lane, subject, and (address, bytes) of what it reads and writes."""
    found: dict[str, list[int]] = defaultdict(list)
    for operation, _, _, reads, writes in entries:
        kind = operation.partition(" ")[0]
        if kind in ("all_gather", "reduce_scatter", "all_reduce"):
            found[kind] += [size for _, size in (writes if kind == "all_gather" else reads)]
    return {kind: sorted(sizes, reverse=True) for kind, sizes in found.items()}


def num_copies_of_record(entries: list[tuple]) -> int:
    """Launches of kernels and copies that are no collectives."""
    return sum(entry[0] in _COPIES for entry in entries)
