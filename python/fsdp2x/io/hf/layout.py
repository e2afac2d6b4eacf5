"""Plans where each tensor goes in which safetensors file before it is written, and writes to these places.

All ranks compute the same layout from names, shapes and dtypes, so each can write its part at its place:

    file | header bytes (8) | header (JSON, padded to 8) | tensors, widest elements first, without gaps
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from fsdp2x.base.failures import rank_and_size
from fsdp2x.base.memory_file import memory_of
from fsdp2x.io.formats.tensors import BUFFER_BYTES, Computed, Source, row_boxes
from fsdp2x.io.hf.files import DTYPES
from fsdp2x.io.names import TensorSpec


class ProgressBar:
    """A progress bar, shown while open if standard error is a terminal, and removed when closed."""

    def __init__(self, total_bytes: int, what: str, wanted: bool = True) -> None:
        self._bar = None
        if wanted and rank_and_size()[0] == 0:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return
            # disable=None hides the bar if standard error is not a terminal.
            self._bar = tqdm(total=total_bytes, desc=what, unit="B", unit_scale=True, leave=False, disable=None)

    def add(self, num_bytes: int) -> None:
        if self._bar is not None:
            self._bar.update(num_bytes)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@contextlib.contextmanager
def bars_of_rank_0() -> Iterator[None]:
    """Shows transformers' progress bars inside the block on rank 0 only, and only on a terminal."""
    from transformers.utils import logging

    shows = logging.is_progress_bar_enabled()
    if rank_and_size()[0] != 0 or not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()


T = TypeVar("T")

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class WeightFile:
    """One file: its header with padding, its total size, and the byte offset of each tensor in it."""

    name: str
    header: bytes
    num_bytes: int
    offsets: dict[str, int] = field(repr=False)


@dataclass(frozen=True)
class Layout:
    """Files and places of all tensors. ``place[name]`` is (index of the file, byte offset)."""

    files: list[WeightFile]
    place: dict[str, tuple[int, int]]
    index: dict | None  # contents of the index file; None for a single file


def plan_layout(specs: Sequence[TensorSpec], max_shard_size: int | str, stem: str) -> Layout:
    """Distributes tensors in order over files of at most ``max_shard_size`` bytes (or one larger tensor)."""
    limit = parse_size(max_shard_size)
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"fsdp2x.save_hf: several weights would be written as {', '.join(twice)}")
    unknown = [f"{spec.name} ({spec.dtype})" for spec in specs if spec.dtype not in _NAMES]
    if unknown:
        raise ValueError(f"fsdp2x.save_hf: safetensors cannot hold {', '.join(unknown)}. Pass dtype or params.")
    parts = in_runs(specs, lambda spec: spec.num_bytes, limit)
    if len(parts) < 2:
        return layout_of({f"{stem}.safetensors": specs}, is_indexed=False)
    names = [f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    return layout_of(dict(zip(names, parts, strict=True)), is_indexed=True)


def in_runs(items: Iterable[T], bytes_of: Callable[[T], int], limit: int) -> list[list[T]]:
    """Splits consecutive items into lists of at most ``limit`` bytes, or of one larger item."""
    runs: list[list[T]] = []
    filled_bytes = 0
    for item in items:
        num_bytes = bytes_of(item)
        if not runs or filled_bytes + num_bytes > limit:
            runs.append([])
            filled_bytes = 0
        runs[-1].append(item)
        filled_bytes += num_bytes
    return runs


def layout_of(parts: Mapping[str, Sequence[TensorSpec]], *, is_indexed: bool) -> Layout:
    """Returns the layout of given files: file name -> its tensors."""
    files = [_file(name, part) for name, part in parts.items()]
    index = None
    if is_indexed:
        specs = [spec for part in parts.values() for spec in part]
        total = {
            "total_parameters": sum(spec.shape.numel() for spec in specs),
            "total_size": sum(spec.num_bytes for spec in specs),
        }
        weight_map = {name: file.name for file in files for name in file.offsets}
        index = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
    place = {name: (number, offset) for number, file in enumerate(files) for name, offset in file.offsets.items()}
    return Layout(files, place, index)


def _file(name: str, specs: Sequence[TensorSpec]) -> WeightFile:
    # Wide elements first, so every tensor is aligned to its element size, as in the safetensors library.
    ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    header: dict = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for spec in ordered:
        offsets[spec.name] = end
        header[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.num_bytes],
        }
        end += spec.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return WeightFile(name, head, len(head) + end, {key: len(head) + offset for key, offset in offsets.items()})


def parse_size(size: int | str) -> int:
    """Returns the bytes of 5000, "5GB" (10^9), or "1.5 GiB" (2^30)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B|)\s*", str(size).upper())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f'fsdp2x.save_hf: max_shard_size must be bytes or a size such as "5GB", got {size!r}')
    return max(1, int(float(match[1]) * _UNITS[match[2]]))


INDEX = "model.safetensors.index.json"


def make_files(folder: Path, layout: Layout) -> None:
    """Makes the files of a layout with their headers and sizes, and the index. Tensors are holes in the files."""
    for file in layout.files:
        with open(folder / file.name, "wb") as opened:
            opened.write(file.header)
            opened.truncate(file.num_bytes)
    if layout.index is not None:
        (folder / INDEX).write_text(json.dumps(layout.index, indent=2) + "\n")


class Writer:
    """The weight files of a folder, opened at this rank's first write to them. Shows a progress bar."""

    def __init__(self, folder: Path, layout: Layout, *, num_writers: int = 1, shows_progress: bool = True) -> None:
        """``num_writers`` is the number of ranks that write about as much each. The bar uses it."""
        self._folder, self._layout = folder, layout
        self._fds: dict[int, int] = {}
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        num_bytes = sum(file.num_bytes for file in layout.files) // num_writers
        self._bar = ProgressBar(num_bytes, "Writing weights", shows_progress)

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
        """Converts ``rows`` and writes them ``skip_bytes`` after the start of tensor ``name``, a few rows at a time."""
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
            data = memory_of(part)
            while len(data):
                count = os.pwrite(self._fds[index], data, offset)
                data, offset = data[count:], offset + count
                self._bar.add(count)

    def copy(self, name: str, source: Source, dtype: torch.dtype) -> None:
        """Converts a source and writes it as tensor ``name``, through a buffer of a few MiB."""
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
            self._memory = torch.empty(max(num_bytes, BUFFER_BYTES), dtype=torch.uint8, device="cpu")
        return self._memory[:num_bytes]
