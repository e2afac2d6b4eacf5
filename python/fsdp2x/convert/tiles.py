"""``Tiled``: a tensor whose boxes lie in several places, such as the shards of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp2x.checkpoint.agree import CheckpointError
from fsdp2x.convert.records import Placement
from fsdp2x.hf.sources import Source


@dataclass
class Tile:
    """``source`` holds the box of its shape that begins at ``start``."""

    start: tuple[int, ...]
    source: Source


class Tiled(Source):
    """The tensor of ``shape`` that ``tiles`` cover; tiles at one place are replicas, of which the first counts.

    Raises:
        CheckpointError: the tiles leave a part out, overlap, or have another dtype.
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: torch.dtype, tiles: Sequence[Tile]) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        boxes = {(tile.start, tile.source.shape): tile for tile in reversed(tiles)}
        self._tiles = [tile for tile in boxes.values() if 0 not in tile.source.shape]
        for tile in self._tiles:
            inside = zip(tile.start, tile.source.shape, self.shape, strict=True)
            if tile.source.dtype != dtype or any(first + size > whole for first, size, whole in inside):
                raise CheckpointError(
                    f"{name}: a shard of shape {list(tile.source.shape)} ({tile.source.dtype}) at {list(tile.start)} "
                    f"does not fit into {list(self.shape)} ({dtype})"
                )
        held, whole = sum(math.prod(tile.source.shape) for tile in self._tiles), math.prod(self.shape)
        if held != whole or self._overlap():
            raise CheckpointError(f"{name}: the shards hold {held} elements of {whole}, or overlap")

    def _overlap(self) -> bool:
        # By rows of the first dim that differs: enough for the regular grids that sharding makes.
        spans = [
            tuple((first, first + size) for first, size in zip(tile.start, tile.source.shape, strict=True))
            for tile in self._tiles
        ]
        spans.sort()
        return any(
            all(a[0] < b[1] and b[0] < a[1] for a, b in zip(one, two, strict=True))
            for one, two in zip(spans, spans[1:], strict=False)
        )

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
