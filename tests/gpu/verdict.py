"""Writes the last page of `make gpu-test`: which claims this machine has shown, which it has not, and why.

A pytest plugin for `--verdict FILE` (tests/conftest.py). A test names its claim with the mark `shows`. Claims run in
the order of this file, so that the first minutes on a device tell the most. The file is written again after each test,
so an interrupted run keeps its results.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

CLAIMS = {
    "kernels": "every kernel computes on the device what its twin does on the CPU",
    "collectives": "NCCL's, by both of its backends: every dtype, grouped, in stream order",
    "worlds": "steps as one of four ranks over NCCL are stock's, in every arrangement",
    "wire formats": "weights and gradients travel over NCCL in the codes that the CPU's loops make",
    "communication memory": "the process group's and symmetric memory serve steps",
    "steps": "steps are stock's: alone, several ranks on the device, streams, offloading",
    "optimizers": "the CPU's bits, torch's results, one launch, no wait of the host",
    "failures": "behind an exception or missing memory the next step is as it was to be",
    "flat memory": "200 steps that lack other gradients each hold what the first did",
    "no waits": "no steady step makes the host wait, whichever gradients it lacks",
    "launches": "a unit is a handful of launches, at most half of stock's",
    "memory": "the report's bytes are the allocator's, peaks at most stock's",
    "sleep": "a model that sleeps gives its memory to the driver, and goes on as before",
    "offload": "every mode trains as without, and holds and copies what it says",
    "overlap": "gathers and reductions run beside the compute",
    "graphs": "forwards and whole steps are captured, and replays compute the same",
    "timing": "slow devices and busy allocators change no result",
    "widths": "Llama and Qwen3 in the widths of 0.6B to 8B train as under stock",
    "second device": "a model on the second device leaves the first one alone",
    "shared device": "two ranks on one device, whose collectives come late at random, train as under stock",
    "many GPUs": "ranks on GPUs of their own train as under stock, and fail together",
    "broadcasts": "an engine on the second device takes buckets by NCCL, from a group beside the trainers'",
    "sanitizer": "no error and no race in kernels and training steps",
}
_WIDTH = 118


@dataclass
class Shown:
    """Results of one claim's tests, on the device and in the rehearsal of the same bodies on the CPU."""

    device: Counter = field(default_factory=Counter)
    rehearsal: Counter = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def state(self) -> str:
        """`FAILED` if anything has, `held` if anything has passed on the device, else `not shown`."""
        if self.device["failed"] or self.rehearsal["failed"]:
            return "FAILED"
        return "held" if self.device["passed"] else "not shown"


class Verdict:
    """Collects results while a session runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, tuple[str, bool]] = {}  # by name: claim, whether it is a rehearsal
        self._shown = {claim: Shown() for claim in CLAIMS}
        self._skips: Counter = Counter()
        self._failures: list[str] = []
        self._start = time.monotonic()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = {claim: number for number, claim in enumerate(CLAIMS)}
        for item in items:
            mark = item.get_closest_marker("shows")
            if mark is None or mark.args[0] not in CLAIMS:
                raise pytest.UsageError(f"{item.nodeid}: the mark `shows` names one of {', '.join(CLAIMS)}")
            callspec = getattr(item, "callspec", None)
            rehearsal = callspec is not None and callspec.params.get("place") == "streams"
            self._tests[item.nodeid] = (mark.args[0], rehearsal)
        # Rehearsals last, because device time is expensive.
        items.sort(key=lambda item: (self._tests[item.nodeid][1], order[self._tests[item.nodeid][0]]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        claim, rehearsal = self._tests[report.nodeid]
        shown = self._shown[claim]
        shown.seconds += report.duration
        if report.when != "call" and report.passed:
            return
        (shown.rehearsal if rehearsal else shown.device)[report.outcome] += 1
        if report.skipped:
            self._skips[_reason(report)] += 1
        elif report.failed:
            self._failures.append(f"{report.nodeid}: {_first_error(report)}")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(self.page())

    def pytest_unconfigure(self) -> None:
        if self._tests:
            print(f"\n{self.page()}\n(also in {self._path})")

    def page(self) -> str:
        """Returns the complete page, for a width of 118 columns."""
        lines = [machine(), "", f"{'claim':<90} {'device':<14} rehearsal"]
        for claim, shown in self._shown.items():
            name = f"{claim}: {CLAIMS[claim]}"
            lines.append(f"{name:<90} {_counts(shown.device, shown.state):<14} {_counts(shown.rehearsal, '')}".rstrip())
        if self._skips:
            lines += ["", "not run:"]
            lines += [f"  {number:4} x {reason}"[:_WIDTH] for reason, number in self._skips.most_common(12)]
        if self._failures:
            lines += ["", "failed:", *(f"  {failure}"[: 2 * _WIDTH] for failure in self._failures[:15])]
            if len(self._failures) > 15:
                lines.append(f"  and {len(self._failures) - 15} more")
        states = Counter(shown.state for shown in self._shown.values())
        end = f"of {len(CLAIMS)} claims {states['held']} held on this device, {states['FAILED']} FAILED, "
        end += f"{states['not shown']} were not shown; {time.monotonic() - self._start:.0f} s"
        return "\n".join([*lines, "", f"VERDICT: {end}"]) + "\n"


def machine() -> str:
    """Names the device, and the versions of torch, CUDA, and fsdp2x's kernels that would run on it."""
    from fsdp2x.base.native import _C

    kernels = "with" if _C.has_device_kernels() else "without"
    built = f"torch {torch.__version__}, CUDA {torch.version.cuda}, fsdp2x built {kernels} kernels"
    if not torch.cuda.is_available():
        return f"no CUDA device; {built}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}; {built}, NCCL {nccl}"


def _counts(counts: Counter, state: str) -> str:
    """Returns, for example, `held 12` or `FAILED 1 of 13`. Skipped ones do not count."""
    ran = counts["passed"] + counts["failed"]
    if not ran:
        return state if not counts else "not shown" if state else "skipped"
    return f"FAILED {counts['failed']} of {ran}" if counts["failed"] else f"held {ran}"


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ").splitlines()[0]


def _first_error(report: pytest.TestReport) -> str:
    """Returns the line that names the error, also from tracebacks of several ranks."""
    lines = [line.strip() for line in report.longreprtext.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E  ") or re.match(r"[\w.]+(Error|Exception|Failed)\b", line)]
    return (errors or lines[-1:] or ["no message"])[0].removeprefix("E ").strip()
