"""Reads a directory of torch's distributed checkpoint (DCP) and checks its ``.metadata`` completely.

torch unpickles ``.metadata`` with plain pickle, so a checkpoint could run code in every process that loads it. This
module looks up no class and checks the result. Chunks must cover their tensor, and names, paths, and entries must
match. Each chunk must have a run of bytes inside a file, and runs must not overlap.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeGuard

import torch

from fsdp2x.base.failures import CheckpointError, CorruptFile, first_line, reworded
from fsdp2x.io.formats.records import OpaqueObject, load_run, read_records
from fsdp2x.io.formats.safe_files import OpenFiles, open_regular
from fsdp2x.io.formats.tensors import Source, Tile, Tiled, covers, is_shape

METADATA = ".metadata"
KeyPath = tuple[str | int, ...]

_KINDS = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )  # fmt: skip
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout")}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}
_LONGEST_PATH = 64


@dataclass(frozen=True)
class Run:
    """A run of bytes in a file of the directory."""

    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """``chunks`` are (offsets, sizes, place) of blocks that make up the tensor. Empty ones are omitted."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], Run], ...]


@dataclass(frozen=True)
class Table:
    """``paths`` gives each entry's place in the tree. Without it, each entry is at the top under its name."""

    tensors: dict[str, StoredTensor]
    objects: dict[str, Run]
    paths: dict[str, KeyPath]


def read_table(folder: Path) -> Table:
    """Reads a directory's table and checks it against the files."""
    path = folder / METADATA
    with open(open_regular(path), "rb") as file:
        table = _unpickled(path, file)
    _check_runs(folder, table)
    return table


def _unpickled(path: Path, file: IO[bytes]) -> Table:
    try:
        return _table(_Unpickler(file).load())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except CorruptFile as error:
        raise CorruptFile(f"{path}: damaged, {error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: not the metadata of a checkpoint: {error}") from None
    except Exception as error:
        raise CorruptFile(f"{path}: not the metadata of a checkpoint: {first_line(error)}") from None


class _Unpickler(pickle.Unpickler):
    """Resolves only the names that DCP writes, and never to their usual objects."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KINDS:
            return type(name, (OpaqueObject,), {})
        if (module, name) == ("torch", "Size"):
            return lambda sizes=(): tuple(sizes)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return OpaqueObject  # the folder it was written to, for any system; never used
        raise CorruptFile(f"it refers to {module}.{name}, which no checkpoint needs")

    def persistent_load(self, pid: Any) -> Any:
        raise CorruptFile("it holds a persistent reference, which no checkpoint needs")


def _is(value: Any, kind: str) -> TypeGuard[OpaqueObject]:
    return isinstance(value, OpaqueObject) and type(value).__name__ == kind


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise CorruptFile(sentence)


def _table(found: Any) -> Table:
    if not _is(found, "Metadata"):
        raise CorruptFile(f"not the metadata of a checkpoint: got {type(found).__name__}")
    described, stored = found.get("state_dict_metadata"), found.get("storage_data")
    for what, value in (("entries", described), ("places", stored)):
        _require(isinstance(value, dict), f"its {what} are a {type(value).__name__}")
    runs: dict[tuple[str, tuple[int, ...] | None], Run] = {}
    for index, info in stored.items():
        key = _index(index)
        _require(key not in runs, f"it gives two places for {key[0]} at {key[1]}")
        runs[key] = _run(info, key[0])
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Run] = {}
    used: set[tuple[str, tuple[int, ...] | None]] = set()
    for name, entry in described.items():
        _require(isinstance(name, str), f"an entry is named {name!r}"[:200])
        if _is(entry, "BytesStorageMetadata"):
            _require((name, None) in runs, f"it gives no place for {name}")
            objects[name] = runs[name, None]
            used.add((name, None))
        elif _is(entry, "TensorStorageMetadata"):
            tensors[name] = _tensor(name, entry, runs, used)
        else:
            raise CorruptFile(f"{name} is a {type(entry).__name__}, neither a tensor nor a value")
    lost = sorted(f"{name} at {offsets}" for name, offsets in runs.keys() - used)
    _require(not lost, f"it gives a place for {lost[:1]}, but does not describe it" if lost else "")
    return Table(tensors, objects, _paths(found.get("planner_data"), {*tensors, *objects}))


def _index(index: Any) -> tuple[str, tuple[int, ...] | None]:
    name, offset = (index.get("fqn"), index.get("offset")) if _is(index, "MetadataIndex") else (None, None)
    if not isinstance(name, str):
        raise CorruptFile("a place does not belong to any entry")
    return name, None if offset is None else _sizes(offset, f"the place of {name}")


def _run(info: Any, name: str) -> Run:
    _require(_is(info, "_StorageInfo"), f"the place of {name} is a {type(info).__name__}")
    file, offset, num_bytes = (info.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or os.path.basename(file) != file or file in ("", ".", "..") or "\0" in file:
        raise CorruptFile(f"it points to the file {str(file)[:200]!r}, which is not inside the checkpoint")
    _require(type(offset) is int and type(num_bytes) is int, f"the place of {name} is {offset!r}, {num_bytes!r}"[:200])
    if transforms := info.get("transform_descriptors"):
        raise CheckpointError(f"{file} was written through {transforms}, which is not supported")
    return Run(file, offset, num_bytes)


def _tensor(name: str, entry: OpaqueObject, runs: Mapping, used: set) -> StoredTensor:
    shape = _sizes(entry.get("size"), name)
    properties = entry.get("properties")
    state = properties.state if _is(properties, "TensorProperties") else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype):
        raise CorruptFile(f"{name} has no dtype")
    _require(isinstance(entry.get("chunks"), list), f"{name} has no chunks")
    chunks: dict[tuple, tuple[tuple[int, ...], tuple[int, ...], Run]] = {}
    for chunk in entry.get("chunks"):
        _require(_is(chunk, "ChunkStorageMetadata"), f"a chunk of {name} is a {type(chunk).__name__}")
        offsets, sizes = (_sizes(chunk.get(key), f"a chunk of {name}") for key in ("offsets", "sizes"))
        _require((name, offsets) in runs, f"it gives no place for {name} at {offsets}")
        used.add((name, offsets))
        if 0 not in sizes:
            chunks[offsets, sizes] = (offsets, sizes, runs[name, offsets])  # a repeated chunk is a replica
    if wrong := covers(shape, [(offsets, sizes) for offsets, sizes, _ in chunks.values()]):
        raise CorruptFile(f"the chunks of {name} {wrong}")
    return StoredTensor(dtype, shape, tuple(chunks.values()))


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    _require(isinstance(value, tuple) and is_shape(value), f"{what} has the sizes {str(value)[:100]}")
    return value


def is_path(name: str, path: Any) -> bool:
    """Returns whether an entry of that name can have that place in the tree."""
    is_right = isinstance(path, tuple | list) and 0 < len(path) <= _LONGEST_PATH
    return is_right and all(type(key) in (str, int) for key in path) and ".".join(map(str, path)) == name


def _paths(paths: Any, names: Collection[str]) -> dict[str, KeyPath]:
    if not isinstance(paths, dict) or not paths:
        return {name: (name,) for name in names}
    found = {}
    for name in names:
        path = paths.get(name, (name,))
        _require(is_path(name, path), f"the path of {name} is {str(path)[:200]}")
        found[name] = tuple(path)
    more = [name for name in paths if name not in found]
    _require(not more, f"it has a path, but no entry, for {str(more[:1])[:200]}")
    return found


def _check_runs(folder: Path, table: Table) -> None:
    """Checks that every run is inside its file, and that no two overlap. Tied tensors share theirs."""
    by_file: dict[str, dict[Run, str]] = {}
    runs = [(run, name) for name, tensor in table.tensors.items() for _, _, run in tensor.chunks]
    for run, name in [*runs, *((run, name) for name, run in table.objects.items())]:
        by_file.setdefault(run.file, {}).setdefault(run, name)
    for file, places in by_file.items():
        with reworded(CorruptFile, str(folder / file), OSError):
            size = os.stat(folder / file).st_size
        end, before = 0, ""
        for run, name in sorted(places.items(), key=lambda item: (item[0].offset, item[0].num_bytes)):
            reach = run.offset + run.num_bytes
            if run.offset < end or run.num_bytes <= 0 or reach > size:
                raise CorruptFile(
                    f"{folder / METADATA}: damaged, {name} would have bytes {run.offset} to {reach} of {file}, which "
                    f"has {size} bytes; {before or 'nothing'} before it ends at {end}"
                )
            end, before = reach, name


class DcpTensors(Mapping):
    """Maps each key to the source of its tensor. Opens a file when a source is requested."""

    def __init__(self, folder: Path, files: OpenFiles) -> None:
        self.folder, self._files = folder, files
        self.table = read_table(folder)

    def __iter__(self) -> Iterator[str]:
        return iter(self.table.tensors)

    def __len__(self) -> int:
        return len(self.table.tensors)

    def __getitem__(self, key: str) -> Source:
        return self.part(key)

    def part(self, key: str, box: tuple | None = None) -> Source:
        """Returns the source of a tensor. With a box (start, sizes), only its inside is checked and can be read."""
        entry = self.table.tensors[key]
        tiles = []
        for offsets, sizes, run in entry.chunks:
            if box is not None and not _meet(box, (offsets, sizes)):
                continue
            path = self.folder / run.file
            found = read_records(self._files, path, run.offset, run.num_bytes)
            if not isinstance(found, Source) or (found.shape, found.dtype) != (sizes, entry.dtype):
                got = f"{list(found.shape)} of {found.dtype}" if isinstance(found, Source) else type(found).__name__
                raise CorruptFile(
                    f"{path}: damaged, {METADATA} describes a part of {key}, {list(sizes)} of {entry.dtype}, got {got}"
                )
            tiles.append(Tile(offsets, found))
        return Tiled(entry.shape, entry.dtype, tiles)

    def value(self, key: str, trusted: bool = False) -> Any:
        """Returns an entry that is not a tensor."""
        run = self.table.objects[key]
        return load_run(self._files, self.folder / run.file, run.offset, run.num_bytes, key, trusted)


def _meet(one: tuple, other: tuple) -> bool:
    (start, sizes), (first, more) = one, other
    return all(a < b + m and b < a + n for a, n, b, m in zip(start, sizes, first, more, strict=True))
