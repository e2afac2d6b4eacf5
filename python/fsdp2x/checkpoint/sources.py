"""Reading the three forms: what a checkpoint holds as one tree, and its tensors into memory that is there.

Every rank reads for itself, only what it needs; nothing here is a collective. A leaf of the tree is a `Leaf` where a
tensor is stored, else the value itself.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from .agree import CheckpointError
from .forms import rank_file
from .full import FULL_FILE
from .plan import chunks_of
from .safe_read import SafePlanner, SafeReader, read_metadata
from .state import PARTS_FILE, flatten, nest
from .values import first_line, why_refused

_BLOCK_BYTES = 8 << 20


class Damaged(CheckpointError):
    """A checkpoint that is not whole: an older one may be."""


@dataclass(frozen=True)
class Leaf:
    """A stored tensor; `name` is its dotted name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class ShardedSource:
    """A directory of torch DCP, written by us or by anybody."""

    def __init__(self, folder: Path, trusted: bool):
        self.folder, self.trusted = folder, trusted
        self._metadata: Metadata = read_metadata(folder)
        stored = self._metadata.state_dict_metadata
        paths = self._metadata.planner_data or {name: (name,) for name in stored}
        objects = {name: None for name, entry in stored.items() if isinstance(entry, BytesStorageMetadata)}
        self._read(objects)
        leaves = {
            name: Leaf(name, tuple(entry.size), entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else objects[name]
            for name, entry in stored.items()
        }
        self.tree = nest({name: paths.get(name, (name,)) for name in leaves}, leaves)

    def read(self, targets: Mapping[Leaf, torch.Tensor]) -> None:
        self._read({leaf.name: target for leaf, target in targets.items()})

    def _read(self, flat: dict[str, Any]) -> None:
        planner = SafePlanner(flatten_state_dict=False, trusted=self.trusted)
        planner.set_up_planner(flat, self._metadata, is_coordinator=True)
        reader = SafeReader(self.folder)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner).wait()
        # The planner fills the tensors in place, but a mapping of its own.
        flat.update(planner.state_dict)

    def parts(self) -> dict[str, Any]:
        return read_parts(self.folder, self.trusted)


class FullSource:
    """One file with everything, whole."""

    def __init__(self, path: Path, trusted: bool):
        self._path = path
        self._file = _torch_file(path, trusted)
        nested = {name: value for name, value in self._file.items() if name in ("model", "optimizer")}
        self._flat, paths = flatten(nested)
        self.tree = nest(paths, {name: _leaf(name, value) for name, value in self._flat.items()})

    def read(self, targets: Mapping[Leaf, torch.Tensor]) -> None:
        by_name = {leaf.name: target for leaf, target in targets.items()}
        for chunk in chunks_of(by_name):
            whole = self._flat[chunk.name]
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
            _local(by_name[chunk.name]).copy_(whole)

    def parts(self) -> dict[str, Any]:
        return {name: value for name, value in self._file.items() if name not in ("model", "optimizer")}


class PerRankSource:
    """The file of this rank."""

    def __init__(self, folder: Path, rank: int, trusted: bool):
        self.folder, self.trusted = folder, trusted
        self._path = folder / rank_file(rank)
        file = _torch_file(self._path, trusted)
        paths = {name: tuple(path) for name, path in file["paths"].items()}
        self._chunks = file["chunks"]
        leaves: dict[str, Any] = {}
        self._flat: dict[str, torch.Tensor] = {}
        for name, path in paths.items():
            value: Any = file
            for key in path:
                value = value[key]
            if name in self._chunks:
                self._flat[name] = value
                value = Leaf(name, tuple(self._chunks[name]["shape"]), value.dtype)
            leaves[name] = value
        self.tree = nest(paths, leaves)

    def read(self, targets: Mapping[Leaf, torch.Tensor]) -> None:
        by_name = {leaf.name: target for leaf, target in targets.items()}
        for chunk in chunks_of(by_name):
            saved = self._chunks[chunk.name]
            if (saved["offsets"], saved["sizes"]) != (list(chunk.offsets), list(chunk.sizes)):
                raise CheckpointError(
                    f"{self._path}: {chunk.name} was cut otherwise: this rank had {saved['sizes']} at "
                    f"{saved['offsets']}, it has {list(chunk.sizes)} at {list(chunk.offsets)}; per-rank files load "
                    "into the same sharding only"
                )
            _local(by_name[chunk.name]).copy_(self._flat[chunk.name])

    def parts(self) -> dict[str, Any]:
        return read_parts(self.folder, self.trusted)


Source = ShardedSource | FullSource | PerRankSource


def open_source(path: Path, form: str, rank: int, trusted: bool) -> Source:
    """The reader for a checkpoint of that form; `path` may be the one file of a full one."""
    if form == "full":
        return FullSource(path if path.is_file() else path / FULL_FILE, trusted)
    if form == "per_rank":
        return PerRankSource(path, rank, trusted)
    return ShardedSource(path, trusted)


def read_parts(folder: Path, trusted: bool = False) -> dict[str, Any]:
    """The small parts beside the tensors: step, scheduler, scaler, data, extra; empty where a checkpoint has none."""
    path = folder / PARTS_FILE
    return _torch_file(path, trusted) if path.is_file() else {}


def verify_archive(path: Path, rank: int, world_size: int) -> None:
    """Compares this rank's part of a file of `torch.save` with the checksums in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist()[rank::world_size]:
                with archive.open(record) as file:
                    while file.read(_BLOCK_BYTES):
                        pass
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except zipfile.BadZipFile as error:
        raise Damaged(f"{path}: damaged, {error}") from None


def _torch_file(path: Path, trusted: bool) -> dict[str, Any]:
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=not trusted)
    except FileNotFoundError:
        raise Damaged(f"{path}: missing") from None
    except Exception as error:
        if (call := why_refused(error)) is not None:
            raise CheckpointError(
                f"{path}: reading it would execute {call}; pass trusted=True if you know who wrote it"
            ) from None
        raise Damaged(f"{path}: damaged, its contents cannot be read: {first_line(error)}") from None
    if not isinstance(loaded, dict):
        raise Damaged(f"{path}: got {type(loaded).__name__}, expected a mapping of parts")
    return loaded


def _leaf(name: str, value: Any) -> Any:
    return Leaf(name, tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
