"""Writes an output folder that appears complete or not at all: under a temporary name, synced, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from fsdp2x.base.failures import CheckpointError


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


def remove(path: Path) -> None:
    """Removes a file, a folder with its contents, or a link (not its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Makes names in a folder durable. Renames and new files are on disk only after this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
