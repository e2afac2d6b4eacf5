"""Manages the folder of checkpoints: names, atomic rename, the `latest` pointer, retention, and repair after a kill.

    checkpoints/
      latest                 text: name of the newest complete checkpoint; replaced by rename
      step-000010/           complete: it got this name after everything in it was on disk
      .tmp-step-000020/      being written, or left by a killed job; removed by the next save
      .old-step-000010/      the former step-000010 while a new one takes its place; restored if the job was killed
      step-000005/marked     an empty file: this checkpoint is never deleted

Only rank 0 of a training run writes here. Readers never change anything.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import CheckpointError
from fsdp2x.io.formats.dcp import METADATA
from fsdp2x.io.formats.safe_files import how_to_download
from fsdp2x.io.hf.folder import remove, sync_folder

logger = logging.getLogger(__name__)

LATEST = "latest"
MARKED = "marked"
MANIFEST = "manifest.json"
ASSETS_FOLDER = "hf"
FULL_FILE = "checkpoint.safetensors"
OLD_FULL_FILE = "checkpoint.pt"  # of format 3
PARTS_FILE = "trainer.pt"
_STEP = re.compile(r"step-([0-9]{1,18})")


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def temporary_path(root: Path, step: int) -> Path:
    return root / f".tmp-{step_name(step)}"


def whole_checkpoints(root: Path) -> list[Path]:
    """Returns folders with a final name, oldest step first."""
    steps = (
        [(step, path) for path in root.iterdir() if (step := step_of(path.name)) is not None] if root.is_dir() else []
    )
    return [path for _, path in sorted(steps)]


@checked
def resolve(path: str | Path) -> Path:
    """Returns the checkpoint at `path`, or the latest one in a folder of them. Raises `CheckpointError`."""
    path = Path(path).expanduser()
    if not path.exists():
        replaced = path.parent / f".old-{path.name}"
        if replaced.is_dir():
            return replaced
        raise CheckpointError(
            f"{path}: no such checkpoint. Pass a checkpoint folder or its parent.{how_to_download(path)}"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path}: expected the folder of a checkpoint, got a file.")
    if (path / MANIFEST).is_file():
        return path
    pointer = path / LATEST
    if not pointer.is_file():
        nested = path / "checkpoints"
        if (nested / LATEST).is_file():
            return resolve(nested)
        raise CheckpointError(
            f"{path} is not an fsdp2x checkpoint: manifest.json is missing, and so is the file '{LATEST}' of a folder "
            "of checkpoints. Pass a checkpoint folder or its parent."
        )
    name = _pointed(pointer)
    if step_of(name) is None:
        raise CheckpointError(
            f"{pointer}: expected the name of a checkpoint such as {step_name(10)}, got {name[:80]!r}. Write the name "
            "of a checkpoint in this folder into the file."
        )
    return resolve(path / name)


def _pointed(pointer: Path) -> str:
    """Returns the text of `latest`, which may be anything."""
    with open(pointer, "rb") as file:
        return file.read(200).decode("utf-8", errors="replace").strip()


def find(path: str | Path) -> list[Path]:
    """Returns the checkpoints of any form that a load of `path` tries, in order. Raises `CheckpointError` if none."""
    path = Path(path).expanduser()
    if path.is_file() or (path / METADATA).is_file():
        return [path]
    root = path if is_root(path) else path / "checkpoints"
    return [resolve(path)] if (path / MANIFEST).is_file() or not is_root(root) else candidates(root)


def candidates(root: Path) -> list[Path]:
    """Returns complete checkpoints in the order in which a resuming run tries them: `latest`, then newest first."""
    checkpoints = whole_checkpoints(root)[::-1]
    checkpoints += [path for path in sorted(root.glob(".old-step-*"))[::-1] if root / path.name[5:] not in checkpoints]
    pointer = root / LATEST
    name = _pointed(pointer) if pointer.is_file() else ""
    newest = [path for path in checkpoints if path.name.removeprefix(".old-") == name]
    if not newest:
        return checkpoints
    # A run that resumed from an older step leaves higher steps of the former run. They come last.
    current = step_of(name) or 0
    older = [path for path in checkpoints if (step_of(path.name.removeprefix(".old-")) or 0) < current]
    return [*newest, *older, *(path for path in checkpoints if path not in newest and path not in older)]


def is_root(path: Path) -> bool:
    """Returns whether `path` is a folder of checkpoints rather than one checkpoint."""
    return path.is_dir() and ((path / LATEST).is_file() or bool(candidates(path)))


@checked
def mark(checkpoint: str | Path, marked: bool = True) -> None:
    """Protects a checkpoint from deletion by later saves, or ends the protection. Call it in one process.

    Args:
        checkpoint: the folder of a checkpoint.
        marked: whether to protect it.

    Raises:
        CheckpointError: the folder is not a checkpoint.
    """
    file = Path(checkpoint) / MARKED
    if not (Path(checkpoint) / MANIFEST).is_file():
        raise CheckpointError(f"{checkpoint}: not a checkpoint, {MANIFEST} is missing. Pass a checkpoint folder.")
    if marked:
        write_file(file, "")
    else:
        file.unlink(missing_ok=True)
    sync_folder(file.parent)


def prepare(root: Path, step: int) -> Path:
    """Removes leftovers and makes an empty temporary folder for `step`."""
    root.mkdir(parents=True, exist_ok=True)
    repair(root)
    temporary = temporary_path(root, step)
    temporary.mkdir()
    return temporary


def discard(root: Path, step: int) -> None:
    """Undoes a failed save of `step`: removes its temporary folder and restores the former checkpoint.

    If the disk allows no removal, the next save tries again.
    """
    final, replaced = root / step_name(step), root / f".old-{step_name(step)}"
    try:
        remove(temporary_path(root, step))
        remove(root / f".tmp-{LATEST}")
        if replaced.exists() and not final.exists():
            os.rename(replaced, final)
    except OSError as error:
        logger.warning("%s: cannot remove what the failed save left: %s", temporary_path(root, step), error)


def publish(root: Path, step: int) -> Path:
    """Gives the temporary folder its final name and points `latest` to it. Its files must already be on disk."""
    temporary, final = temporary_path(root, step), root / step_name(step)
    replaced = root / f".old-{final.name}"
    sync_folder(temporary)
    if final.exists():
        os.rename(final, replaced)
    os.rename(temporary, final)
    sync_folder(root)
    write_file(root / f".tmp-{LATEST}", final.name + "\n")
    os.replace(root / f".tmp-{LATEST}", root / LATEST)
    sync_folder(root)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def retain(root: Path, keep: int) -> list[Path]:
    """Deletes all but the newest `keep` checkpoints and the marked ones. Never deletes the one that `latest` names."""
    pointer = root / LATEST
    newest = _pointed(pointer) if pointer.is_file() else ""
    checkpoints = [path for path in whole_checkpoints(root) if not (path / MARKED).exists()]
    # A run that resumed from an older step leaves higher steps of the former run, which count as older.
    current = step_of(newest)
    former = [path for path in checkpoints if current is not None and (step_of(path.name) or 0) > current]
    ours = [path for path in checkpoints if path not in former]
    kept = {*ours[-keep:], *former[: max(keep - len(ours), 0)]}
    deleted = []
    for path in checkpoints:
        if path not in kept and path.name != newest:
            # Rename first, so that a kill during deletion leaves no partial checkpoint under a final name.
            doomed = root / f".tmp-delete-{path.name}"
            os.rename(path, doomed)
            remove(doomed)
            deleted.append(path)
    return deleted


def repair(root: Path) -> None:
    """Removes partial folders that a killed job left, restores a checkpoint that was being replaced, and logs it."""
    if not root.is_dir():
        return
    for path in list(root.iterdir()):
        if path.name.startswith(".old-step-"):
            final = root / path.name.removeprefix(".old-")
            if final.exists():
                remove(path)
            else:
                os.rename(path, final)
                logger.warning("%s: restored, because the save that was to replace it was interrupted", final)
        elif path.name.startswith(".tmp-"):
            remove(path)
            if path.name.startswith(".tmp-step-"):
                logger.warning("%s: removed, because the save that wrote it was interrupted", path)


def write_file(path: Path, text: str) -> None:
    """Writes text and waits until it is on disk."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes bytes and waits until they are on disk."""
    try:
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)
        raise
