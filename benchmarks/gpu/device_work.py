"""Reads a device's work from a profiler's trace: kernels and copies by stream, their number, and what overlapped."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

KINDS = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "fills"}
# Calls of the runtime with which a host waits for its device, or takes memory from it.
WAITS = ("Synchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc")


@dataclass(frozen=True)
class Work:
    """One kernel, copy or fill. `name` of a copy says from where to where, as "Memcpy DtoD (Device -> Device)"."""

    kind: str
    name: str
    stream: int
    start_us: float
    end_us: float


def work_of(trace: dict) -> list[Work]:
    """All of a Chrome trace's, by start."""
    found = []
    for event in trace["traceEvents"]:
        kind = KINDS.get(str(event.get("cat", "")).lower())
        if kind is None or event.get("ph") != "X":
            continue
        start = float(event["ts"])
        end = start + float(event.get("dur", 0.0))
        found.append(Work(kind, event["name"], int(event["args"]["stream"]), start, end))
    return sorted(found, key=lambda work: work.start_us)


def waits_of(trace: dict) -> list[str]:
    """Names of the runtime's calls by which the host waited or took memory, in order."""
    return [
        event["name"]
        for event in trace["traceEvents"]
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and any(wait in event["name"] for wait in WAITS)
    ]


def counts(work: Iterable[Work]) -> dict[str, int]:
    """How many kernels, copies and fills, and "all" of them together."""
    found = dict.fromkeys(KINDS.values(), 0)
    for one in work:
        found[one.kind] += 1
    return {**found, "all": sum(found.values())}


def per_unit(sharded: dict[str, int], unsharded: dict[str, int], num_units: int) -> dict[str, float]:
    """Returns the counts that sharding adds to those of the unsharded model, by unit."""
    return {kind: (sharded[kind] - unsharded[kind]) / num_units for kind in sharded}


def compute_stream(work: list[Work]) -> int:
    """The stream on which kernels ran the longest."""
    if not work:
        raise ValueError("the trace has no kernels: the profiler does not see the device")
    busy: dict[int, float] = {}
    for one in work:
        busy[one.stream] = busy.get(one.stream, 0.0) + one.end_us - one.start_us
    return max(busy, key=lambda stream: busy[stream])


def busy_us(work: Iterable[Work]) -> float:
    """How long any of it ran."""
    return sum(end - start for start, end in _merged(work))


def shared_us(first: Iterable[Work], second: Iterable[Work]) -> float:
    """How long some of the first and some of the second ran at the same time."""
    others = _merged(second)
    total = 0.0
    for start, end in _merged(first):
        total += sum(max(0.0, min(end, stop) - max(start, begin)) for begin, stop in others)
    return total


def _merged(work: Iterable[Work]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for one in sorted(work, key=lambda one: one.start_us):
        if merged and one.start_us <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], one.end_us))
        else:
            merged.append((one.start_us, one.end_us))
    return merged


def trace_of(run: Callable[[], object], device_type: str = "cuda") -> dict:
    """The Chrome trace of `run`, which the device has finished when the trace ends."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device_type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with tempfile.TemporaryDirectory(prefix="fsdp2x-trace-") as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=activities) as profiler:
            run()
            if device_type == "cuda":
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))
