"""``Tiled``: a tensor whose boxes lie in several places, such as the shards of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp2x.errors import CheckpointError, CorruptFile

from .records import Placement
from .tensors import Source


@dataclass
class Tile:
    """``source`` holds the box of its shape that begins at ``start``."""

    start: tuple[int, ...]
    source: Source


class Tiled(Source):
    """A tensor of ``shape`` of which ``tiles`` hold what is read; whoever makes it has checked that they do."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, tiles: Sequence[Tile]) -> None:
        self.shape, self.dtype, self._tiles = tuple(shape), dtype, tiles

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
    """The tensor that ``tiles`` make up; those at one place are replicas, of which the first counts.

    Raises:
        CorruptFile: the tiles leave a part out, overlap, or have another dtype.
    """
    boxes = {(tile.start, tile.source.shape): tile for tile in reversed(tiles) if 0 not in tile.source.shape}
    for tile in boxes.values():
        if tile.source.dtype != dtype:
            raise CorruptFile(f"{name}: a shard has dtype {tile.source.dtype}, the tensor {dtype}")
    if wrong := covers(shape, list(boxes)):
        raise CorruptFile(f"{name}: the shards {wrong}")
    return Tiled(shape, dtype, list(boxes.values()))


def covers(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str:
    """What is wrong with boxes (start, sizes) that are to make up ``shape``, none of them empty; "" where they do."""
    for start, sizes in boxes:
        fits = len(start) == len(sizes) == len(shape)
        if not fits or any(a < 0 or a + n > whole for a, n, whole in zip(start, sizes, shape, strict=True)):
            return f"of {list(sizes)} at {list(start)} reach beyond {list(shape)}"
    held, whole = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    if held != whole:
        return f"hold {held} elements of {whole}"
    return "overlap, and leave a part out" if _overlap(shape, boxes) else ""


def _overlap(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Sweeps along the dim that is cut into most parts: few boxes are side by side there."""
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


def box_of(
    shape: Sequence[int], sizes: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and shape of the part that the rank at ``coordinate`` of a mesh of ``sizes`` has.

    A dim is cut into chunks of ceil(d/W), axis after axis. A strided shard was cut by a later axis before: FSDP over
    tensor parallelism.

    Raises:
        CheckpointError: a placement that is neither sharded nor replicated.
    """
    start, box = [0] * len(shape), list(shape)
    axes = [axis for axis, one in enumerate(placements) if one.kind != "_StridedShard"]
    axes += [axis for axis, one in reversed(list(enumerate(placements))) if one.kind == "_StridedShard"]
    for axis in axes:
        placement = placements[axis]
        if placement.kind == "Replicate":
            continue
        if placement.kind not in ("Shard", "_StridedShard"):
            raise CheckpointError(f"placement {placement.kind} is not supported")
        dim = placement.dim
        chunk = -(-box[dim] // sizes[axis])
        first = min(chunk * coordinate[axis], box[dim])
        start[dim] += first
        box[dim] = min(chunk, box[dim] - first)
    return tuple(start), tuple(box)
