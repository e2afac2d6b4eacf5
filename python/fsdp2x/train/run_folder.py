"""Locks the folders of a run, so that only one running job writes there, and protects the work of earlier runs.

Rank 0 holds a lock on the file `run.lock`, which the kernel releases when the process ends, however it ends. The file
has the ids of the run's processes on this host.
"""

from __future__ import annotations

import fcntl
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from fsdp2x.api import checkpoint_candidates as candidates
from fsdp2x.base.failures import ConfigError, reworded
from fsdp2x.train.config import TrainConfig
from fsdp2x.train.metrics import METRICS, read_metrics

logger = logging.getLogger(__name__)

LOCK = "run.lock"


class RunFolder:
    """The locked output folder and folder of checkpoints of this run. `release` unlocks them."""

    def __init__(self, output: Path, checkpoints: Path, *, saves: bool) -> None:
        """A run that only evaluates saves nothing."""
        self.output, self.checkpoints, self.saves = output, checkpoints, saves
        self._locks: list[TextIO] = []

    @classmethod
    def of(cls, config: TrainConfig) -> RunFolder:
        output, folder = Path(config.logging.output).expanduser(), config.checkpoint.folder
        checkpoints = Path(folder).expanduser() if folder else output / "checkpoints"
        return cls(output, checkpoints, saves=config.train.mode == "train")

    def claim(self, pids: Sequence[int]) -> None:
        """Locks the folders for this run and makes missing ones. For rank 0.

        Raises:
            ConfigError: a folder cannot be written, or another running job uses it.
        """
        folders = {"logging.output": self.output}
        if self.saves and self.checkpoints.resolve() != self.output.resolve():
            folders["checkpoint.folder"] = self.checkpoints
        for setting, folder in folders.items():
            check_writable(setting, folder)
            file = open(folder / LOCK, "a+")
            self._locks.append(file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ConfigError(
                    f"{setting}: another run uses {folder} and is still running. End its processes (kill "
                    f"{file.read()}), or choose another folder with {setting}=FOLDER."
                ) from None
            except OSError as error:
                logger.warning("%s: it cannot be locked (%s): do not start a second run in it", folder, error.strerror)
            file.truncate(0)
            file.write(" ".join(map(str, pids)))
            file.flush()

    def refuse_former_run(self, resume_from: str | None) -> None:
        """Lets a run that saves begin in empty folders, or continue the run that is there.

        Raises:
            ConfigError: the folders have work of another run, with which this one would mix.
        """
        output, checkpoints = self.output.resolve(), self.checkpoints.resolve()
        own = checkpoints.is_relative_to(output)
        path = None if resume_from is None else Path(resume_from).expanduser().resolve()
        resumes = path is not None and (path.is_relative_to(checkpoints) or own and path == output)
        found = former_work(self.output, self.checkpoints)
        if self.saves and found and not resumes:
            other = "logging.output=FOLDER" + ("" if own else " and checkpoint.folder=FOLDER")
            raise ConfigError(
                f"logging.output: {found} of an earlier run. To continue it set checkpoint.resume_from="
                f"{self.output if own else self.checkpoints} (--resume_from). To keep it choose another folder with "
                f"{other}. Otherwise delete the folder."
            )

    def release(self) -> None:
        for file in self._locks:
            file.close()
        self._locks = []


def check_writable(setting: str, folder: Path) -> None:
    """Makes a folder if it is missing. Raises `ConfigError` if it is not writable."""
    with reworded(ConfigError, f"{setting}: cannot write to {folder}", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def former_work(output: Path, checkpoints: Path) -> str:
    """Returns the work in these folders that another run would mix with, or an empty string."""
    saved = [path.name for path in candidates(checkpoints)]
    parts = [f"{checkpoints} has {saved[0]}"] if saved else []
    path = output / METRICS
    try:
        lines = read_metrics(path) if path.exists() else []
        steps = [line["step"] for line in lines if line["event"] == "train"]
    except (ValueError, KeyError, TypeError):
        return " and ".join([*parts, f"{path} has lines that are not ours"])
    return " and ".join([*parts, *([f"{path} has {max(steps)} steps"] if steps else [])])
