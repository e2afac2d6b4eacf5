"""Writes the files of a checkpoint. A form of checkpoint is a `Sink`, which takes the chunks of one rank.

    sharded     __R_0.distcp             an archive of `torch.save` per chunk that rank R writes, one after another
    per_rank    __0_1.distcp             entries that are not tensors, likewise, for torch DCP
                .metadata                torch DCP's table of contents
    full        checkpoint.safetensors   full tensors, written by all ranks at once
    all         trainer.pt               entries that are not tensors, small parts, and random generators of all ranks
                manifest.json            the table of contents that fsdp2x reads: place and checksum of each chunk

In the full form, shapes give the place of every tensor, so each rank writes its own rows. No rank holds more than its
own shards. In the per-rank form, what may differ between ranks is stored under `ranks.R.`.
"""

from __future__ import annotations

import functools
import pickle
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorStorageMetadata

from fsdp2x.base import torch_private
from fsdp2x.base.failures import CheckpointError
from fsdp2x.base.memory_file import memory_of
from fsdp2x.io.checkpoint.directory import ASSETS_FOLDER, FULL_FILE, PARTS_FILE, write_bytes
from fsdp2x.io.checkpoint.disk import DirectFile
from fsdp2x.io.checkpoint.manifest import FormName, describe_files, dtype_name, file_names, write_manifest
from fsdp2x.io.checkpoint.plan import Chunk, Plan
from fsdp2x.io.checkpoint.trees import to_bytes
from fsdp2x.io.formats.dcp import METADATA
from fsdp2x.io.formats.tensors import runs_of_box
from fsdp2x.io.hf.files import DTYPES
from fsdp2x.io.hf.folder import sync_file
from fsdp2x.io.hf.layout import Layout, Writer, layout_of, make_files
from fsdp2x.io.names import TensorSpec

_ALIGN_BYTES = 64


class Written(NamedTuple):
    """A chunk on disk: its entry in the manifest, and in torch DCP's files the run of bytes of its archive."""

    name: str
    entry: dict[str, Any]
    start: int = 0
    num_bytes: int = 0


@dataclass
class Contents:
    """Contents of a checkpoint in addition to tensors, on rank 0: `values` are entries of model and optimizer."""

    manifest: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    write_assets: Callable[[Path], None] | None = None


class Sink:
    """Takes the chunks that one rank writes."""

    def __init__(self, folder: Path, rank: int, layout: Layout | None) -> None:
        raise NotImplementedError

    def write(self, chunk: Chunk, data: torch.Tensor) -> Written:
        """Writes a chunk, whose elements `data` has as flat bytes."""
        raise NotImplementedError

    def close(self) -> dict[str, int]:
        """Waits until all is on disk. Returns the bytes of each file."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Closes the files as they are."""

    @staticmethod
    def lay_out(folder: Path, plan: Plan) -> Layout | None:
        """Does on rank 0 what must be done before any rank writes. All ranks get the result."""
        return None

    @staticmethod
    def finish(folder: Path, plan: Plan, written: Sequence[Written], contents: Contents) -> None:
        """Does on rank 0 what remains after all ranks have written."""


class DcpSink(Sink):
    """The directory of `torch.distributed.checkpoint`."""

    def __init__(self, folder: Path, rank: int, layout: Layout | None) -> None:
        self._name = f"__{rank}_0.distcp"
        self._file = DirectFile(folder / self._name)

    def write(self, chunk: Chunk, data: torch.Tensor) -> Written:
        start = self._file.num_bytes
        head, tail = _archive_around(chunk.dtype, chunk.sizes)
        self._file.put(head)
        first_byte = self._file.num_bytes
        crc = self._file.data(data)
        self._file.put(tail)
        num_bytes = self._file.num_bytes - start
        self._file.put(bytes(-self._file.num_bytes % _ALIGN_BYTES))
        entry = {**_described(chunk, crc), "file": self._name, "first_byte": first_byte}
        return Written(chunk.name, entry, start, num_bytes)

    def close(self) -> dict[str, int]:
        self._file.close()
        return {self._name: self._file.num_bytes}

    def abandon(self) -> None:
        self._file.abandon()

    @staticmethod
    def finish(folder: Path, plan: Plan, written: Sequence[Written], contents: Contents) -> None:
        """Writes entries that are not tensors and the table of contents, for torch DCP.

        A tied weight is stored once and listed under each name, as FSDP2 expects.
        """
        metadata, paths = plan.of_all_ranks()
        described = dict(metadata.state_dict_metadata)
        storage = {
            MetadataIndex(name, torch.Size(entry["offsets"])): torch_private.storage_info(entry["file"], start, length)
            for name, entry, start, length in written
        }
        file, content = "__0_1.distcp", b""
        for name, value in contents.values.items():
            part = to_bytes(value)
            storage[MetadataIndex(name)] = torch_private.storage_info(file, len(content), len(part))
            content += part
        if content:
            write_bytes(folder / file, content)
        for alias, kept in contents.manifest["tied"].items():
            alias, kept = f"model.{alias}", f"model.{kept}"
            if kept in described:
                described[alias] = described[kept]
                paths[alias] = ("model", alias.removeprefix("model."))
                for index in [index for index in storage if index.fqn == kept]:
                    storage[MetadataIndex(alias, index.offset)] = storage[index]
        metadata = replace(
            metadata,
            state_dict_metadata=described,
            planner_data=paths,
            storage_data=storage,
            storage_meta=StorageMeta(checkpoint_id=None, save_id=str(uuid.uuid4())),
            version="1.0.0",
        )
        write_bytes(folder / METADATA, pickle.dumps(metadata))


class _Hollow:
    """A stream for `torch.save`. Keeps what is before and after the data that it skips."""

    def __init__(self) -> None:
        self.parts = [bytearray()]

    def write(self, content: bytes) -> int:
        self.parts[-1] += content
        return len(content)

    def seek(self, num_bytes: int, whence: int) -> None:
        self.parts.append(bytearray())

    def flush(self) -> None:
        pass


@functools.lru_cache(maxsize=1024)
def _archive_around(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Returns what `torch.save` writes before and after the bytes of a tensor.

    The archive has a checksum of 0 for them, which `torch.load` ignores. The manifest has the right one.
    """
    stream: Any = _Hollow()
    with torch.serialization.skip_data():
        torch.save(torch.empty(sizes, dtype=dtype, device="cpu"), stream)
    head, *tail = map(bytes, stream.parts)
    return head, b"".join(tail)


class FullSink(Sink):
    """One safetensors file with full tensors."""

    def __init__(self, folder: Path, rank: int, layout: Layout | None) -> None:
        assert layout is not None, "rank 0 laid it out"
        self._path, self._num_bytes = folder / FULL_FILE, layout.files[0].num_bytes
        self._writer = Writer(folder, layout, shows_progress=False)

    def write(self, chunk: Chunk, data: torch.Tensor) -> Written:
        host = data.cpu()
        try:
            firsts = [first for _, first in runs_of_box(chunk.shape, chunk.offsets, chunk.sizes)]
            for first, run in zip(firsts, host.chunk(max(len(firsts), 1)), strict=False):
                self._writer.write(chunk.name, run, skip_bytes=first * chunk.dtype.itemsize)
        except OSError as error:
            error.filename = str(self._path)
            raise
        return Written(chunk.name, {**_described(chunk, zlib.crc32(memory_of(host))), "file": FULL_FILE})

    def close(self) -> dict[str, int]:
        try:
            self._writer.sync()
        except OSError as error:
            error.filename = str(self._path)
            raise
        return {FULL_FILE: self._num_bytes}

    def abandon(self) -> None:
        self._writer.__exit__()

    @staticmethod
    def lay_out(folder: Path, plan: Plan) -> Layout:
        """Lays out the file and makes it, with its header."""
        described, _ = plan.of_all_ranks()
        specs = [
            TensorSpec(name, entry.size, entry.properties.dtype)
            for name, entry in described.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        ]
        unknown = [f"{spec.name} ({spec.dtype})" for spec in specs if spec.dtype not in DTYPES.values()]
        if unknown:
            raise CheckpointError(f"safetensors cannot hold {unknown[0]}. Save with form='sharded'.")
        layout = layout_of({FULL_FILE: specs}, is_indexed=False)
        make_files(folder, layout)
        sync_file(folder / FULL_FILE)  # the header, because another rank may write everything else
        return layout


SINKS: dict[FormName, type[Sink]] = {"sharded": DcpSink, "per_rank": DcpSink, "full": FullSink}


def write_chunks(
    sink: type[Sink], folder: Path, rank: int, layout: Layout | None, chunks: Sequence[Chunk], data: Iterable
) -> tuple[list[Written], dict[str, int]]:
    """Writes this rank's chunks, whose bytes `data` has in the same order. Returns them, and the bytes of each file."""
    if not chunks:
        return [], {}
    opened = sink(folder, rank, layout)
    try:
        written = [opened.write(chunk, part) for chunk, part in zip(chunks, data, strict=True)]
        return written, opened.close()
    finally:
        opened.abandon()


def finish(folder: Path, form: FormName, plan: Plan, contents: Contents, written: Sequence[tuple]) -> None:
    """Writes the small files and the manifest on rank 0. `written` has the results of `write_chunks` by rank."""
    chunks: list[Written] = [one for of_rank, _ in written for one in of_rank]
    SINKS[form].finish(folder, plan, chunks, contents)
    write_bytes(folder / PARTS_FILE, to_bytes({**contents.parts, "values": contents.values}))
    if contents.write_assets is not None:
        (folder / ASSETS_FOLDER).mkdir()
        contents.write_assets(folder / ASSETS_FOLDER)
    metadata, paths = plan.of_all_ranks()
    tensors = {
        name: {"path": paths[name], "shape": entry.size, "dtype": dtype_name(entry.properties.dtype), "chunks": []}
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    for chunk in chunks:
        if 0 not in chunk.entry["sizes"]:
            tensors[chunk.name]["chunks"].append(chunk.entry)
    files = {name: {"bytes": num_bytes} for _, of_rank in written for name, num_bytes in of_rank.items()}
    files |= describe_files(folder, [name for name in file_names(folder) if name not in files])
    values = {name: paths[name] for name in contents.values}
    write_manifest(folder, {**contents.manifest, "tensors": tensors, "values": values, "files": files})


def _described(chunk: Chunk, crc: int) -> dict[str, Any]:
    return {"offsets": chunk.offsets, "sizes": chunk.sizes, "crc32": crc}
