"""Reports a run: metrics of rank 0, the shard report, windows of torch's profiler, and memory snapshots."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2x.api import (
    columns,
    local_tensor,
    parse_json,
    profile,
    read_text,
    readable,
    start_memory_history,
    stop_memory_history,
)
from fsdp2x.base.errors import CheckpointError, first_line
from fsdp2x.base.failures import exchange
from fsdp2x.memory import memory_report
from fsdp2x.train.config import ConfigError, LoggingConfig, ParallelConfig
from fsdp2x.train.strategy import Batching

logger = logging.getLogger(__name__)

METRICS, PICTURE = "metrics.jsonl", "loss.png"
# Fewer points make no curve.
_FEWEST_POINTS = 10


# A function like `wandb.log`, called on rank 0 with numbers by name (`train/loss`) and `step=`.
Logger = Callable[..., Any]


class Metrics:
    """Writes one JSON object per line and flushes it, so that a killed run keeps every line it reported.

    Lines: {"event": "start" | "train" | "eval" | "save" | "resume" | "interrupt" | "end", "step": n,
    "time": seconds since 1970, ...}. `loss_hex` is the loss as an exact hexadecimal float. All methods do nothing on
    other ranks.
    """

    def __init__(
        self,
        output: Path,
        *,
        main: bool,
        tensorboard: bool | str | Path,
        progress: str,
        num_steps: int,
        first_step: int,
        loggers: Sequence[Logger] = (),
    ):
        """`tensorboard`: whether to write events, or their folder. `loggers` are functions like `wandb.log`."""
        self.main, self._num_steps = main, num_steps
        self._first: tuple[int, float] | None = None  # step and time of the first reported step
        self._file = self._board = self._bar = None
        self._redirect = contextlib.ExitStack()
        self._loggers: Sequence[Logger] = ()
        if not main:
            return
        self._loggers = loggers
        output.mkdir(parents=True, exist_ok=True)
        path = output / METRICS
        _end_last_line(path)
        self._file = open(path, "a", encoding="utf-8")
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            folder = output / "tensorboard" if tensorboard is True else Path(tensorboard).expanduser()
            self._board = SummaryWriter(str(folder), purge_step=first_step + 1)
        if progress == "on" or (progress == "auto" and sys.stderr.isatty()):
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            self._redirect.enter_context(logging_redirect_tqdm())  # log lines do not break the bar
            self._bar = tqdm(total=num_steps, initial=first_step, unit="step", dynamic_ncols=True)

    def write(self, event: str, step: int, **values: Any) -> None:
        if self._file is None:
            return
        line = {"event": event, "step": step, "time": round(time.time(), 3), **values}
        if "loss" in values:
            line["loss_hex"] = float(values["loss"]).hex()
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if event not in ("train", "eval"):
            return
        numbers = {f"{event}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        for log in self._loggers:
            log(numbers, step=step)

    def train(self, step: int, **values: Any) -> None:
        """Reports one optimizer step on the bar, or as a log line with the remaining time."""
        now = time.monotonic()
        self._first = self._first or (step, now)
        done, left = step - self._first[0], None
        if done:
            left = (now - self._first[1]) / done * (self._num_steps - step)
        values["seconds_left"] = None if left is None else round(left, 1)
        self.write("train", step, **values)
        if not self.main:
            return
        from tqdm import tqdm

        planned = values.get("planned_bytes")
        shown = {
            "loss": f"{values['loss']:.4f}",
            "lr": f"{values['lr']:.2e}",
            "epoch": f"{values['epochs']:.2f}",
            **({} if self._bar is not None or left is None else {"left": tqdm.format_interval(left)}),
            "tok/s": f"{values['tokens_per_s']:,.{0 if values['tokens_per_s'] >= 10 else 1}f}",
            "grad": f"{values['grad_norm']:.3f}" if values["grad_norm"] is not None else "-",
            "mem": readable(values["used_bytes"])
            + (f" ({readable(planned)} planned + activations)" if planned else ""),
        }
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            logger.info("step %d  %s", step, "  ".join(f"{name} {text}" for name, text in shown.items()))

    def say(self, message: str, *args: Any) -> None:
        """Writes a log line on rank 0."""
        if self.main:
            logger.info(message, *args)

    def draw(self) -> None:
        """Draws the losses of the run's folder on rank 0, if matplotlib is installed and there are enough of them."""
        if self._file is not None:
            try:
                draw_losses(Path(self._file.name).parent)
            except (
                OSError,
                CheckpointError,
                LookupError,
                TypeError,
            ) as error:  # a full disk, or another program's lines
                logger.warning("%s: not drawn: %s", PICTURE, first_line(error))

    def close(self) -> None:
        self._redirect.close()
        if self._bar is not None:
            self._bar.close()
        if self._board is not None:
            self._board.close()
        if self._file is not None:
            self._file.close()
        self._file = self._board = self._bar = None
        self._loggers = ()


def begin_wandb(options: dict[str, Any], config: dict[str, Any]) -> Any:
    """Begins a Weights & Biases run. Raises `ConfigError` if the package is missing."""
    try:
        import wandb
    except ModuleNotFoundError:
        raise ConfigError(
            "logging.wandb: the package wandb is not installed. Run `pip install wandb`, or set it to false."
        ) from None
    return wandb.init(**{"config": config, **options})


def memory_bytes(device: torch.device) -> int:
    """Returns memory in use by this process: the most that was allocated on the GPU, or the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def planned_bytes(model: torch.nn.Module, optimizer: Any, batching: Batching, parallel: ParallelConfig) -> int:
    """Returns this rank's bytes at the peak of a step, without activations, as `fsdp2x plan` counts them."""
    report = memory_report(model, optimizer, micro_batches=batching.accumulation, before_last=parallel.accumulate)
    is_on_device = any(parameter.device.type == "cuda" for parameter in model.parameters())
    return report.device_peak_bytes if is_on_device else report.peak_bytes


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics.jsonl, without a last line that was cut short by a kill."""
    lines = read_text(Path(path)).splitlines(keepends=True)
    numbered = enumerate(lines, 1)
    return [parse_json(line, f"{path}, line {n}") for n, line in numbered if line.endswith("\n") and line.strip()]


def draw_losses(folder: Path) -> None:
    """Draws training and held-out losses of metrics.jsonl, but nothing without matplotlib, or of too few points."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    curves: dict[str, dict[int, float]] = {"train": {}, "eval": {}}
    for line in read_metrics(folder / METRICS):
        if line["event"] in curves and math.isfinite(line["loss"]):
            curves[line["event"]][line["step"]] = line["loss"]  # a resumed run replaces later steps
    if len(curves["train"]) < _FEWEST_POINTS:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for event, label in (("train", "training"), ("eval", "held-out")):
        if curves[event]:
            axes.plot(*zip(*sorted(curves[event].items()), strict=True), label=label)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(folder / PICTURE, dpi=120)
    logger.info("loss curve: %s", folder / PICTURE)


def _end_last_line(path: Path) -> None:
    """Removes a partial last line that a killed run left, so that the next line stays readable."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with open(path, "r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


# ---- observing a run


def shard_report(model: torch.nn.Module) -> str:
    """Returns a table of all parameters: name, placement, global shape, and the shape on each rank. Collective.

    Ranks with the same shape are grouped: `0-2: (3, 8)  3: (1, 8)`.
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
    """Groups consecutive ranks with equal shapes."""
    runs = [[*run] for _, run in itertools.groupby(enumerate(shapes), key=lambda one: one[1])]
    return [(f"{run[0][0]}-{run[-1][0]}" if len(run) > 1 else f"{run[0][0]}", run[0][1]) for run in runs]


class Observer:
    """Hooks of the training loop around each step. Every rank writes its own files in the run's folder.

    profile/steps-A-B/             what `fsdp2x.profile` writes of the steps A to B, or to the last one
    memory/rank-R-step-N.pickle    torch's snapshot of CUDA allocations (for torch's memory viewer), or
    memory/rank-R-step-N.json      on a CPU: bytes in use, and what the plan says of each unit and of the optimizer
    """

    def __init__(self, config: LoggingConfig, output: Path, rank: int, device: torch.device):
        self.output, self.rank, self.device = output, rank, device
        self.first, self.last = config.profile_start, config.profile_end or config.profile_start or 0
        self.snapshot_step = config.memory_snapshot
        self._window = contextlib.ExitStack()
        if self.snapshot_step is not None and device.type == "cuda":
            start_memory_history()

    def before_step(self, step: int) -> None:
        # A run that resumed inside the window records the rest of it.
        if self.first is not None and self.first <= step <= self.last:
            self._window.enter_context(profile(self.output / f"profile/steps-{step}-{self.last}", record_shapes=True))
            self.first = None

    def after_step(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        if step >= self.last:
            self.close()
        if self.snapshot_step == step:
            self._snapshot(step, model, optimizer)

    def _snapshot(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        folder = self.output / "memory"
        folder.mkdir(parents=True, exist_ok=True)
        if self.device.type == "cuda":
            stop_memory_history(str(folder / f"rank-{self.rank}-step-{step}.pickle"))
            return
        found = {
            "step": step,
            "memory_bytes": memory_bytes(self.device),
            "planned": memory_report(model, optimizer).to_dict(),
        }
        (folder / f"rank-{self.rank}-step-{step}.json").write_text(json.dumps(found, indent=1))

    def close(self) -> None:
        """Ends a window whose end the run did not reach."""
        self._window.close()
