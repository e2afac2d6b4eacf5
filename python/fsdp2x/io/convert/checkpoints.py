"""Rewrites a checkpoint of fsdp2x in another form, offline, in one process with one tensor in memory at a time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import torch

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import CheckpointError
from fsdp2x.io.checkpoint.directory import ASSETS_FOLDER, MANIFEST, resolve
from fsdp2x.io.checkpoint.disk import bytes_of
from fsdp2x.io.checkpoint.manifest import FormName, make_manifest, read_manifest
from fsdp2x.io.checkpoint.plan import Plan, plan_alone
from fsdp2x.io.checkpoint.sinks import SINKS, Contents, finish, write_chunks
from fsdp2x.io.checkpoint.sources import Opened, open_checkpoint, verify_folder
from fsdp2x.io.formats.safe_files import OpenFiles
from fsdp2x.io.hf.folder import refuse_existing, refuse_inside, written


def copy_tensors(source: Opened, folder: Path, form: FormName, dtype: torch.dtype | None = None) -> tuple[Plan, list]:
    """Writes all tensors of a checkpoint into a folder, one after another. `finish` needs what it returns."""
    wanted = {
        name: one.dtype if dtype is None or not one.dtype.is_floating_point else dtype
        for name, one in source.tensors.items()
    }
    empty = {name: torch.empty(one.shape, dtype=wanted[name], device="meta") for name, one in source.tensors.items()}
    plan = plan_alone({**empty, **source.values}, source.paths)
    layout = SINKS[form].lay_out(folder, plan)
    data = (bytes_of(source.tensors[chunk.name].whole(chunk.dtype)) for chunk in plan.mine)
    return plan, [write_chunks(SINKS[form], folder, 0, layout, plan.mine, data)]


@checked
def convert_checkpoint(
    input_dir: str | Path, output_dir: str | Path, *, form: Literal["sharded", "full"], force: bool = False
) -> Path:
    """Rewrites a checkpoint of fsdp2x in another form, with everything that a resumed run needs.

    Use it to load a ``per_rank`` checkpoint on another number of ranks. It needs no process group and holds one tensor
    in memory at a time.

    Args:
        input_dir: a checkpoint of any form, or a folder of them, whose latest is used.
        output_dir: a new folder, which appears when it is complete.
        form: the new form. See ``fsdp2x.checkpoint.save``.
        force: whether to replace ``output_dir``.

    Returns:
        The path of the new folder.

    Raises:
        FileExistsError: ``output_dir`` exists and ``force`` is False.
        CheckpointError: the checkpoint is missing, damaged, or was not saved by fsdp2x.
    """
    out = Path(output_dir).expanduser()
    refuse_existing(out, force)
    source = resolve(input_dir)
    refuse_inside(out, source)
    if not (source / MANIFEST).is_file():
        raise CheckpointError(f"{source}: fsdp2x did not save this checkpoint, {MANIFEST} is missing")
    with OpenFiles() as files, written(out, "convert", force) as folder:
        opened, manifest = open_verified(source, files)
        described = make_manifest(
            step=manifest["step"],
            world_size=manifest["world_size"],
            aliases=manifest["tied"],
            form=form,
            layouts=manifest["layouts"],
        )
        parts = {name: part for name, part in opened.parts.items() if name != "manifest"}
        if (source / ASSETS_FOLDER).is_dir():
            shutil.copytree(source / ASSETS_FOLDER, folder / ASSETS_FOLDER)
        plan, done = copy_tensors(opened, folder, form)
        finish(folder, form, plan, Contents(described, opened.values, parts), done)
    return out


def open_verified(folder: Path, files: OpenFiles) -> tuple[Opened, dict]:
    """Opens a checkpoint of fsdp2x of any form after it was compared with its checksums. Also returns its manifest.

    Tied weights are there once.

    Raises:
        CheckpointError: a file is missing or damaged, or the files contradict each other.
    """
    manifest = read_manifest(folder)
    verify_folder(folder, files, manifest)
    opened = open_checkpoint(folder, files, manifest)
    aliases = {f"model.{alias}" for alias in manifest["tied"]}
    tensors = {name: opened.tensors[name] for name in opened.tensors if name not in aliases}
    return Opened(tensors, opened.values, opened.paths, opened.parts), manifest
