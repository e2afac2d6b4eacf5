"""Opens checkpoints: ``open_dcp`` directories of torch's distributed checkpoint, ``open_ranks`` one file per rank.

Both give a source for each tensor by its key, made of shards wherever they lie.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from fsdp2x.checkpoint.agree import CheckpointError
from fsdp2x.checkpoint.directory import resolve
from fsdp2x.checkpoint.manifest import read_manifest, verify_files
from fsdp2x.checkpoint.safe_read import read_metadata
from fsdp2x.convert.records import OpenFiles, Shard, read_records
from fsdp2x.convert.tiles import Tile, Tiled, box_of
from fsdp2x.hf.sources import Source

_RANK_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
# Where frameworks put the DCP directory of the model inside a checkpoint.
_BELOW = ("", "model", "dcp", "pytorch_model_fsdp_0")


class DcpTensors(Mapping):
    """Key -> source of every tensor in a DCP directory. Files are opened when a source is asked for."""

    def __init__(self, folder: Path, files: OpenFiles) -> None:
        self.folder, self._files = folder, files
        metadata = read_metadata(folder)
        self._storage = metadata.storage_data
        self._described = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)

    def __getitem__(self, key: str) -> Source:
        entry = self._described[key]
        tiles = []
        for chunk in entry.chunks:
            info = self._storage.get(MetadataIndex(key, chunk.offsets))
            if info is None:
                raise CheckpointError(f"{self.folder / '.metadata'}: damaged, it does not say where {key} is")
            path = self.folder / info.relative_path
            found = read_records(self._files, path, info.offset, info.length)
            if not isinstance(found, Source) or found.shape != tuple(chunk.sizes):
                raise CheckpointError(f"{path}: damaged, it does not hold the shard of {key} that .metadata describes")
            tiles.append(Tile(tuple(chunk.offsets), found))
        return Tiled(f"{self.folder}: {key}", entry.size, entry.properties.dtype, tiles)


def dcp_folder(path: Path) -> Path:
    """The folder with .metadata that ``path`` means: itself, below it, or of the newest checkpoint in it.

    Raises:
        CheckpointError: there is none.
    """
    pointer = path / "latest_checkpointed_iteration.txt"
    roots = [path]
    if pointer.is_file():
        step = pointer.read_text().strip()
        roots += [path / f"iter_{int(step):07d}", path / f"global_step_{step}"] if step.isdecimal() else []
    for root in roots:
        for below in _BELOW:
            if (root / below / ".metadata").is_file():
                return root / below
    try:
        return resolve(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; nor is there a DCP directory (.metadata) in {', '.join(one or '.' for one in _BELOW)}"
        ) from None


def open_dcp(path: Path, files: OpenFiles, *, verify: bool = True) -> tuple[Mapping[str, Source], dict[str, str]]:
    """Tensors by key, and the aliases (name -> the name that is kept) where the checkpoint was written by fsdp2x.

    Args:
        verify: compare the files with the checksums of the manifest, where there is one.
    """
    folder = dcp_folder(path)
    aliases: dict[str, str] = {}
    if (folder / "manifest.json").is_file():
        manifest = read_manifest(folder)
        if verify:
            verify_files(folder, manifest)
        aliases = dict(manifest.get("tied", {}))
    return DcpTensors(folder, files), aliases


def open_ranks(folder: Path, files: OpenFiles) -> dict[str, Source]:
    """Tensors by key from files ``model_world_size_{W}_rank_{r}.pt``, each a state dict of DTensors and tensors.

    Raises:
        CheckpointError: a rank's file is missing, or there are files of several world sizes; ranks hold other names.
    """
    paths = _rank_files(folder)
    states = []
    for path in paths:
        state = read_records(files, path)
        wrong = [key for key, one in state.items() if not isinstance(one, (Source, Shard))] if state else []
        if not isinstance(state, dict) or wrong:
            raise CheckpointError(f"{path}: expected a state dict of tensors, got {wrong[:3] or type(state).__name__}")
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
    if isinstance(ranks[0], Source):
        return ranks[0]
    shards = [one for one in ranks if isinstance(one, Shard)]
    if len(shards) != len(ranks) or len({one.shape for one in shards}) > 1:
        raise CheckpointError(f"{name}: some ranks hold a DTensor of another shape, or none")
    sizes = [max(column) + 1 for column in zip(*(one.coordinate for one in shards), strict=True)]
    tiles = []
    for rank, shard in enumerate(shards):
        start, shape = box_of(shard.shape, sizes, shard.coordinate, shard.placements)
        if shard.local.shape != shape:
            raise CheckpointError(
                f"{name}: rank {rank} holds {list(shard.local.shape)}, but {list(shape)} follows from its placements"
            )
        tiles.append(Tile(start, shard.local))
    return Tiled(name, shards[0].shape, shards[0].dtype, tiles)
