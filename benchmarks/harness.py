"""Runs benchmarks: alternating sides in one process group, medians and spread, JSON, and a table.

Only ratios of implementations in one run count, because machines are noisy and differ.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass
class Samples:
    """Seconds of each phase of each counted step of one implementation."""

    phases: dict[str, list[float]] = field(default_factory=dict)

    def add(self, phase: str, seconds: float) -> None:
        self.phases.setdefault(phase, []).append(seconds)

    def extend(self, other: Samples) -> None:
        """Adds the times of another round."""
        for phase, values in other.phases.items():
            self.phases.setdefault(phase, []).extend(values)

    def summary(self) -> dict[str, dict[str, float]]:
        """Per phase: median, minimum and maximum in milliseconds."""
        return {
            phase: {
                "median_ms": 1e3 * statistics.median(values),
                "min_ms": 1e3 * min(values),
                "max_ms": 1e3 * max(values),
            }
            for phase, values in self.phases.items()
        }


class PhaseTimer:
    """Splits a step into phases; the last call of ``mark`` before ``stop`` ends the step.

    ``clock``: seconds from any beginning.
    """

    def __init__(self, samples: Samples, counted: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._samples, self._counted, self._clock = samples, counted, clock
        self._start = self._last = clock()

    def mark(self, phase: str) -> None:
        now = self._clock()
        if self._counted:
            self._samples.add(phase, now - self._last)
        self._last = now

    def stop(self) -> None:
        if self._counted:
            self._samples.add("step", self._clock() - self._start)


def launch(script: str, world: int, timeout_s: float, more: Sequence[str] = ()) -> int:
    """Runs ``script`` again under torchrun with the same arguments and ``more``; returns its exit status."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # torchrun does not remove its log folder.
    with tempfile.TemporaryDirectory(prefix="fsdp2x-bench-") as logs:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", f"--log-dir={logs}"]
        command = [sys.executable, *torchrun, script, *sys.argv[1:], *more]
        return subprocess.run(command, env=env, timeout=timeout_s, check=False).returncode


def launch_runs(script: str, world: int, timeout_s: float, runs: int, path: Path | None) -> int:
    """``launch`` so many times, each in processes of its own; ``path`` then holds the medians of their medians.

    ``script`` writes its results to the last ``--json`` of its arguments. Returns the first exit status that is not 0,
    and 2 without a path: what only the last run says is not the result of all.
    """
    if path is None:
        print("--runs: name the file of their medians with --json", file=sys.stderr)
        return 2
    records = []
    with tempfile.TemporaryDirectory(prefix="fsdp2x-bench-") as folder:
        for number in range(runs):
            part = Path(folder) / f"{number}.json"
            status = launch(script, world, timeout_s, ["--runs", "1", "--json", str(part)])
            if status != 0:
                return status
            records.append(json.loads(part.read_text()))
    merged = {**records[0], "results": merge([record["results"] for record in records])}
    _write(path, merged)
    return 0


def merge(results: list):
    """One result of several runs: median, least and largest of each time's medians; the rest is the first run's."""
    first = results[0]
    if isinstance(first, list):
        return [merge(list(column)) for column in zip(*results, strict=True)]
    if not isinstance(first, dict):
        return first
    if "median_ms" not in first:
        return {key: merge([result[key] for result in results]) for key in first}
    medians = [result["median_ms"] for result in results]
    return {
        "median_ms": statistics.median(medians),
        "min_ms": min(medians),
        "max_ms": max(medians),
        "runs": len(medians),
    }


def spread(time: dict[str, float], digits: int) -> str:
    """A median, with the range of the runs where there were several."""
    found = f"{time['median_ms']:.{digits}f}"
    if time.get("runs", 1) == 1:
        return found
    return f"{found} ({time['min_ms']:.{digits}f}-{time['max_ms']:.{digits}f})"


def start_group() -> int:
    """Joins the gloo group torchrun describes; one thread a rank. Returns the rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    return dist.get_rank()


def start_together() -> None:
    """Returns on all ranks within microseconds if each has its own core. Otherwise it is a barrier.

    A barrier releases ranks tens of microseconds apart. They would wait for each other in the first timed collective.
    """
    dist.barrier()
    if dist.get_world_size() > len(os.sched_getaffinity(0)):
        return
    # One clock for all processes of a host.
    deadline = torch.tensor([time.perf_counter() + 500e-6], dtype=torch.float64)
    dist.broadcast(deadline, src=0)
    while time.perf_counter() < deadline.item():
        pass


def alternate(
    steps: dict[str, Callable[[PhaseTimer], None]],
    warmup: int,
    count: int,
    *,
    before: Callable[[], None] = start_together,
    make_timer: Callable[[Samples, bool], PhaseTimer] = PhaseTimer,
) -> dict[str, Samples]:
    """Runs the steps of all implementations in turn, so that drift of the machine hits all alike.

    ``before`` runs in front of each step, and ``make_timer`` makes its clock of where to and whether it counts.
    """
    samples = {name: Samples() for name in steps}
    for index in range(warmup + count):
        names = list(steps) if index % 2 == 0 else list(reversed(steps))
        for name in names:
            before()
            timer = make_timer(samples[name], index >= warmup)
            steps[name](timer)
            timer.stop()
    return samples


def environment() -> dict[str, object]:
    """Describes the machine and the software, so that readers can judge the numbers."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "world": dist.get_world_size() if dist.is_initialized() else None,
        "threads_per_rank": torch.get_num_threads(),
        "commit": commit or "unknown",
    }


def parser(description: str | None) -> argparse.ArgumentParser:
    """With ``--json``, the file for ``save``."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, default=None, help="file for the numbers; none if absent")
    return made


def save(path: Path | None, name: str, results: dict | list) -> None:
    """Writes one benchmark's results with its environment, if a file was asked for."""
    if path is not None:
        _write(path, {"benchmark": name, "environment": environment(), "results": results})


def _write(path: Path, record: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def table(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is the head."""
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join([" --- "] + [" ---: "] * (len(head) - 1)) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])
