"""Where rank 0 reports: metrics.jsonl always, TensorBoard and other loggers on request, a progress bar or log lines."""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from fsdp2x.reading.safe_files import parse_json, read_text

from .config import ConfigError

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


class Metrics:
    """Writes one JSON object a line and flushes it, so that a killed run keeps every line it reported.

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
        """`tensorboard`: whether, or the folder of its events. `loggers` are called as `wandb.log` is."""
        self.main = main
        self._file = self._board = self._bar = None
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
        """One optimizer step: shown on the bar, or as a log line."""
        self.write("train", step, **values)
        if not self.main:
            return
        shown = {
            "loss": f"{values['loss']:.4f}",
            "tok/s": f"{values['tokens_per_s']:.0f}",
            "grad": f"{values['grad_norm']:.3f}" if values["grad_norm"] is not None else "-",
            "mem": f"{values['memory_bytes'] / 2**20:.0f} MiB",
        }
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            logger.info("step %d  %s", step, "  ".join(f"{name} {text}" for name, text in shown.items()))

    def say(self, message: str, *args: Any) -> None:
        """A log line of rank 0 that does not tear the bar."""
        if not self.main:
            return
        if self._bar is not None:
            self._bar.write(message % args, file=sys.stderr)
        else:
            logger.info(message, *args)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._board is not None:
            self._board.close()
        if self._file is not None:
            self._file.close()
        for log in self._loggers:
            if hasattr(log, "finish"):
                log.finish()
        self._file = self._board = self._bar = None
        self._loggers = ()


class Logger(Protocol):
    """`wandb.log`'s shape: called on rank 0 with numbers by name (`train/loss`) and the step.

    An object with a method `finish` is told when the run ends.
    """

    def __call__(self, values: dict[str, float], *, step: int) -> Any: ...


class WandbLogger:
    """A Weights & Biases run; raises `ConfigError` when the package is missing."""

    def __init__(self, options: dict[str, Any], config: dict[str, Any]):
        try:
            import wandb
        except ModuleNotFoundError:
            raise ConfigError(
                "logging.wandb: the package wandb is not installed; `pip install wandb`, or set it to false"
            ) from None
        self._run = wandb.init(**{"config": config, **options})

    def __call__(self, values: dict[str, float], *, step: int) -> None:
        self._run.log(values, step=step)

    def finish(self) -> None:
        self._run.finish()


def memory_bytes(device: torch.device) -> int:
    """Memory in use by this process: the most that was allocated on the GPU, or the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line that a kill cut short is left out."""
    lines = read_text(Path(path)).splitlines(keepends=True)
    numbered = enumerate(lines, 1)
    return [parse_json(line, f"{path}, line {n}") for n, line in numbered if line.endswith("\n") and line.strip()]


def _end_last_line(path: Path) -> None:
    """Cuts what a kill left of a line, so that the next line stays readable."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with open(path, "r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
