"""Whole tensors that are not in memory: in files, or made of such by stacking, joining, cutting and turning.

A source has a shape and a dtype, and ``read(start, out)`` fills ``out`` with the box of ``out.shape`` that begins at
``start``, converted to ``out.dtype``. Only the bytes of the box are read, straight into ``out`` where dtype and layout
allow it, otherwise through a small buffer: a rank reads its rows of a tensor, whatever the tensor is made of.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence

import torch

# Large enough for full disk bandwidth, small enough to stay in the cache while it is converted.
_BUFFER_BYTES = 4 << 20


class Source:
    """Base of all: ``shape``, ``dtype``, ``read``."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        raise NotImplementedError

    def undo(self, held: Source) -> list[tuple[Source, Source, tuple[int, int] | None]] | None:
        """What ``held``, which has this source's values, says about its inputs; None: nothing, it was computed.

        Each: the input, its values in ``held``, and None for all of it, or the (dim, first index) of a part.
        """
        return []

    def whole(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=dtype or self.dtype)
        self.read([0] * len(self.shape), out)
        return out


class FileTensor(Source):
    """A row-major tensor at a byte offset of an open file. Counts what it reads in ``counter[0]``."""

    def __init__(self, fd: int, path: str, offset: int, shape: tuple[int, ...], dtype: torch.dtype, counter: list[int]):
        self.shape, self.dtype = shape, dtype
        self._fd, self._path, self._offset, self._counter = fd, path, offset, counter

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        if out.numel() == 0:
            return
        box = tuple(out.shape)
        # Rows below `outer` are one run of bytes: every later dim is whole.
        outer = max((dim for dim in range(len(box)) if box[dim] != self.shape[dim]), default=0)
        if not box:
            self._read_run(self._offset, out)
            return
        inner = math.prod(self.shape[outer + 1 :])
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(outer + 1)]
        for index in itertools.product(*(range(size) for size in box[:outer])):
            first = sum((start[dim] + i) * strides[dim] for dim, i in enumerate(index)) + start[outer] * inner
            self._read_run(self._offset + first * self.dtype.itemsize, out[index])

    def _read_run(self, offset: int, out: torch.Tensor) -> None:
        if out.dtype == self.dtype and out.is_contiguous() and out.device.type == "cpu":
            self._fill(offset, out)
            return
        rows = out if out.dim() else out.view(1)
        row_bytes = math.prod(rows.shape[1:]) * self.dtype.itemsize
        step = max(1, _BUFFER_BYTES // max(row_bytes, 1))
        buffer = torch.empty((min(step, rows.shape[0]), *rows.shape[1:]), dtype=self.dtype)
        for begin in range(0, rows.shape[0], step):
            part = rows[begin : begin + step]
            self._fill(offset + begin * row_bytes, buffer[: part.shape[0]])
            part.copy_(buffer[: part.shape[0]])

    def _fill(self, offset: int, out: torch.Tensor) -> None:
        flat = out.as_strided((out.numel(),), (1,))  # also where a dim of size 1 has another stride
        target = memoryview(flat.view(torch.uint8).numpy())
        self._counter[0] += len(target)
        while len(target):
            count = os.preadv(self._fd, [target], offset)
            if count == 0:
                raise OSError(f"{self._path}: ends {len(target)} bytes before a tensor does: the file is truncated")
            target, offset = target[count:], offset + count


class LoadedTensor(Source):
    """A tensor that is in memory, or mapped from a file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self._tensor = tuple(tensor.shape), tensor.dtype, tensor

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        box = self._tensor
        for dim, (first, size) in enumerate(zip(start, out.shape, strict=True)):
            box = box.narrow(dim, first, size)
        out.copy_(box)


class RemoteTensor(Source):
    """A tensor that another rank reads."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        raise AssertionError("this rank was asked for bytes that only the reading rank has")


class Stacked(Source):
    """``torch.stack(sources, dim)``."""

    def __init__(self, sources: list[Source], dim: int) -> None:
        shape = sources[0].shape
        dim += len(shape) + 1 if dim < 0 else 0
        self.shape, self.dtype = (*shape[:dim], len(sources), *shape[dim:]), sources[0].dtype
        self._sources, self._dim = sources, dim

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        inner = [*start[: self._dim], *start[self._dim + 1 :]]
        for index in range(out.shape[self._dim]):
            self._sources[start[self._dim] + index].read(inner, out.select(self._dim, index))

    def undo(self, held: Source) -> list:
        return [(source, Picked(held, self._dim, index), None) for index, source in enumerate(self._sources)]


class Joined(Source):
    """``torch.cat(sources, dim)``."""

    def __init__(self, sources: list[Source], dim: int) -> None:
        shape = list(sources[0].shape)
        dim += len(shape) if dim < 0 else 0
        shape[dim] = sum(source.shape[dim] for source in sources)
        self.shape, self.dtype = tuple(shape), sources[0].dtype
        self._sources, self._dim = sources, dim

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        begin, end = start[self._dim], start[self._dim] + out.shape[self._dim]
        offset = 0
        for source in self._sources:
            size = source.shape[self._dim]
            first, last = max(begin, offset), min(end, offset + size)
            if first < last:
                inner = list(start)
                inner[self._dim] = first - offset
                source.read(inner, out.narrow(self._dim, first - begin, last - first))
            offset += size

    def undo(self, held: Source) -> list:
        firsts = itertools.accumulate((source.shape[self._dim] for source in self._sources), initial=0)
        return [
            (source, Piece(held, self._dim, first, source.shape[self._dim]), None)
            for source, first in zip(self._sources, firsts, strict=False)
        ]


class Piece(Source):
    """``source.narrow(dim, first, size)``."""

    def __init__(self, source: Source, dim: int, first: int, size: int) -> None:
        shape = list(source.shape)
        dim += len(shape) if dim < 0 else 0
        shape[dim] = size
        self.shape, self.dtype = tuple(shape), source.dtype
        self._source, self._dim, self._first = source, dim, first

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        inner = list(start)
        inner[self._dim] += self._first
        self._source.read(inner, out)

    def undo(self, held: Source) -> list:
        return [(self._source, held, (self._dim, self._first))]


class Picked(Source):
    """``source.select(dim, index)``."""

    def __init__(self, source: Source, dim: int, index: int) -> None:
        self.shape, self.dtype = (*source.shape[:dim], *source.shape[dim + 1 :]), source.dtype
        self._source, self._dim, self._index = source, dim, index

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        inner = [*start[: self._dim], self._index, *start[self._dim :]]
        self._source.read(inner, out.unsqueeze(self._dim))


class Turned(Source):
    """``source.transpose(dim0, dim1)``."""

    def __init__(self, source: Source, dim0: int, dim1: int) -> None:
        self._source, self._dims = source, (dim0, dim1)
        self.shape, self.dtype = tuple(self._swap(source.shape)), source.dtype

    def _swap(self, sizes: Sequence[int]) -> list[int]:
        swapped = list(sizes)
        first, second = self._dims
        swapped[first], swapped[second] = swapped[second], swapped[first]
        return swapped

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        self._source.read(self._swap(start), out.transpose(*self._dims))

    def undo(self, held: Source) -> list:
        return [(self._source, Turned(held, *self._dims), None)]


class Computed(Source):
    """One result of a conversion that needs whole tensors; results are kept until each has been read once."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, take: Callable[[], torch.Tensor]) -> None:
        self.shape, self.dtype, self._take = shape, dtype, take

    def read(self, start: Sequence[int], out: torch.Tensor) -> None:
        LoadedTensor(self._take()).read(start, out)

    def undo(self, held: Source) -> None:
        return None


def differ(first: Source, second: Source, start: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a box of two sources of one shape holds different values; reads a few rows of both at a time."""
    if 0 in shape:
        return False
    if not shape:
        return not torch.equal(first.whole(), second.whole(first.dtype))
    row_bytes = math.prod(shape[1:]) * max(first.dtype.itemsize, second.dtype.itemsize)
    step = max(1, _BUFFER_BYTES // max(row_bytes, 1))
    for begin in range(0, shape[0], step):
        rows = min(step, shape[0] - begin)
        boxes = [torch.empty((rows, *shape[1:]), dtype=first.dtype) for _ in range(2)]
        for source, box in zip((first, second), boxes, strict=True):
            source.read([start[0] + begin, *start[1:]], box)
        if not torch.equal(boxes[0].view(torch.uint8), boxes[1].view(torch.uint8)):
            return True
    return False
