"""Starts the ranks of a side, waits for them with a time limit, and reads what they recorded."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from fsdp2x.compare.judge import Run
from fsdp2x.compare.side import Request
from fsdp2x.compare.trace import Key, RankTrace
from fsdp2x.ranks import first_failure, how_it_ended, last_lines, local_ranks

_END_S = 10


class SideFailedError(RuntimeError):
    """A side ended with an error, or took too long."""


@dataclass(frozen=True)
class Side:
    """A command to run on ranks: an engine of ``engines.py``, and a script or `-m MODULE` with its arguments."""

    label: str
    engine: str
    words: tuple[str, ...]
    num_ranks: int

    def __str__(self) -> str:
        how = "sharded as the script says" if self.engine == "script" else f"sharded by {self.engine}"
        return f"{' '.join(self.words)}, {'unsharded' if self.engine == 'unsharded' else how}"


@dataclass(frozen=True)
class Launcher:
    """Runs sides on this host, each within ``timeout`` seconds, with files in ``folder``.

    ``num_parts``: how many ranks of side a each rank of side b stands for.
    """

    num_parts: int
    num_steps: int
    timeout: float
    folder: Path

    def record(self, side: Side, noise_seed: int | None = None) -> Run:
        """Runs a side and returns its traces."""
        folder = self.folder / (side.label if noise_seed is None else f"{side.label}-noise")
        traces = self._start(side, folder, self.num_steps, noise_seed=noise_seed)
        return Run(traces, self._num_parts_of(side))

    def keep(self, side: Side, key: Key) -> dict[int, Tensor]:
        """Runs a side again up to a step, and returns the full tensor of each rank that has it."""
        folder = self.folder / f"{side.label}-full"
        traces, num_parts = self._start(side, folder, key.step + 1, keep=(key,)), self._num_parts_of(side)
        kept = {rank: one.kept[key] for rank, one in enumerate(traces) if key in one.kept}
        return {
            rank * num_parts + part: parts[part % len(parts)]
            for rank, parts in kept.items()
            for part in range(num_parts)
        }

    def _num_parts_of(self, side: Side) -> int:
        return self.num_parts if side.label == "b" else 1

    def _start(self, side: Side, folder: Path, num_steps: int, **more: Any) -> list[RankTrace]:
        source = str(self.folder / "a") if side.label == "b" else ""
        request = Request(
            side.engine, str(folder), num_steps, os.getpid(), num_parts=self.num_parts, source=source, **more
        )
        (folder / "logs").mkdir(parents=True)
        words = ("-m", "fsdp2x.compare.side", json.dumps(asdict(request)), *side.words)
        logs = DefaultLogsSpecs(str(folder / "logs"), redirects=Std.ALL)
        num_threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
        with local_ranks(f"side {side.label}", words, side.num_ranks, num_threads, logs, _END_S) as started:
            result = started.wait(timeout=self.timeout, period=0.1)
            why = f"took longer than {self.timeout:g} s. Raise --timeout, or lower --steps."
            if result is None or result.failures:
                why = f"failed. {_describe(result.failures, started.stderrs)}" if result else why
                raise SideFailedError(f"side {side.label} ({side}) {why}")
        return [RankTrace.load(folder / f"trace-{rank}.pt") for rank in range(side.num_ranks)]


def _describe(failures: dict[int, Any], logs: Any) -> str:
    """Returns the error of the rank that failed first, with the last lines that it wrote."""
    first = first_failure(failures)
    return f"Rank {first.local_rank} ended {how_it_ended(first)}:\n{last_lines(logs, first)}"
