"""Tensors that are not in memory but readable by boxes: from files, or made of other such tensors.

A source has a shape and a dtype. ``read(start, out)`` fills ``out`` with the box of ``out.shape`` that begins at
``start``, converted to ``out.dtype``. It reads only the bytes of the box, directly into ``out`` if dtype and layout
allow it, otherwise through a small buffer. Stacking, joining, cutting, and transposing are arithmetic on boxes.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp2x.base.failures import CorruptFile
from fsdp2x.base.memory_file import memory_of
from fsdp2x.io.formats.safe_files import OpenFiles

# Large enough for full disk bandwidth, small enough to stay in the cache during conversion.
BUFFER_BYTES = 4 << 20
_MOST_DIMS = 64


def is_shape(sizes: object) -> bool:
    """Returns whether a tensor can have these sizes. torch itself counts elements in 64 bits."""
    if not isinstance(sizes, list | tuple) or len(sizes) > _MOST_DIMS:
        return False
    return all(type(size) is int and size >= 0 for size in sizes) and math.prod(max(n, 1) for n in sizes) < 2**59


class Source:
    """Base class: ``shape``, ``dtype``, ``read``. By itself it is a tensor that only another rank can read."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape, self.dtype = tuple(shape), dtype

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        raise AssertionError("this rank was asked for bytes that only the reading rank has")

    def __setstate__(self, state: object) -> None:
        """Raises, because a pickle could make the source of a tensor read from another place."""
        raise TypeError("a tensor's attributes are set by the file that holds it")

    def whole(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=dtype or self.dtype, device="cpu")
        self.read([0] * len(self.shape), out)
        return out


def runs_of_box(
    shape: Sequence[int], start: Sequence[int], box: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yields the runs of a box in a row-major tensor: index in the box, and first element in the tensor.

    All runs are equally long. An empty box has none.
    """
    if 0 in box:
        return
    # Rows below `outer` are one run, because every later dim is complete.
    outer = max((dim for dim in range(len(box)) if box[dim] != shape[dim]), default=0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    base = sum(first * stride for first, stride in zip(start, strides, strict=True))
    for index in itertools.product(*(range(size) for size in box[:outer])):
        yield index, base + sum(i * stride for i, stride in zip(index, strides, strict=False))


class FileTensor(Source):
    """A row-major tensor at a byte offset of a file. Its maker has checked that the file is long enough."""

    def __init__(self, files: OpenFiles, path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self._files, self._path, self._offset = files, path, offset

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        for index, first in runs_of_box(self.shape, start, out.shape):
            self._read_run(self._offset + first * self.dtype.itemsize, out[index])

    def _read_run(self, offset: int, out: torch.Tensor) -> None:
        if out.dtype == self.dtype and out.is_contiguous() and out.device.type == "cpu":
            self._fill(offset, out)
            return
        rows = out if out.dim() else out.view(1)
        row_bytes = math.prod(rows.shape[1:]) * self.dtype.itemsize
        step = max(1, BUFFER_BYTES // max(row_bytes, 1))
        buffer = torch.empty((min(step, rows.shape[0]), *rows.shape[1:]), dtype=self.dtype, device="cpu")
        for begin in range(0, rows.shape[0], step):
            part = rows[begin : begin + step]
            self._fill(offset + begin * row_bytes, buffer[: part.shape[0]])
            part.copy_(buffer[: part.shape[0]])

    def _fill(self, offset: int, out: torch.Tensor) -> None:
        flat = out.as_strided((out.numel(),), (1,))  # also works if a dim of size 1 has another stride
        self._files.fill(self._path, offset, memory_of(flat))


class LoadedTensor(Source):
    """A tensor that is in memory or mapped from a file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self._tensor = tensor

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        box = self._tensor
        for dim, (first, size) in enumerate(zip(start, out.shape, strict=True)):
            box = box.narrow(dim, first, size)
        out.copy_(box)


@dataclass
class Tile:
    """``source`` holds the box of its shape that begins at ``start``."""

    start: tuple[int, ...]
    source: Source


class Tiled(Source):
    """A tensor of ``shape`` whose ``tiles`` hold what is read. Its maker has checked that they do."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, tiles: Sequence[Tile]) -> None:
        super().__init__(shape, dtype)
        self._tiles = tiles

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        for tile in self._tiles:
            lows = [max(a, b) for a, b in zip(start, tile.start, strict=True)]
            ends = zip(start, out.shape, tile.start, tile.source.shape, strict=True)
            highs = [min(a + n, b + m) for a, n, b, m in ends]
            if any(low >= high for low, high in zip(lows, highs, strict=True)):
                continue
            part = out
            for dim, (low, high) in enumerate(zip(lows, highs, strict=True)):
                part = part.narrow(dim, low - start[dim], high - low)
            tile.source.read([low - first for low, first in zip(lows, tile.start, strict=True)], part)


def tiled(name: str, shape: Sequence[int], dtype: torch.dtype, tiles: Sequence[Tile]) -> Tiled:
    """Returns the tensor that ``tiles`` make up. Tiles at one place are replicas, and the first counts."""
    boxes = {(tile.start, tile.source.shape): tile for tile in reversed(tiles) if 0 not in tile.source.shape}
    for tile in boxes.values():
        if tile.source.dtype != dtype:
            raise CorruptFile(f"{name}: a shard has dtype {tile.source.dtype}, but the tensor {dtype}")
    if wrong := covers(shape, list(boxes)):
        raise CorruptFile(f"{name}: the shards {wrong}")
    return Tiled(shape, dtype, list(boxes.values()))


def covers(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str:
    """Returns why nonempty boxes (start, sizes) do not make up ``shape``, or "" if they do."""
    for start, sizes in boxes:
        fits = len(start) == len(sizes) == len(shape)
        if not fits or any(a < 0 or a + n > whole for a, n, whole in zip(start, sizes, shape, strict=True)):
            return f"of {list(sizes)} at {list(start)} reach beyond {list(shape)}"
    held, whole = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    if held != whole:
        return f"hold {held} elements of {whole}"
    return "overlap and leave gaps" if _overlap(shape, boxes) else ""


def _overlap(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Sweeps along the dim with most parts, where few boxes are at the same position."""
    if not shape:
        return len(boxes) > 1
    sweep = max(range(len(shape)), key=lambda dim: len({start[dim] for start, _ in boxes}))
    beside: list[tuple[Sequence[int], Sequence[int]]] = []
    for start, sizes in sorted(boxes, key=lambda box: box[0][sweep]):
        beside = [(other, n) for other, n in beside if other[sweep] + n[sweep] > start[sweep]]
        for other, more in beside:
            if all(a < b + m and b < a + n for a, n, b, m in zip(start, sizes, other, more, strict=True)):
                return True
        beside.append((start, sizes))
    return False


class Stacked(Source):
    """``torch.stack(sources, dim)``."""

    def __init__(self, sources: list[Source], dim: int) -> None:
        shape = sources[0].shape
        self._sources, self._dim = sources, dim % (len(shape) + 1)
        super().__init__((*shape[: self._dim], len(sources), *shape[self._dim :]), sources[0].dtype)

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        inner = [*start[: self._dim], *start[self._dim + 1 :]]
        for index in range(out.shape[self._dim]):
            self._sources[start[self._dim] + index].read(inner, out.select(self._dim, index))


class Joined(Tiled):
    """``torch.cat(sources, dim)``."""

    def __init__(self, sources: list[Source], dim: int) -> None:
        shape = list(sources[0].shape)
        *firsts, shape[dim] = itertools.accumulate((source.shape[dim] for source in sources), initial=0)
        dim %= len(shape)
        starts = [(0,) * dim + (first,) + (0,) * (len(shape) - dim - 1) for first in firsts]
        tiles = [Tile(start, source) for start, source in zip(starts, sources, strict=True)]
        super().__init__(shape, sources[0].dtype, tiles)


class Piece(Source):
    """``source.narrow(dim, first, size)``."""

    def __init__(self, source: Source, dim: int, first: int, size: int) -> None:
        shape = list(source.shape)
        shape[dim] = size
        super().__init__(shape, source.dtype)
        self._source, self._dim, self._first = source, dim, first

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        inner = list(start)
        inner[self._dim] += self._first
        self._source.read(inner, out)


class Turned(Source):
    """``source.transpose(dim0, dim1)``."""

    def __init__(self, source: Source, dim0: int, dim1: int) -> None:
        self._source, self._dims = source, (dim0, dim1)
        super().__init__(self._swap(source.shape), source.dtype)

    def _swap(self, sizes: Sequence[int]) -> list[int]:
        swapped = list(sizes)
        first, second = self._dims
        swapped[first], swapped[second] = swapped[second], swapped[first]
        return swapped

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        self._source.read(self._swap(start), out.transpose(*self._dims))


class Computed(Source):
    """A tensor that ``take`` makes in full at each read, because a box of it needs more than boxes of files."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, take: Callable[[], torch.Tensor]) -> None:
        super().__init__(shape, dtype)
        self._take = take

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        LoadedTensor(self._take()).read(start, out)


def differ(first: Source, second: Source, start: Sequence[int], shape: Sequence[int]) -> bool:
    """Returns whether a box of two sources of one shape has different values. Reads a few rows at a time."""
    if 0 in shape:
        return False
    limit_numel = max(1, BUFFER_BYTES // max(first.dtype.itemsize, second.dtype.itemsize))
    for offset, sizes in row_boxes(shape, limit_numel):
        boxes = [torch.empty(sizes, dtype=first.dtype, device="cpu") for _ in range(2)]
        for source, box in zip((first, second), boxes, strict=True):
            source.read([a + b for a, b in zip(start, offset, strict=True)], box)
        # Compare bits, because those of a NaN are equal too.
        if not torch.equal(*(box.view(-1).view(torch.uint8) for box in boxes)):
            return True
    return False


def checksum_of_box(source: Source, start: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the CRC-32 of the elements of a box in row-major order. Reads a few rows at a time."""
    crc = 0
    for offset, sizes in row_boxes(shape, max(1, BUFFER_BYTES // source.dtype.itemsize)):
        box = torch.empty(sizes, dtype=source.dtype, device="cpu")
        source.read([a + b for a, b in zip(start, offset, strict=True)], box)
        crc = zlib.crc32(memory_of(box), crc)
    return crc


def row_boxes(shape: Sequence[int], limit_numel: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields boxes (start, shape) of at most ``limit_numel`` elements, in row-major order."""
    if not shape or math.prod(shape) <= limit_numel:
        yield [0] * len(shape), list(shape)
        return
    row_numel = math.prod(shape[1:])
    if row_numel > limit_numel:
        for index in range(shape[0]):
            for start, box in row_boxes(shape[1:], limit_numel):
                yield [index, *start], [1, *box]
        return
    step = limit_numel // row_numel
    for first in range(0, shape[0], step):
        yield [first] + [0] * (len(shape) - 1), [min(step, shape[0] - first), *shape[1:]]
