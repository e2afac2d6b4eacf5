"""Lays out the file format of `torch.save` before its data is known, so that it can be written front to back.

    archive   | header |pad| data/0 | descriptor | header |pad| data/1 | descriptor | ... | data.pkl | ... | directory |
    record    header: name, sizes, padding so that data starts at a multiple of 64 bytes; descriptor: CRC-32 of data

The file is a ZIP archive of stored records, always with 64-bit fields. Dtypes and shapes alone give the place of each
tensor. Checksums follow the data, in descriptors and in the directory, and the pickled tree comes last.
`torch.load` reads it, with `weights_only=True` and with `mmap=True`, and so does any ZIP program.

No library writes it. `torch.save` under `torch.serialization.skip_data` lays out a file without data, but leaves
checksums of 0, which `load` and ZIP programs take for damage. `torch.save` into a stream and `zipfile` let no other
rank write its rows, and need a second pass for the checksum of the file. safetensors holds no optimizer groups.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2x.base import torch_private
from fsdp2x.io.checkpoint.disk import Sink, bytes_of
from fsdp2x.io.formats.records import LABEL, STORAGES

ALIGN_BYTES = 64
_PREFIX = "archive/"
_FLAGS = 0x0808  # names are UTF-8; checksums follow the data
_NO_DATE = 0x21  # 1 January 1980, so that equal contents give equal files
_U32 = 0xFFFFFFFF
_STORAGE_TYPES = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}


@dataclass(frozen=True)
class Stored:
    """A contiguous tensor whose data is record `data/<key>`."""

    key: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Record:
    """A record. `offset` is that of its data in the archive. `content` is None for the data of a tensor."""

    name: str
    num_bytes: int
    header_offset: int
    offset: int
    content: bytes | None

    @property
    def header(self) -> bytes:
        name = self.name.encode()
        sizes = struct.pack("<HHQQ", 1, 16, self.num_bytes, self.num_bytes)
        pad = self.offset - self.header_offset - 30 - len(name) - len(sizes) - 4
        extra = sizes + struct.pack("<2sH", b"FB", pad) + b"Z" * pad
        fields = (0x04034B50, 45, _FLAGS, 0, 0, _NO_DATE, 0, _U32, _U32, len(name), len(extra))
        return struct.pack("<IHHHHHIIIHH", *fields) + name + extra

    def descriptor(self, crc: int) -> bytes:
        """Returns the bytes that follow the data."""
        return struct.pack("<IIQQ", 0x08074B50, crc, self.num_bytes, self.num_bytes)

    def entry(self, crc: int) -> bytes:
        """Returns the record's entry in the directory."""
        name = self.name.encode()
        extra = struct.pack("<HHQQQ", 1, 24, self.num_bytes, self.num_bytes, self.header_offset)
        sizes = (crc, _U32, _U32, len(name), len(extra), 0, 0, 0, 0, _U32)
        return struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 45, 45, _FLAGS, 0, 0, _NO_DATE, *sizes) + name + extra


class Archive:
    """Layout of one archive: `tree` is pickled, and each `Stored` in it has a separate record."""

    def __init__(self, tree: Any, stored: Sequence[Stored], label: bytes = b""):
        contents: list[tuple[str, int, bytes | None]] = [(f"data/{one.key}", one.num_bytes, None) for one in stored]
        body, inline = pickled(tree)
        known = [*((f"data/{key}", data) for key, data in inline), ("data.pkl", body)]
        known += [("byteorder", b"little"), ("version", b"3\n"), *([(LABEL, label)] if label else [])]
        contents += [(name, len(content), content) for name, content in known]
        self.records: list[Record] = []
        end = 0
        for name, num_bytes, content in contents:
            name = _PREFIX + name
            offset = -(-(end + 30 + len(name) + 24) // ALIGN_BYTES) * ALIGN_BYTES
            self.records.append(Record(name, num_bytes, end, offset, content))
            end = offset + num_bytes + 24
        self.directory_offset = end
        self.num_bytes = end + len(self.directory([0] * len(self.records)))

    @property
    def data_offsets(self) -> list[int]:
        """Offsets of the data of each `Stored`, in their order."""
        return [record.offset for record in self.records if record.content is None]

    def write(self, sink: Sink, sources: Iterable[torch.Tensor]) -> None:
        """Writes everything front to back. `sources` give the bytes of each `Stored`."""
        crcs = []
        data = iter(sources)
        for record in self.records:
            sink.put(record.header)
            if record.content is None:
                crcs.append(sink.data(next(data)))
            else:
                sink.put(record.content)
                crcs.append(zlib.crc32(record.content))
            sink.put(record.descriptor(crcs[-1]))
        sink.put(self.directory(crcs))

    def directory(self, crcs: Sequence[int]) -> bytes:
        """Returns the end of the archive. `crcs` has the checksums of all records in order."""
        entries = b"".join(record.entry(crc) for record, crc in zip(self.records, crcs, strict=True))
        num, start, end = len(self.records), self.directory_offset, self.directory_offset + len(entries)
        wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, num, num, len(entries), start)
        locator = struct.pack("<IIQI", 0x07064B50, 0, end, 1)
        return entries + wide + locator + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, _U32, _U32, 0)


def pickled(tree: Any) -> tuple[bytes, list[tuple[str, bytes]]]:
    """Returns `tree` as torch pickles it, and the data of tensors inside it, by the key of their record."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=2)
    pickler.dump(tree)
    return buffer.getvalue(), pickler.inline


@dataclass(frozen=True)
class _Storage:
    type: Any
    key: str
    num_elements: int


class _Pickler(pickle.Pickler):
    def __init__(self, *args: Any, **keywords: Any):
        super().__init__(*args, **keywords)
        self.inline: list[tuple[str, bytes]] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", obj.type, obj.key, "cpu", obj.num_elements)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            key = f"small-{len(self.inline)}"
            self.inline.append((key, bytes_of(obj).cpu().numpy().tobytes()))
            return _rebuild(key, obj.dtype, tuple(obj.shape))
        if isinstance(obj, Stored):
            return _rebuild(str(obj.key), obj.dtype, obj.shape)
        return NotImplemented


def _rebuild(key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple:
    strides = tuple(torch.empty(shape, device="meta").stride())
    layout = (0, shape, strides, False, OrderedDict())
    num_elements = torch.Size(shape).numel()
    if dtype in _STORAGE_TYPES:
        storage = _Storage(getattr(torch, _STORAGE_TYPES[dtype]), key, num_elements)
        return torch_private.rebuild_tensor, (storage, *layout)
    # dtypes without their own storage class, such as float8
    storage = _Storage(torch.UntypedStorage, key, num_elements * dtype.itemsize)
    return torch_private.rebuild_tensor_of_dtype, (storage, *layout, dtype)
