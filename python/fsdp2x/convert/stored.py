"""Opens checkpoints: ``open_dcp`` directories of torch's distributed checkpoint, ``open_ranks`` one file per rank.

Both give a source for each tensor by its key, made of shards wherever they lie.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from fsdp2x.checkpoint.directory import MANIFEST, resolve
from fsdp2x.checkpoint.manifest import check_entries, read_manifest, tied_names, verify_files
from fsdp2x.errors import CheckpointError, CorruptFile
from fsdp2x.reading.dcp import DcpTensors, Ours
from fsdp2x.reading.json_file import read_text
from fsdp2x.reading.records import Placement, Shard, read_records
from fsdp2x.reading.regular import OpenFiles
from fsdp2x.reading.table import METADATA
from fsdp2x.reading.tensors import Source
from fsdp2x.reading.tiles import Tile, box_of, tiled

_RANK_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
# Where frameworks put the DCP directory of the model inside a checkpoint.
_BELOW = ("", "model", "dcp", "pytorch_model_fsdp_0")


def dcp_folder(path: Path) -> Path:
    """The folder with .metadata that ``path`` means: itself, below it, or of the newest checkpoint in it.

    Raises:
        CheckpointError: there is none.
    """
    pointer = path / "latest_checkpointed_iteration.txt"
    roots = [path]
    if pointer.is_file():
        step = read_text(pointer, 100).strip()
        roots += [path / f"iter_{int(step):07d}", path / f"global_step_{step}"] if step.isdecimal() else []
    for root in roots:
        for below in _BELOW:
            if (root / below / METADATA).is_file():
                return root / below
    try:
        return resolve(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; nor is there a DCP directory ({METADATA}) in {', '.join(one or '.' for one in _BELOW)}"
        ) from None


def open_dcp(path: Path, files: OpenFiles, *, verify: bool = True) -> tuple[Mapping[str, Source], dict[str, str]]:
    """Tensors by key, and the aliases (name -> the name that is kept) where the checkpoint was written by fsdp2x.

    Args:
        verify: compare the files with the checksums of the manifest, where there is one.
    """
    folder = dcp_folder(path)
    if not (folder / MANIFEST).is_file():
        return DcpTensors(folder, files), {}
    manifest = read_manifest(folder)
    if manifest["form"] != "sharded":
        raise CheckpointError(
            f"{folder}: a checkpoint of form {manifest['form']}; load it into the model and save it with "
            "form='sharded', or with fsdp2x.save_hf"
        )
    if verify:
        verify_files(folder, manifest)
    tensors = DcpTensors(folder, files, Ours(manifest["step"], tied_names(manifest)))
    check_entries(folder, manifest, tensors.table.entries)
    return tensors, dict(manifest["tied"])


def open_ranks(folder: Path, files: OpenFiles) -> dict[str, Source]:
    """Tensors by key from files ``model_world_size_{W}_rank_{r}.pt``, each a state dict of DTensors and tensors.

    Raises:
        CheckpointError: a rank's file is missing, or there are files of several world sizes; ranks hold other names.
    """
    paths = _rank_files(folder)
    states: list[dict[str, Source | Shard]] = []
    for path in paths:
        state = read_records(files, path)
        wrong = [state]
        if isinstance(state, dict):
            plain = {key: one.local if isinstance(one, Shard) else one for key, one in state.items()}
            wrong = [key for key, one in plain.items() if not (isinstance(key, str) and isinstance(one, Source))]
        if wrong:
            raise CheckpointError(f"{path}: expected a state dict of tensors, got {str(wrong[:3])[:200]}")
        if states and state.keys() != states[0].keys():
            other = sorted(state.keys() ^ states[0].keys())
            raise CheckpointError(f"{path}: holds other tensors than the file of rank 0: {', '.join(other[:5])}")
        states.append(state)
    return {key: _joined(f"{folder}: {key}", [state[key] for state in states]) for key in states[0]}


def _rank_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    found = {path: match for path in folder.iterdir() if (match := _RANK_FILE.fullmatch(path.name))}
    worlds = sorted({int(match[1]) for match in found.values()})
    if len(worlds) != 1:
        several = f"files of world sizes {worlds}" if worlds else "no file model_world_size_W_rank_R.pt"
        raise CheckpointError(f"{folder}: holds {several}; one checkpoint is needed")
    by_rank = {int(match[2]): path for path, match in found.items()}
    missing = sorted(set(range(worlds[0])) - set(by_rank))
    if missing:
        raise CheckpointError(f"{folder}: the files of ranks {missing} of {worlds[0]} are missing")
    return [by_rank[rank] for rank in range(worlds[0])]


def _joined(name: str, ranks: list[Source | Shard]) -> Source:
    kinds = {(type(one) is Shard, one.shape, one.dtype) for one in ranks}
    if len(kinds) > 1:
        raise CorruptFile(f"{name}: some ranks hold another tensor than others: {sorted(map(str, kinds))}")
    if isinstance(ranks[0], Source):
        return ranks[0]
    _check_shards(name, ranks)
    sizes = [max(column) + 1 for column in zip(*(one.coordinate for one in ranks), strict=True)]
    tiles = []
    for rank, shard in enumerate(ranks):
        start, shape = box_of(shard.shape, sizes, shard.coordinate, shard.placements)
        if shard.local.shape != shape:
            raise CorruptFile(
                f"{name}: rank {rank} holds {list(shard.local.shape)}, but {list(shape)} follows from its placements"
            )
        tiles.append(Tile(start, shard.local))
    return tiled(name, ranks[0].shape, ranks[0].dtype, tiles)


def _check_shards(name: str, shards: list[Shard]) -> None:
    """Raises `CorruptFile` for what no DTensor can be."""
    placements = [(one.kind, one.dim) for one in shards[0].placements]
    for rank, shard in enumerate(shards):
        fits = all(type(size) is int and size >= 0 for size in shard.shape)
        fits = fits and [(one.kind, one.dim) for one in shard.placements] == placements
        fits = fits and len(shard.coordinate) == len(placements)
        fits = fits and all(type(place) is int and 0 <= place < len(shards) for place in shard.coordinate)
        if not fits or not all(_is_placement(one, len(shard.shape)) for one in shard.placements):
            raise CorruptFile(f"{name}: rank {rank} holds a DTensor that contradicts itself or those of the others")


def _is_placement(one: Placement, num_dims: int) -> bool:
    return one.kind not in ("Shard", "_StridedShard") or type(one.dim) is int and 0 <= one.dim < num_dims
