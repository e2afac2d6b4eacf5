"""Writes tensors to their places in the weight files of a `Layout`, a few rows at a time."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import torch

from fsdp2x.hf.layout import Layout
from fsdp2x.hf.progress import ProgressBar
from fsdp2x.hf.sources import Computed, row_boxes
from fsdp2x.reading.tensors import BUFFER_BYTES, Source

INDEX = "model.safetensors.index.json"


def make_files(folder: Path, layout: Layout) -> None:
    """The files of a layout with their headers and sizes, and the index; the tensors are holes."""
    for file in layout.files:
        with open(folder / file.name, "wb") as opened:
            opened.write(file.header)
            opened.truncate(file.num_bytes)
    if layout.index is not None:
        (folder / INDEX).write_text(json.dumps(layout.index, indent=2) + "\n")


class Writer:
    """The weight files of a folder, opened when this rank first writes to them; a bar shows how far it is."""

    def __init__(self, folder: Path, layout: Layout, *, num_writers: int = 1) -> None:
        """``num_writers``: ranks that write about as much each, which is all that the bar is told of them."""
        self._folder, self._layout = folder, layout
        self._fds: dict[int, int] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._bar = ProgressBar(sum(file.num_bytes for file in layout.files) // num_writers, "Writing weights")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exception) -> None:
        self._bar.close()
        for fd in self._fds.values():
            os.close(fd)

    def sync(self) -> None:
        for fd in self._fds.values():
            os.fsync(fd)

    def write(self, name: str, rows: torch.Tensor, *, dtype: torch.dtype | None = None, skip_bytes: int = 0) -> None:
        """Writes ``rows``, converted, ``skip_bytes`` after the start of tensor ``name``; a few rows at a time."""
        if rows.numel() == 0:
            return
        dtype = dtype or rows.dtype
        index, offset = self._layout.place[name]
        if index not in self._fds:
            self._fds[index] = os.open(self._folder / self._layout.files[index].name, os.O_WRONLY | os.O_CLOEXEC)
        offset += skip_bytes
        rows = rows if rows.dim() else rows.view(1)
        step = max(1, BUFFER_BYTES // (rows[0].numel() * dtype.itemsize))
        for part in rows.split(step):
            part = part.to(device="cpu", dtype=dtype).contiguous()
            data = memoryview(part.view(-1).view(torch.uint8).numpy())
            while len(data):
                count = os.pwrite(self._fds[index], data, offset)
                data, offset = data[count:], offset + count
                self._bar.add(count)

    def copy(self, name: str, source: Source, dtype: torch.dtype) -> None:
        """Writes a source, converted, as tensor ``name``, through a buffer of a few MiB."""
        if isinstance(source, Computed):
            self.write(name, source.whole(), dtype=dtype)
            return
        done_numel = 0
        limit_numel = max(1, BUFFER_BYTES // max(dtype.itemsize, source.dtype.itemsize))
        for start, shape in row_boxes(source.shape, limit_numel):
            num_bytes = math.prod(shape) * source.dtype.itemsize
            box = self._buffer(num_bytes).view(source.dtype).view(shape)
            source.read(start, box)
            self.write(name, box, dtype=dtype, skip_bytes=done_numel * dtype.itemsize)
            done_numel += box.numel()

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(max(num_bytes, BUFFER_BYTES), dtype=torch.uint8)
        return self._memory[:num_bytes]
