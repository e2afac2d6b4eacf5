"""An output folder that appears whole or not at all: written under a temporary name, synced, renamed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fsdp2x.checkpoint.directory import sync_file, sync_folder


def refuse_existing(out: Path, force: bool) -> None:
    """Raises `FileExistsError` when `out` exists and may not be replaced."""
    if out.exists() and not force:
        raise FileExistsError(f"{out}: exists already; choose another folder or replace it with --force (force=True)")


def refuse_inside(out: Path, source: Path) -> None:
    """Raises `FileExistsError` when replacing `out` would delete `source`."""
    if source.resolve().is_relative_to(out.resolve()):
        raise FileExistsError(f"{out}: is or holds {source}, which is read; choose another folder")


def temporary(out: Path, purpose: str) -> Path:
    """The name of a folder beside `out`, the same for every rank."""
    return out.parent / f".tmp-{purpose}-{out.name}"


def make_temporary(out: Path, purpose: str) -> Path:
    """An empty folder of that name; what a killed writer left there goes."""
    folder = temporary(out, purpose)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def publish(out: Path, folder: Path, force: bool) -> None:
    """Makes `folder` durable and gives it the name `out`, in place of what is there when `force`."""
    for path in folder.rglob("*"):
        sync_folder(path) if path.is_dir() else sync_file(path)
    sync_folder(folder)
    if not out.exists():
        os.rename(folder, out)
    else:
        refuse_existing(out, force)
        replaced = temporary(out, "old")
        os.rename(out, replaced)
        os.rename(folder, out)
        shutil.rmtree(replaced) if replaced.is_dir() else replaced.unlink()
    sync_folder(out.parent)
