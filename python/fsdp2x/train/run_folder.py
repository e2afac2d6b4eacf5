"""The folders of a run: they belong to one living run at a time, and a new run never goes into those of an old one.

    out/run/run.lock      JSON: token, host, boot, namespace of pids, and [pid, start time] of the run's ranks there

A lock is stale when the processes it names have ended. Those of another host cannot be looked at: their lock is stale
when nobody has touched it for `SILENT_S`. Should the owner be alive all the same, it finds another token in the file
before its next save, and stops. Only rank 0 reads and writes here.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoint import CheckpointError
from ..checkpoint.directory import LATEST, candidates, whole_checkpoints
from ..runtime.processes import own_host, start_time
from .config import ConfigError
from .metrics import METRICS, read_metrics

logger = logging.getLogger(__name__)

LOCK = "run.lock"
SILENT_S = 600.0
_TOUCH_S = 30.0
# What a run writes into its output folder beside its checkpoints.
_WRITTEN = (METRICS, "tensorboard", "profile", "memory", "adapter")


class RunFolder:
    """The locked output folder and folder of checkpoints of this run; `release` unlocks them."""

    def __init__(self, output: Path, checkpoints: Path | None, pids: Sequence[int]) -> None:
        """Locks the folders, which are made where they are missing. `pids`: this run's processes on this host.

        `checkpoints` None: nothing is saved.

        Raises:
            ConfigError: a folder cannot be written, or a living run has it.
        """
        self.output, self.checkpoints = output, checkpoints
        self._token = uuid.uuid4().hex
        self._owner = {"token": self._token, **_place(), "processes": [[pid, start_time(pid)] for pid in pids]}
        self._locks: list[Path] = []
        self._touched = time.monotonic()
        try:
            self._locks.append(self._lock("logging.output", output))
            if checkpoints is not None and checkpoints.resolve() != output.resolve():
                self._locks.append(self._lock("checkpoint.folder", checkpoints))
        except BaseException:
            self.release()
            raise

    def _lock(self, setting: str, folder: Path) -> Path:
        lock = folder / LOCK
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while not self._create(lock):
                try:
                    _refuse_living(setting, lock)
                except FileNotFoundError:
                    continue  # its run has just ended
                logger.warning("%s is left from a run that has ended: taken over", lock)
                made = lock.with_name(f"{LOCK}.{self._token}")
                made.write_text(json.dumps(self._owner), encoding="utf-8")
                os.replace(made, lock)
                break
        except OSError as error:
            raise ConfigError(f"{setting}: cannot write to {folder}: {error.strerror or error}") from None
        return lock

    def _create(self, lock: Path) -> bool:
        """Makes the lock where there is none."""
        try:
            file = open(lock, "x", encoding="utf-8")
        except FileExistsError:
            return False
        try:
            with file:
                file.write(json.dumps(self._owner))
        except OSError:
            lock.unlink(missing_ok=True)
            raise
        return True

    def refuse_former_run(self, resume_from: str | None, overwrite: bool) -> None:
        """A run that saves begins in empty folders, or goes on with the one that is there.

        Raises:
            ConfigError: there is another run's work, and it is neither resumed nor to be overwritten.
        """
        if self.checkpoints is None:
            return
        output, checkpoints = self.output.resolve(), self.checkpoints.resolve()
        own = checkpoints.is_relative_to(output)
        path = None if resume_from is None else Path(resume_from).expanduser().resolve()
        resumes = path is not None and (path.is_relative_to(checkpoints) or own and path == output)
        if overwrite and resumes:
            raise ConfigError(
                f"logging.overwrite: got true with checkpoint.resume_from={resume_from}, which is in the folder that "
                "it would empty; leave one of them out"
            )
        found = former_work(self.output, self.checkpoints)
        if found and not resumes and not overwrite:
            other = "logging.output=FOLDER" + ("" if own else " and checkpoint.folder=FOLDER")
            raise ConfigError(
                f"logging.output: {found} of an earlier run: to go on with it set checkpoint.resume_from="
                f"{self.output if own else self.checkpoints} (--resume_from), to keep it choose another folder with "
                f"{other}, to delete it set logging.overwrite=true"
            )

    def delete_former_run(self) -> None:
        """Deletes what a run writes, and nothing else that may be in the folders."""
        assert self.checkpoints is not None, "a run that saves nothing replaces nothing"
        doomed = [self.output / name for name in _WRITTEN]
        doomed += [self.checkpoints / LATEST, *whole_checkpoints(self.checkpoints)]
        doomed += [path for pattern in (".old-*", ".tmp-*") for path in self.checkpoints.glob(pattern)]
        for path in doomed:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def touch(self) -> None:
        """Shows runs of other hosts that this one lives. Call it at each step: it mostly does nothing."""
        now = time.monotonic()
        if now - self._touched > _TOUCH_S:
            self._touched = now
            for lock in self._locks:
                if lock.exists():
                    os.utime(lock)

    def check(self) -> None:
        """Before anything is written that an earlier run may miss.

        Raises:
            CheckpointError: another run has taken a folder over.
        """
        for lock in self._locks:
            owner = self._owner if self._create(lock) else read_owner(lock)
            if owner.get("token") != self._token:
                raise CheckpointError(
                    f"{lock.parent}: {_who(owner)} has taken this folder over; this one stops without saving, so that "
                    "the two do not mix"
                )

    def release(self) -> None:
        for lock in self._locks:
            if read_owner(lock).get("token") == self._token:
                lock.unlink(missing_ok=True)
        self._locks = []


def check_writable(setting: str, folder: Path) -> None:
    """Makes a folder where it is missing; raises `ConfigError` when nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _now_of(folder)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot write to {folder}: {error.strerror or error}") from None


def former_work(output: Path, checkpoints: Path) -> str:
    """What a run left in these folders that another would mix with or delete; empty when there is nothing."""
    saved = [path.name for path in candidates(checkpoints)]
    parts = [f"{checkpoints} has {saved[0]}"] if saved else []
    path = output / METRICS
    try:
        lines = read_metrics(path) if path.exists() else []
        steps = [line["step"] for line in lines if line["event"] == "train"]
    except (ValueError, KeyError, TypeError):
        return " and ".join([*parts, f"{path} has lines that are not ours"])
    return " and ".join([*parts, *([f"{path} has {max(steps)} steps"] if steps else [])])


def read_owner(lock: Path) -> dict[str, Any]:
    """What a lock says; empty when there is none, or it cannot be read."""
    try:
        owner = json.loads(lock.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _refuse_living(setting: str, lock: Path) -> None:
    owner = read_owner(lock)
    here = all(owner.get(name) == value for name, value in _place().items())
    if here:
        living = [pid for pid, start in owner.get("processes", ()) if start is not None and start_time(pid) == start]
        if living:
            raise ConfigError(
                f"{setting}: {_who(owner)} uses {lock.parent} and is alive: end its processes (kill "
                f"{' '.join(map(str, living))}), or choose another folder with {setting}=FOLDER"
            )
        return
    silent_s = _now_of(lock.parent) - lock.stat().st_mtime
    if silent_s < SILENT_S:
        raise ConfigError(
            f"{setting}: {_who(owner)} uses {lock.parent}; it showed that it lives {max(silent_s, 0):.0f} seconds ago. "
            f"End it; or, if it has ended, delete {lock}; or choose another folder with {setting}=FOLDER"
        )


def _now_of(folder: Path) -> float:
    """The clock of the file system, which may be another host's."""
    probe = folder / f"{LOCK}.{uuid.uuid4().hex}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def _place() -> dict[str, str]:
    """Where pids mean the same processes."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    host, boot = own_host()
    return {"host": host, "boot": boot, "pids_of": namespace}


def _who(owner: dict[str, Any]) -> str:
    pids = [str(pid) for pid, _ in owner.get("processes", ())]
    return f"another run (process {', '.join(pids) or '?'} on {owner.get('host', 'an unknown host')})"
