"""The full form: one file that holds everything whole, written by all ranks at once and gathered by none.

The place of every tensor in the file follows from its shape, so each rank writes its rows where they belong; rank 0
adds what stands between them. No rank ever holds more than its own shards. The checksum of a tensor comes from those
of its rows; where a rank's part is not one run of bytes (a mesh that cuts another dim than the first), rank 0 reads
that tensor back.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fsdp2x.errors import CheckpointError
from fsdp2x.runtime.failures import on_rank_0

from .archive import ALIGN_BYTES, Archive, Record, Stored
from .crc import combine
from .directory import FULL_FILE
from .forms import Contents, Files, Form, Written
from .plan import Chunk, Plan
from .state import nest

_BLOCK_BYTES = 8 << 20


class Full(Form):
    """One file; `place` says where the tensors lie in it."""

    name = "full"
    holds_parts = True

    def __init__(self, plan: Plan, rank: int, file_name: str = FULL_FILE):
        self.plan, self.rank, self.file_name = plan, rank, file_name
        self.chunks = plan.mine
        self.positions: list[int] = []
        end = 0
        for chunk in self.chunks:
            self.positions.append(end)
            end += -(-chunk.num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self.num_bytes = end
        self._archive: Archive | None = None
        self._starts: dict[str, int] = {}

    def place(self, folder: Path, contents: Contents, group: dist.ProcessGroup | None) -> None:
        """Lays the file out and makes it, empty; collective."""

        def lay_out() -> dict[str, int]:
            described = self.plan.metadata.state_dict_metadata
            missing = [
                name
                for name, entry in described.items()
                if not isinstance(entry, TensorStorageMetadata) and name not in contents.objects
            ]
            if missing:
                raise CheckpointError(f"{missing[0]} is on another rank than rank 0; save with form='sharded'")
            stored = {
                name: Stored(key, entry.properties.dtype, tuple(entry.size))
                for key, (name, entry) in enumerate(
                    (name, entry) for name, entry in described.items() if isinstance(entry, TensorStorageMetadata)
                )
            }
            leaves = {**stored, **{name: contents.objects[name] for name in described if name not in stored}}
            tree = nest(self.plan.paths, leaves)
            for alias, kept in contents.aliases.items():
                tree["model"][alias] = tree["model"][kept]
            tree.update(contents.small, rng=contents.rngs, step=contents.manifest["step"], manifest=contents.manifest)
            self._archive = Archive(tree, list(stored.values()))
            with open(folder / self.file_name, "wb") as file:
                file.truncate(self._archive.num_bytes)
            return dict(zip(stored, self._archive.data_offsets, strict=True))

        self._starts = on_rank_0(lay_out, group=group)

    def write(self, folder: Path, contents: Contents, data: Sequence[torch.Tensor], staged: Any) -> Written:
        pieces = []
        path = folder / self.file_name
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
        return Written({}, pieces)

    def finish(self, folder: Path, contents: Contents, written: Sequence[Written]) -> Files:
        """Headers, checksums and directory."""
        pieces: dict[str, list[tuple]] = {}
        for one in written:
            for name, *piece in one.details:
                pieces.setdefault(name, []).append(tuple(piece))
        names = iter(self._starts)
        archive = self._archive
        path = folder / self.file_name
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
        return {self.file_name: {"bytes": archive.num_bytes, "crc32": whole}}


def runs(chunk: Chunk) -> Iterator[tuple[int, int, int]]:
    """(first byte in the whole tensor, first byte in the chunk, number of bytes) of each run of bytes of a chunk."""
    if chunk.num_bytes == 0:
        return
    shape, sizes, offsets = chunk.shape, chunk.sizes, chunk.offsets
    last = len(shape)
    while last > 0 and sizes[last - 1] == shape[last - 1]:
        last -= 1
    # Dims from `last` on are whole: one run reaches over dim last - 1.
    outer = max(last - 1, 0)
    inner_bytes = chunk.dtype.itemsize * torch.Size(shape[last:]).numel()
    run_bytes = inner_bytes * (sizes[outer] if last else 1)
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True)) * chunk.dtype.itemsize
    index = [0] * outer
    for number in range(torch.Size(sizes[:outer]).numel()):
        begin = sum(i * stride for i, stride in zip(index, strides[:outer], strict=True)) * chunk.dtype.itemsize
        yield base + begin, number * run_bytes, run_bytes
        for dim in range(outer - 1, -1, -1):
            index[dim] += 1
            if index[dim] < sizes[dim]:
                break
            index[dim] = 0


def _write(file: int, path: Path, source: torch.Tensor, offset: int) -> int:
    content = memoryview(source.numpy())
    crc = 0
    while content:
        block = content[:_BLOCK_BYTES]
        written = os.pwrite(file, block, offset)
        crc = zlib.crc32(block[:written], crc)
        content, offset = content[written:], offset + written
    return crc


def _crc_of(path: Path, record: Record, pieces: list[tuple[int, int, int | None]]) -> int:
    """CRC-32 of a tensor from its pieces (first byte, bytes, CRC-32), or from the file where they do not line up."""
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
