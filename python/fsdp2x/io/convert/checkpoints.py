"""Rewrites a checkpoint of fsdp2x in another form, offline, in one process with one tensor in memory at a time."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import CheckpointError
from fsdp2x.io.checkpoint.directory import ASSETS_FOLDER, FULL_FILE, MANIFEST, PARTS_FILE, resolve, write_bytes
from fsdp2x.io.checkpoint.disk import bytes_of
from fsdp2x.io.checkpoint.forms import FORM_CLASSES, Contents
from fsdp2x.io.checkpoint.manifest import (
    check_entries,
    describe_files,
    file_names,
    read_manifest,
    verify_files,
    write_manifest,
)
from fsdp2x.io.checkpoint.plan import plan_alone
from fsdp2x.io.checkpoint.rng import read_rng, save_rng
from fsdp2x.io.checkpoint.sources import FullSource, Leaf, PerRankSource, ShardedSource
from fsdp2x.io.checkpoint.trees import flatten, to_bytes
from fsdp2x.io.formats.safe_files import OpenFiles
from fsdp2x.io.formats.tensors import Source, Tile, tiled
from fsdp2x.io.hf.folder import refuse_existing, refuse_inside, written


@dataclass
class Whole:
    """A checkpoint of any form as full tensors and other values by name. Tied weights occur once."""

    tensors: dict[str, Source]
    objects: dict[str, Any]
    paths: dict[str, tuple]
    parts: dict[str, Any]


def open_whole(folder: Path, files: OpenFiles, manifest: Mapping[str, Any]) -> Whole:
    """Opens a checkpoint of any form, whatever the number of ranks that saved it.

    Raises:
        CheckpointError: a file is missing or damaged, or the files contradict each other.
    """
    if manifest["form"] == "per_rank":
        ranks = range(manifest["world_size"])
        parts = [PerRankSource(folder, files, False, manifest, rank) for rank in ranks]
        for rank, part in enumerate(parts):
            check_entries(folder, manifest, part.entries, rank)
    else:
        full = manifest["form"] == "full"
        parts = [
            FullSource(folder / FULL_FILE, files, False) if full else ShardedSource(folder, files, False, manifest)
        ]
        check_entries(folder, manifest, parts[0].entries)
    aliases = {f"model.{alias}" for alias in manifest["tied"]}
    whole = Whole({}, {}, {}, parts[0].parts())
    tiles: dict[str, list[Tile]] = {}
    leaves: dict[str, Leaf] = {}
    for part in parts:
        flat, paths = flatten(part.tree)
        for name, value in flat.items():
            if name in aliases:
                continue
            whole.paths.setdefault(name, paths[name])
            if isinstance(value, Leaf):
                leaves.setdefault(name, value)
                tiles.setdefault(name, []).append(part.tile(name))
            else:
                whole.objects.setdefault(name, value)
    for name, leaf in leaves.items():
        whole.tensors[name] = tiled(f"{folder}: {name}", leaf.shape, leaf.dtype, tiles[name])
    return whole


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
    manifest = read_manifest(source)
    verify_files(source, manifest)
    step, ranks = manifest["step"], range(manifest["world_size"])
    with OpenFiles() as files, written(out, "convert", force) as folder:
        whole = open_whole(source, files, manifest)
        own = ("rng", "step", "manifest", "chunks", "owner")
        small = {name: part for name, part in whole.parts.items() if name not in own}
        has_files = manifest["form"] != "full"
        rngs = [read_rng(source, rank, step) for rank in ranks] if has_files else whole.parts["rng"]
        described = {**manifest, "form": form}
        described.pop("files")
        contents = Contents(whole.objects, whole.paths, dict(manifest["tied"]), described, small=small, rngs=rngs)
        empty = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in whole.tensors.items()}
        saved = FORM_CLASSES[form](plan_alone({**empty, **whole.objects}, whole.paths), 0, contents)
        saved.place_alone(folder)
        data = (bytes_of(whole.tensors[chunk.name].whole()) for chunk in saved.chunks)
        _, details = saved.write(folder, data)
        saved.finish(folder, [details])
        if not saved.holds_parts:
            write_bytes(folder / PARTS_FILE, to_bytes({**small, "step": step}))
            for rank, state in enumerate(rngs):
                save_rng(folder, rank, step, state)
        if (source / ASSETS_FOLDER).is_dir():
            shutil.copytree(source / ASSETS_FOLDER, folder / ASSETS_FOLDER)
        write_manifest(folder, described, describe_files(folder, file_names(folder)))
    return out
