"""The forms of a checkpoint whose files belong to one rank each: the sharded directory and the per-rank files.

    sharded     __R_0.distcp   an archive (see archive.py) per chunk that rank R writes, one after another
                __R_1.distcp   entries that are no tensors, likewise; each archive has a label (see reading/dcp.py)
                .metadata      torch DCP's table of contents
    per_rank    rank-0000R.pt  one archive: the trees of rank R with its local tensors

`Form` is what a save asks of them, and of the form in `full.py`.
"""

from __future__ import annotations

import io
import pickle
import uuid
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from fsdp2x.reading.dcp import label
from fsdp2x.reading.records import LABEL
from fsdp2x.reading.table import METADATA
from fsdp2x.runtime import torch_private

from .archive import ALIGN_BYTES, Archive, Stored
from .directory import rank_file, write_bytes
from .disk import Sink, StagedSink, StreamedSink
from .plan import Chunk, Plan
from .state import nest
from .values import to_bytes

Files = dict[str, dict[str, int]]


@dataclass
class Contents:
    """What a save holds on this rank beside the tensors. `rngs` and `small` are those of all ranks, on rank 0."""

    objects: dict[str, Any]
    paths: Mapping[str, tuple]
    aliases: Mapping[str, str]
    manifest: dict[str, Any]
    small: dict[str, Any] = field(default_factory=dict)
    rngs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Written:
    """What a rank reports about its part."""

    files: Files
    details: Any = None


class Form:
    """One save of this rank: where its data goes, the writing, and on rank 0 what joins the parts of all ranks."""

    name: str
    chunks: Sequence[Chunk]  # of this rank
    positions: list[int]  # of their bytes in a buffer of `num_bytes`: those of the file, so that a staged copy is one
    num_bytes: int
    holds_parts = False  # the small parts and the generators of all ranks; else they get files of their own

    def place(self, folder: Path, contents: Contents, group: dist.ProcessGroup | None) -> None:
        """What all ranks do together before they write."""

    def write(self, folder: Path, contents: Contents, data: Sequence[torch.Tensor], staged: Any) -> Written:
        """Writes the data of `chunks`, or its staged copy."""
        raise NotImplementedError

    def finish(self, folder: Path, contents: Contents, written: Sequence[Written]) -> Files:
        """On rank 0, after all have written."""
        return {}


class Sharded(Form):
    """`torch.distributed.checkpoint`'s directory."""

    name = "sharded"

    def __init__(self, plan: Plan, rank: int):
        self.plan, self.rank = plan, rank
        self.chunks = plan.mine
        self._archives: list[tuple[int, Archive]] = []
        self.positions: list[int] = []
        end = 0
        for chunk in self.chunks:
            stored = Stored(0, chunk.dtype, chunk.sizes)
            archive = Archive(stored, [stored], label(chunk.name, chunk.offsets, 0))
            self._archives.append((end, archive))
            self.positions.append(end + archive.data_offsets[0])
            end += -(-archive.num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self.num_bytes = end

    def write(self, folder: Path, contents: Contents, data: Sequence[torch.Tensor], staged: Any) -> Written:
        entries = []
        files: Files = {}
        step = contents.manifest["step"]
        if self.chunks:
            file = f"__{self.rank}_0.distcp"

            def fill(sink: Sink) -> None:
                for chunk, (start, archive), source in zip(self.chunks, self._archives, data, strict=True):
                    sink.put(bytes(start - sink.num_bytes))
                    archive.write(sink, [source], label(chunk.name, chunk.offsets, step))
                sink.put(bytes(self.num_bytes - sink.num_bytes))

            files[file] = write_sink(folder / file, fill, staged)
            for chunk, (start, archive) in zip(self.chunks, self._archives, strict=True):
                entries.append((chunk.name, chunk.offsets, file, start, archive.num_bytes))
        if self.plan.objects:
            file = f"__{self.rank}_1.distcp"
            content = b""
            for name in self.plan.objects:
                part = _labelled(to_bytes(contents.objects[name]), label(name, None, step))
                entries.append((name, None, file, len(content), len(part)))
                content += part
            files[file] = write_described(folder / file, content)
        return Written(files, entries)

    def finish(self, folder: Path, contents: Contents, written: Sequence[Written]) -> Files:
        """The table of contents. A tied weight is stored once and listed under each of its names, as stock expects."""
        described = dict(self.plan.metadata.state_dict_metadata)
        paths = dict(self.plan.paths)
        storage = {
            MetadataIndex(name, offsets): torch_private.storage_info(file, start, length)
            for one in written
            for name, offsets, file, start, length in one.details
        }
        for alias, kept in contents.aliases.items():
            alias, kept = f"model.{alias}", f"model.{kept}"
            described[alias] = described[kept]
            paths[alias] = ("model", alias.removeprefix("model."))
            for index in [index for index in storage if index.fqn == kept]:
                storage[MetadataIndex(alias, index.offset)] = storage[index]
        metadata = replace(
            self.plan.metadata,
            state_dict_metadata=described,
            planner_data=paths,
            storage_data=storage,
            storage_meta=StorageMeta(checkpoint_id=None, save_id=str(uuid.uuid4())),
            version="1.0.0",
        )
        return {METADATA: write_described(folder / METADATA, pickle.dumps(metadata))}


class PerRank(Form):
    """A file of each rank, for the same number of ranks only."""

    name = "per_rank"

    def __init__(self, plan: Plan, rank: int, contents: Contents):
        self.rank = rank
        self.chunks = plan.held
        stored = {chunk.name: Stored(key, chunk.dtype, chunk.sizes) for key, chunk in enumerate(self.chunks)}
        tree = nest(contents.paths, {**stored, **contents.objects})
        tree["chunks"] = {chunk.name: _described(chunk) for chunk in self.chunks}
        tree["owner"] = {"rank": rank, **{key: contents.manifest[key] for key in ("world_size", "step")}}
        self._archive = Archive(tree, list(stored.values()))
        self.positions = self._archive.data_offsets
        self.num_bytes = self._archive.num_bytes

    def write(self, folder: Path, contents: Contents, data: Sequence[torch.Tensor], staged: Any) -> Written:
        file = rank_file(self.rank)
        return Written({file: write_sink(folder / file, lambda sink: self._archive.write(sink, data), staged)})


def _described(chunk: Chunk) -> dict[str, list[int]]:
    return {"shape": list(chunk.shape), "offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}


def _labelled(archive: bytes, text: bytes) -> bytes:
    """A file of `torch.save` with one more record."""
    buffer = io.BytesIO(archive)
    with zipfile.ZipFile(buffer, "a") as file:
        prefix = file.namelist()[0].partition("/")[0]
        file.writestr(zipfile.ZipInfo(f"{prefix}/{LABEL}"), text)  # without the time of day
    return buffer.getvalue()


def write_sink(path: Path, fill: Any, staged: torch.Tensor | None) -> dict[str, int]:
    """Lets `fill` write a file through a sink; returns its size and checksum."""
    sink = StreamedSink(path) if staged is None else StagedSink(path, staged)
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
