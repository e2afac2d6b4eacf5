"""Reads the three forms: the contents of a checkpoint as one tree, and its tensors into existing memory.

Every rank reads only what it needs. Nothing here is collective. A leaf of the tree is a `Leaf` for a stored tensor,
else the value itself. `prepare` checks everything that will be read and changes nothing.
"""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import torch
from torch.distributed.tensor import DTensor

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import CheckpointError, CorruptFile
from fsdp2x.io.checkpoint.directory import FULL_FILE, PARTS_FILE, rank_file
from fsdp2x.io.checkpoint.manifest import Entries, FormName, check_manifest, manifest_in, tied_names
from fsdp2x.io.checkpoint.plan import Chunk, chunks_of
from fsdp2x.io.checkpoint.trees import flatten, nest
from fsdp2x.io.formats import tensors
from fsdp2x.io.formats.dcp import DcpTensors, Ours
from fsdp2x.io.formats.records import Shard, detached, open_archive
from fsdp2x.io.formats.safe_files import OpenFiles, open_regular

_BLOCK_BYTES = 8 << 20
_TOPS = ("model", "optimizer")


@dataclass(frozen=True)
class Leaf:
    """A stored tensor. `name` is its dotted name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class CheckpointSource:
    """A checkpoint of one form: its `tree`, and the `entries` that its manifest should list."""

    entries: Entries
    tree: dict[str, Any]
    _folder: Path
    _trusted: bool

    def prepare(self, targets: Mapping[Leaf, torch.Tensor]) -> list[Callable[[], None]]:
        """Returns calls that each read the bytes of one of this rank's chunks into ``targets``."""
        by_name = {leaf.name: target for leaf, target in targets.items()}
        reads = []
        for chunk in chunks_of(by_name):
            source, start = self._place(chunk)
            target = by_name[chunk.name]
            local = target.to_local() if isinstance(target, DTensor) else target
            reads.append(functools.partial(source.read, start, local.detach()))
        return reads

    def _place(self, chunk: Chunk) -> tuple[tensors.Source, tuple[int, ...]]:
        """Returns what holds a chunk of this rank, and where in it the chunk begins."""
        raise NotImplementedError

    def parts(self) -> dict[str, Any]:
        return read_parts(self._folder, self._trusted)

    def tile(self, name: str) -> tensors.Tile:
        """Returns everything that it holds of a tensor, and its position in the tensor."""
        raise NotImplementedError


class ShardedSource(CheckpointSource):
    """A directory of torch DCP that fsdp2x wrote, or without a manifest, any program."""

    def __init__(self, folder: Path, files: OpenFiles, trusted: bool, manifest: Mapping[str, Any] | None):
        self._folder, self._files, self._trusted = folder, files, trusted
        self._tensors = DcpTensors(folder, files, Ours(manifest["step"], tied_names(manifest)) if manifest else None)
        table = self._tensors.table
        self.entries = table.entries
        leaves: dict[str, Any] = {name: Leaf(name, one.shape, one.dtype) for name, one in table.tensors.items()}
        leaves |= {name: self._tensors.value(name, trusted) for name in table.objects}
        self.tree = nest(table.paths, leaves)

    def _place(self, chunk: Chunk) -> tuple[tensors.Source, tuple[int, ...]]:
        return self._tensors.part(chunk.name, (chunk.offsets, chunk.sizes)), chunk.offsets

    def tile(self, name: str) -> tensors.Tile:
        source = self._tensors[name]
        return tensors.Tile((0,) * len(source.shape), source)


class FullSource(CheckpointSource):
    """One file with full tensors."""

    def __init__(self, path: Path, files: OpenFiles, trusted: bool):
        values, records = open_archive(files, path, trusted)
        self._file = values
        self.tree, self.entries, self._sources = _matched(path, values, records)
        if (manifest := manifest_in(self._file)) is not None:
            check_manifest(manifest, f"{path}: manifest")
            _check_records(path, self._sources, tied_names(manifest))

    def _place(self, chunk: Chunk) -> tuple[tensors.Source, tuple[int, ...]]:
        return self._sources[chunk.name], chunk.offsets

    def tile(self, name: str) -> tensors.Tile:
        source = self._sources[name]
        return tensors.Tile((0,) * len(source.shape), source)

    def parts(self) -> dict[str, Any]:
        return detached({name: value for name, value in self._file.items() if name not in _TOPS})


class PerRankSource(CheckpointSource):
    """The file of this rank."""

    def __init__(self, folder: Path, files: OpenFiles, trusted: bool, manifest: Mapping[str, Any], rank: int):
        self._folder, self._trusted = folder, trusted
        self._path = path = folder / rank_file(rank)
        values, records = open_archive(files, path, trusted)
        world_size, step = manifest["world_size"], manifest["step"]
        if values.get("owner") != {"rank": rank, "world_size": world_size, "step": step}:
            raise CorruptFile(f"{path}: damaged, not the file of rank {rank} of {world_size} at step {step}")
        tree, held, self._sources = _matched(path, values, records)
        _check_records(path, self._sources, [])
        self._chunks: Any = values.get("chunks")
        stored = {name: entry for name, entry in held.items() if entry is not None}
        if not isinstance(self._chunks, dict) or self._chunks.keys() != stored.keys():
            raise CorruptFile(f"{path}: damaged, its chunks are not those of its tensors")
        leaves, paths = flatten(tree)
        for name, (shape, dtype) in stored.items():
            leaves[name] = Leaf(name, _whole_shape(f"{path}: damaged, {name}", self._chunks[name], shape), dtype)
        self.entries = {name: held[name] and (leaves[name].shape, leaves[name].dtype) for name in held}
        self.tree = nest(paths, leaves)

    def _place(self, chunk: Chunk) -> tuple[tensors.Source, tuple[int, ...]]:
        saved = self._chunks[chunk.name]
        if (saved["offsets"], saved["sizes"]) != (list(chunk.offsets), list(chunk.sizes)):
            raise CheckpointError(
                f"{self._path}: {chunk.name} was cut differently: this rank had {saved['sizes']} at "
                f"{saved['offsets']}, it now has {list(chunk.sizes)} at {list(chunk.offsets)}. Per-rank files load "
                "into the same sharding only."
            )
        return self._sources[chunk.name], (0,) * len(chunk.sizes)

    def tile(self, name: str) -> tensors.Tile:
        return tensors.Tile(tuple(self._chunks[name]["offsets"]), self._sources[name])


def open_source(
    path: Path, form: FormName, files: OpenFiles, rank: int, trusted: bool, manifest: Mapping[str, Any] | None
) -> CheckpointSource:
    """Returns the reader for a checkpoint of that form. `path` may be the single file of a full one."""
    match form:
        case "full":
            return FullSource(path if path.is_file() else path / FULL_FILE, files, trusted)
        case "per_rank":
            assert manifest is not None, "a single file is a full checkpoint"
            return PerRankSource(path, files, trusted, manifest, rank)
        case "sharded":
            return ShardedSource(path, files, trusted, manifest)
        case _:
            assert_never(form)


@checked
def read_parts(folder: str | Path, trusted: bool = False) -> dict[str, Any]:
    """Reads the small parts of a checkpoint, not its tensors, in one process.

    Args:
        folder: a checkpoint.
        trusted: whether the parts may execute code while they are read.

    Returns:
        step, scheduler, scaler, data, and extra, as far as they were saved.
    """
    path = Path(folder).expanduser() / PARTS_FILE
    if not path.is_file():
        return {}
    with OpenFiles() as files:
        return detached(open_archive(files, path, trusted)[0])


def verify_archive(path: Path, rank: int, world_size: int) -> None:
    """Compares this rank's part of a `torch.save` file with the checksums in it."""
    try:
        with open(open_regular(path), "rb") as opened, zipfile.ZipFile(opened) as archive:
            for record in archive.infolist()[rank::world_size]:
                with archive.open(record) as file:
                    while file.read(_BLOCK_BYTES):
                        pass
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, NotImplementedError, ValueError, RuntimeError, EOFError) as error:
        raise error if isinstance(error, CheckpointError) else CorruptFile(f"{path}: damaged, {error}") from None


def _matched(
    path: Path, values: Mapping[str, Any], records: Mapping[str, Any]
) -> tuple[dict[str, Any], Entries, dict[str, tensors.Source]]:
    """Returns model and optimizer of a file as a tree, its entries, and a source for each tensor."""
    flat, paths = flatten({name: values[name] for name in _TOPS if name in values})
    found, _ = flatten({name: records[name] for name in _TOPS if name in records})
    leaves, entries, sources = {}, {}, {}
    for name, value in flat.items():
        leaves[name], entries[name] = value, None
        if not isinstance(value, torch.Tensor):
            continue
        source = found.get(name)
        if isinstance(source, Shard) or isinstance(value, DTensor):
            raise CheckpointError(f"{path}: {name} is a DTensor, one rank's part of a tensor. Save full tensors.")
        if not isinstance(source, tensors.Source) or (source.shape, source.dtype) != (tuple(value.shape), value.dtype):
            raise CorruptFile(f"{path}: damaged, {name} is {list(value.shape)} of {value.dtype}, its record is another")
        sources[name] = source
        leaves[name], entries[name] = Leaf(name, source.shape, source.dtype), (source.shape, source.dtype)
    return nest(paths, leaves), entries, sources


def _check_records(path: Path, sources: Mapping[str, tensors.Source], tied: Collection[Collection[str]]) -> None:
    """Raises `CorruptFile` unless every tensor of fsdp2x's file fills one record. Tied tensors share theirs."""
    kept = {name: min(names) for names in tied for name in names}
    owners: dict[int, str] = {}
    for name, source in sources.items():
        if not isinstance(source, tensors.FileTensor) or not source.is_whole:
            raise CorruptFile(f"{path}: damaged, {name} does not fill its record")
        owner = owners.setdefault(source.offset, name)
        if kept.get(owner, owner) != kept.get(name, name):
            raise CorruptFile(f"{path}: damaged, {owner} and {name} share one record")


def _whole_shape(what: str, chunk: Any, held: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the tensor that a chunk of per-rank files belongs to."""
    numbers: list[Any] = (
        [chunk.get(key) for key in ("shape", "offsets", "sizes")] if isinstance(chunk, dict) else [None] * 3
    )
    shape, offsets, sizes = numbers
    fits = all(isinstance(one, list) and tensors.is_shape(one) for one in numbers)
    fits = fits and sizes == list(held) and len(shape) == len(offsets) == len(held)
    if not fits or any(a + n > whole for a, n, whole in zip(offsets, sizes, shape, strict=True)):
        raise CorruptFile(f"{what} has shape {list(held)}, but its entry describes the chunk {str(chunk)[:200]}")
    return tuple(shape)
