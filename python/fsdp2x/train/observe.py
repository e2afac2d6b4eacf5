"""Looking at a run: the shard report, windows of torch's profiler, and memory snapshots."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2x.runtime.failures import exchange

from ..memory import memory_report
from ..optim.local import local_tensor
from ..runtime import torch_private
from ..tables import columns
from .config import LoggingConfig
from .metrics import memory_bytes

logger = logging.getLogger(__name__)


def shard_report(model: torch.nn.Module) -> str:
    """A table of all parameters: name, placement, whole shape, and the shape on each rank; collective.

    Ranks with the same shape stand together: `0-2: (3, 8)  3: (1, 8)`.
    """
    mine = {name: tuple(local_tensor(parameter).shape) for name, parameter in model.named_parameters()}
    shapes = exchange(mine)
    rows = [("parameter", "dtype", "placement", "global", "local (by rank)")]
    for name, parameter in model.named_parameters():
        placed = ", ".join(map(str, parameter.placements)) if isinstance(parameter, DTensor) else "whole"
        local = "  ".join(f"{ranks}: {shape}" for ranks, shape in _runs([rank[name] for rank in shapes]))
        dtype = str(parameter.dtype).removeprefix("torch.")
        rows.append((name, dtype, placed, str(tuple(parameter.shape)), local))
    return "\n".join(columns(rows, left=range(len(rows[0]))))


def _runs(shapes: list[tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    """Neighbouring ranks with equal shapes as one entry."""
    runs: list[list[Any]] = []
    for rank, shape in enumerate(shapes):
        if runs and runs[-1][2] == shape:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank, shape])
    return [(str(first) if first == last else f"{first}-{last}", shape) for first, last, shape in runs]


class Observer:
    """Calls of the training loop around each step; every rank writes its own files below the run's folder.

    profile/rank-R-steps-A-B.json  chrome trace of the steps A to B
    memory/rank-R-step-N.pickle    torch's snapshot of CUDA allocations (for torch's memory viewer), or
    memory/rank-R-step-N.json      on a CPU: bytes in use, and what the plan says of each unit and of the optimizer
    """

    def __init__(self, config: LoggingConfig, output: Path, rank: int, device: torch.device):
        self.output, self.rank, self.device = output, rank, device
        self.first = config.profile_start
        self.last = config.profile_end or config.profile_start
        self.snapshot_step = config.memory_snapshot
        self._profiler: Any = None
        if self.snapshot_step is not None and device.type == "cuda":
            torch_private.start_memory_history()

    def before_step(self, step: int) -> None:
        # A run that was resumed inside the window records the rest of it.
        if self.first is not None and self.first <= step <= self.last and self._profiler is None:
            self.first = step
            self._profiler = torch.profiler.profile(record_shapes=True)
            self._profiler.start()

    def after_step(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        if self._profiler is not None and step >= self.last:
            self._end_profile(step)
        if self.snapshot_step == step:
            self._snapshot(step, model, optimizer)

    def _end_profile(self, step: int) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        folder = self.output / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self.rank}-steps-{self.first}-{step}.json"
        profiler.export_chrome_trace(str(path))
        logger.info("trace of steps %d to %d: %s", self.first, step, path)

    def _snapshot(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        folder = self.output / "memory"
        folder.mkdir(parents=True, exist_ok=True)
        if self.device.type == "cuda":
            torch_private.stop_memory_history(str(folder / f"rank-{self.rank}-step-{step}.pickle"))
            return
        found = {
            "step": step,
            "memory_bytes": memory_bytes(self.device),
            "planned": memory_report(model, optimizer).to_dict(),
        }
        (folder / f"rank-{self.rank}-step-{step}.json").write_text(json.dumps(found, indent=1))

    def close(self, step: int) -> None:
        """Ends a window that the run did not reach the end of."""
        if self._profiler is not None:
            self._end_profile(step)
