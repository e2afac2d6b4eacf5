"""Writes an output folder that appears complete or not at all: under a temporary name, synced, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from fsdp2x.base.failures import CheckpointError
from fsdp2x.io.checkpoint.directory import remove, sync_file, sync_folder


def refuse_existing(out: Path, force: bool) -> None:
    """Raises `FileExistsError` if `out` exists and may not be replaced."""
    if out.exists() and not force:
        raise FileExistsError(f"{out}: exists already; choose another folder, or replace it with force=True")


def refuse_inside(out: Path, source: Path) -> None:
    """Raises `FileExistsError` if replacing `out` would delete `source`."""
    if source.resolve().is_relative_to(out.resolve()):
        raise FileExistsError(f"{out}: is or contains {source}, which is read. Choose another folder.")


def temporary(out: Path, purpose: str) -> Path:
    """Returns the name of a folder next to `out`, the same for every rank."""
    return out.parent / f".tmp-{purpose}-{out.name}"


def make_temporary(out: Path, purpose: str) -> Path:
    """Makes an empty folder of that name. Removes what a killed writer left there."""
    folder = temporary(out, purpose)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@contextlib.contextmanager
def written(out: Path, purpose: str, force: bool) -> Iterator[Path]:
    """Makes an empty folder that becomes `out` at the end of the block. If the block raises, nothing is left."""
    folder = temporary(out, purpose)
    try:
        yield make_temporary(out, purpose)
        publish(out, folder, force)
    except OSError as error:
        raise CheckpointError(f"{error.filename or out}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(out: Path, folder: Path, force: bool) -> None:
    """Syncs `folder` to disk and renames it to `out`. Replaces an existing `out` if `force`."""
    for path in folder.rglob("*"):
        sync_folder(path) if path.is_dir() else sync_file(path)
    sync_folder(folder)
    replaced = temporary(out, "old")
    if out.exists():
        refuse_existing(out, force)
        remove(replaced)
        os.rename(out, replaced)
    try:
        os.rename(folder, out)
    except OSError:
        if replaced.exists() and not out.exists():
            os.rename(replaced, out)
        raise
    remove(replaced)
    sync_folder(out.parent)
