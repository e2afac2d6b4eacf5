"""Whole tensors that are made of others by stacking, joining, cutting and turning, none of them in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from fsdp2x.io.formats.tensors import BUFFER_BYTES, LoadedTensor, Source


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
    limit_numel = max(1, BUFFER_BYTES // max(first.dtype.itemsize, second.dtype.itemsize))
    for offset, sizes in row_boxes(shape, limit_numel):
        boxes = [torch.empty(sizes, dtype=first.dtype) for _ in range(2)]
        for source, box in zip((first, second), boxes, strict=True):
            source.read([a + b for a, b in zip(start, offset, strict=True)], box)
        # Bits, of which those of a NaN are equal, too.
        if not torch.equal(*(box.view(-1).view(torch.uint8) for box in boxes)):
            return True
    return False


def row_boxes(shape: Sequence[int], limit_numel: int) -> Iterator[tuple[list[int], list[int]]]:
    """Boxes (start, shape) of at most ``limit_numel`` elements that follow each other in row-major order."""
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
