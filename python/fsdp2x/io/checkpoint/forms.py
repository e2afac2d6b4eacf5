"""Writes the three forms of a checkpoint. `Form` is the interface that a save uses.

    sharded     __R_0.distcp   an archive (see archive.py) per chunk that rank R writes, one after another
                __R_1.distcp   entries that are not tensors, likewise; each archive has a label (see io/formats/dcp.py)
                .metadata      torch DCP's table of contents
    per_rank    rank-0000R.pt  one archive: the trees of rank R with its local tensors
    full        checkpoint.pt  one archive with full tensors, written by all ranks at once

In the full form, shapes give the place of every tensor, so each rank writes its own rows and rank 0 adds the bytes in
between. No rank holds more than its own shards.
"""

from __future__ import annotations

import io
import os
import pickle
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorStorageMetadata

from fsdp2x.base import torch_private
from fsdp2x.base.failures import CheckpointError, on_rank_0
from fsdp2x.base.memory_file import memory_of
from fsdp2x.io.checkpoint.archive import ALIGN_BYTES, Archive, Record, Stored
from fsdp2x.io.checkpoint.directory import FULL_FILE, rank_file, write_bytes
from fsdp2x.io.checkpoint.disk import Sink, combine
from fsdp2x.io.checkpoint.manifest import FormName
from fsdp2x.io.checkpoint.plan import Chunk, Plan
from fsdp2x.io.checkpoint.trees import nest, to_bytes
from fsdp2x.io.formats.dcp import METADATA, KeyPath, label
from fsdp2x.io.formats.records import LABEL
from fsdp2x.io.formats.tensors import runs_of_box

Files = dict[str, dict[str, int]]
Written = tuple[Files, Any]  # the files of a rank, and what `finish` needs to know about its part


@dataclass
class Contents:
    """Contents of a save on this rank in addition to tensors. On rank 0, `rngs` and `small` are those of all ranks."""

    objects: dict[str, Any]
    paths: Mapping[str, KeyPath]
    aliases: Mapping[str, str]
    manifest: dict[str, Any]
    file_name: str = FULL_FILE  # of a full checkpoint
    small: dict[str, Any] = field(default_factory=dict)
    rngs: list[dict[str, Any]] = field(default_factory=list)


class Form:
    """One save of this rank: places its data, writes it, and on rank 0 joins the parts of all ranks."""

    chunks: Sequence[Chunk]  # of this rank
    holds_parts = False  # whether it holds the small parts and generators of all ranks; otherwise they get own files

    def __init__(self, plan: Plan, rank: int, contents: Contents):
        self.plan, self.rank, self.contents, self.chunks = plan, rank, contents, plan.mine

    def place(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        """Does what all ranks do together before they write."""

    def place_alone(self, folder: Path) -> None:
        """Does the same in a process that writes everything alone."""

    def write(self, folder: Path, data: Iterable[torch.Tensor]) -> Written:
        """Writes the bytes of `chunks` one after another."""
        raise NotImplementedError

    def finish(self, folder: Path, details: Sequence[Any]) -> Files:
        """Joins all parts on rank 0, after all ranks have written. `details` is ordered by rank."""
        return {}


class Sharded(Form):
    """The directory of `torch.distributed.checkpoint`."""

    def write(self, folder: Path, data: Iterable[torch.Tensor]) -> Written:
        entries: list[tuple] = []
        files: Files = {}
        step = self.contents.manifest["step"]
        if self.chunks:
            file = f"__{self.rank}_0.distcp"

            def fill(sink: Sink) -> None:
                for chunk, source in zip(self.chunks, data, strict=True):
                    stored = Stored(0, chunk.dtype, chunk.sizes)
                    archive = Archive(stored, [stored], label(chunk.name, chunk.offsets, step))
                    entries.append((chunk.name, chunk.offsets, file, sink.num_bytes, archive.num_bytes))
                    archive.write(sink, [source])
                    sink.put(bytes(-sink.num_bytes % ALIGN_BYTES))

            files[file] = write_sink(folder / file, fill)
        if self.plan.objects:
            file = f"__{self.rank}_1.distcp"
            content = b""
            for name in self.plan.objects:
                part = _labelled(to_bytes(self.contents.objects[name]), label(name, None, step))
                entries.append((name, None, file, len(content), len(part)))
                content += part
            files[file] = write_described(folder / file, content)
        return files, entries

    def finish(self, folder: Path, details: Sequence[Any]) -> Files:
        """Writes the table of contents. A tied weight is stored once and listed under each name, as FSDP2 expects."""
        metadata, paths = self.plan.of_all_ranks()
        described = dict(metadata.state_dict_metadata)
        storage = {
            MetadataIndex(name, offsets): torch_private.storage_info(file, start, length)
            for entries in details
            for name, offsets, file, start, length in entries
        }
        for alias, kept in self.contents.aliases.items():
            alias, kept = f"model.{alias}", f"model.{kept}"
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
        return {METADATA: write_described(folder / METADATA, pickle.dumps(metadata))}


class PerRank(Form):
    """One file for each rank, loadable by the same number of ranks only."""

    def __init__(self, plan: Plan, rank: int, contents: Contents):
        super().__init__(plan, rank, contents)
        self.chunks = plan.held
        stored = {chunk.name: Stored(key, chunk.dtype, chunk.sizes) for key, chunk in enumerate(self.chunks)}
        tree = nest(contents.paths, {**stored, **contents.objects})
        tree["chunks"] = {
            chunk.name: {key: list(getattr(chunk, key)) for key in ("shape", "offsets", "sizes")}
            for chunk in self.chunks
        }
        tree["owner"] = {"rank": rank, **{key: contents.manifest[key] for key in ("world_size", "step")}}
        self._archive = Archive(tree, list(stored.values()))

    def write(self, folder: Path, data: Iterable[torch.Tensor]) -> Written:
        file = rank_file(self.rank)
        return {file: write_sink(folder / file, lambda sink: self._archive.write(sink, data))}, None


def _labelled(archive: bytes, text: bytes) -> bytes:
    """Returns a file of `torch.save` with one more record."""
    buffer = io.BytesIO(archive)
    with zipfile.ZipFile(buffer, "a") as file:
        prefix = file.namelist()[0].partition("/")[0]
        file.writestr(zipfile.ZipInfo(f"{prefix}/{LABEL}"), text)  # without a time stamp
    return buffer.getvalue()


def write_sink(path: Path, fill: Callable[[Sink], None]) -> dict[str, int]:
    """Lets `fill` write a file through a sink. Returns its size and checksum."""
    sink = Sink(path)
    try:
        fill(sink)
    except BaseException:
        sink.abandon()
        raise
    sink.close()
    return {"bytes": sink.num_bytes, "crc32": sink.crc}


def write_described(path: Path, content: bytes) -> dict[str, int]:
    write_bytes(path, content)
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


_BLOCK_BYTES = 8 << 20


class Full(Form):
    """One file. `place` decides where the tensors go in it."""

    holds_parts = True
    _archive: Archive | None = None
    _starts: dict[str, int]

    def place(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        """Lays out the file and creates it, empty. Collective."""
        self._starts = on_rank_0(lambda: self._lay_out(folder), group=group)

    def place_alone(self, folder: Path) -> None:
        self._starts = self._lay_out(folder)

    def _lay_out(self, folder: Path) -> dict[str, int]:
        contents = self.contents
        metadata, paths = self.plan.of_all_ranks()
        described = metadata.state_dict_metadata
        missing = [
            name
            for name, entry in described.items()
            if not isinstance(entry, TensorStorageMetadata) and name not in contents.objects
        ]
        if missing:
            raise CheckpointError(f"{missing[0]} exists on another rank, but not on rank 0. Save with form='sharded'.")
        stored = {
            name: Stored(key, entry.properties.dtype, tuple(entry.size))
            for key, (name, entry) in enumerate(
                (name, entry) for name, entry in described.items() if isinstance(entry, TensorStorageMetadata)
            )
        }
        leaves = {**stored, **{name: contents.objects[name] for name in described if name not in stored}}
        tree = nest(paths, leaves)
        for alias, kept in contents.aliases.items():
            tree["model"][alias] = tree["model"][kept]
        tree.update(contents.small, rng=contents.rngs, step=contents.manifest["step"], manifest=contents.manifest)
        self._archive = Archive(tree, list(stored.values()))
        with open(folder / contents.file_name, "wb") as file:
            file.truncate(self._archive.num_bytes)
        return dict(zip(stored, self._archive.data_offsets, strict=True))

    def write(self, folder: Path, data: Iterable[torch.Tensor]) -> Written:
        pieces = []
        path = folder / self.contents.file_name
        file = os.open(path, os.O_WRONLY)
        try:
            for chunk, source in zip(self.chunks, data, strict=True):
                host = source.cpu()
                crc: int | None = 0
                num_runs = 0
                for begin, start, num_bytes in runs(chunk):
                    crc = _write(file, path, host[start : start + num_bytes], self._starts[chunk.name] + begin)
                    num_runs += 1
                first = next(runs(chunk))[0] if chunk.num_bytes else 0
                if chunk.num_bytes:
                    pieces.append((chunk.name, first, chunk.num_bytes, crc if num_runs == 1 else None))
            os.fsync(file)
        except OSError as error:
            error.filename = str(path)
            raise
        finally:
            os.close(file)
        return {}, pieces

    def finish(self, folder: Path, details: Sequence[Any]) -> Files:
        """Writes headers, checksums and the directory."""
        pieces: dict[str, list[tuple]] = {}
        for of_rank in details:
            for name, *piece in of_rank:
                pieces.setdefault(name, []).append(tuple(piece))
        names = iter(self._starts)
        archive = self._archive
        assert archive is not None, "rank 0 laid it out"
        path = folder / self.contents.file_name
        crcs: list[int] = []
        whole = at = 0
        with open(path, "r+b") as file:

            def put(content: bytes, offset: int) -> None:
                nonlocal whole, at
                assert offset == at, f"{offset} != {at}"
                file.seek(offset)
                file.write(content)
                whole, at = zlib.crc32(content, whole), at + len(content)

            for record in archive.records:
                put(record.header, record.header_offset)
                if record.content is None:
                    crcs.append(_crc_of(path, record, pieces.get(next(names), [])))
                    whole, at = combine(whole, crcs[-1], record.num_bytes), at + record.num_bytes
                else:
                    crcs.append(zlib.crc32(record.content))
                    put(record.content, record.offset)
                put(record.descriptor(crcs[-1]), record.offset + record.num_bytes)
            put(archive.directory(crcs), archive.directory_offset)
            file.flush()
            os.fsync(file.fileno())
        return {self.contents.file_name: {"bytes": archive.num_bytes, "crc32": whole}}


FORM_CLASSES: dict[FormName, type[Form]] = {"sharded": Sharded, "per_rank": PerRank, "full": Full}


def runs(chunk: Chunk) -> Iterator[tuple[int, int, int]]:
    """Yields (first byte in the full tensor, first byte in the chunk, number of bytes) of each run of a chunk."""
    found = [first * chunk.dtype.itemsize for _, first in runs_of_box(chunk.shape, chunk.offsets, chunk.sizes)]
    for number, begin in enumerate(found):
        run_bytes = chunk.num_bytes // len(found)
        yield begin, number * run_bytes, run_bytes


def _write(file: int, path: Path, source: torch.Tensor, offset: int) -> int:
    content = memory_of(source)
    crc = 0
    while content:
        block = content[:_BLOCK_BYTES]
        written = os.pwrite(file, block, offset)
        crc = zlib.crc32(block[:written], crc)
        content, offset = content[written:], offset + written
    return crc


def _crc_of(path: Path, record: Record, pieces: list[tuple[int, int, int | None]]) -> int:
    """Returns the CRC-32 of a tensor from pieces (first byte, bytes, CRC-32), or from the file if they leave gaps."""
    crc = end = 0
    for start, num_bytes, piece in sorted(pieces, key=lambda piece: piece[0]):
        if piece is None or start != end:
            break
        crc, end = combine(crc, piece, num_bytes), end + num_bytes
    if end == record.num_bytes:
        return crc
    crc, end = 0, 0
    with open(path, "rb") as file:
        file.seek(record.offset)
        while end < record.num_bytes:
            block = file.read(min(_BLOCK_BYTES, record.num_bytes - end))
            crc, end = zlib.crc32(block, crc), end + len(block)
    return crc
