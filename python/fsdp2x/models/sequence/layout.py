"""Where the samples lie in the rows of a batch: what attention must know so that no sample sees another.

A layout is made once per micro-batch, is immutable, and travels to every attention call as a keyword argument, so that
a recomputation under gradient checkpointing sees the layout of its own forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

# The keyword argument under which a layout travels through a model's forward.
KEYWORD = "sequence_layout"


class RankPart:
    """The part of the sequence that this rank of a sequence-parallel group holds."""

    __slots__ = ("group", "rank", "size")

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size


class SequenceLayout:
    """Samples of ``num_rows`` rows of ``length`` positions; a position of no sample is padding.

    ``samples`` are ``(row, start, stop)`` in ascending order without overlap. With ``shard``, rank ``r`` of its group
    computes the positions ``r * length / size`` and on, and attention exchanges heads for positions; ``inputs_sliced``
    says that the tokens handed to the model are this part only.

    ::

        row 0 | sample 0 | sample 1    | sample 2 |pad|     samples = ((0, 0, 5), (0, 5, 12), (0, 12, 17))
              ^ rank 0 of 2      ^ rank 1 of 2              length = 18

    A plain class: a dataclass would be searched for tensors by every unit of a sharded model.

    Raises:
        ValueError: samples that overlap, leave their row, are empty, or do not ascend.
    """

    __slots__ = ("num_rows", "length", "samples", "shard", "inputs_sliced", "_flat_indices")

    def __init__(
        self,
        num_rows: int,
        length: int,
        samples: Sequence[tuple[int, int, int]],
        shard: RankPart | None = None,
        inputs_sliced: bool = False,
    ) -> None:
        last_row, last_stop = -1, 0
        for row, start, stop in samples:
            first = 0 if row > last_row else last_stop
            if not (last_row <= row < num_rows and first <= start < stop <= length):
                raise ValueError(
                    f"a layout of {num_rows} rows of {length} positions: sample ({row}, {start}, {stop}) is empty, out "
                    f"of range, or does not follow the one that ends at row {last_row}, position {last_stop}"
                )
            last_row, last_stop = row, stop
        if shard is not None and length % shard.size:
            raise ValueError(f"a length of {length} cannot be cut into {shard.size} equal parts; pad it first")
        self.num_rows, self.length, self.samples = num_rows, length, tuple(samples)
        self.shard, self.inputs_sliced = shard, inputs_sliced
        self._flat_indices: torch.Tensor | None = None

    def __repr__(self) -> str:
        ranks = "" if self.shard is None else f", rank {self.shard.rank} of {self.shard.size}"
        return f"SequenceLayout({len(self.samples)} samples in {self.num_rows} rows of {self.length}{ranks})"

    def cut(self, shard: RankPart | None, length: int, inputs_sliced: bool) -> SequenceLayout:
        """The same samples in rows padded at the end to ``length``, over the ranks of ``shard``."""
        return SequenceLayout(self.num_rows, length, self.samples, shard, inputs_sliced)

    @property
    def local_range(self) -> tuple[int, int]:
        """Start and stop of the positions this rank computes."""
        if self.shard is None:
            return 0, self.length
        part = self.length // self.shard.size
        return self.shard.rank * part, (self.shard.rank + 1) * part

    @property
    def num_padding(self) -> int:
        """Positions of no sample, over all rows."""
        return self.num_rows * self.length - sum(stop - start for _, start, stop in self.samples)

    def common_range(self) -> tuple[int, int] | None:
        """Start and stop when every row holds one sample at the same place: one attention call does them all."""
        ranges = {(start, stop) for _, start, stop in self.samples}
        rows = {row for row, _, _ in self.samples}
        if len(ranges) == 1 and len(rows) == len(self.samples) == self.num_rows:
            return ranges.pop()
        return None

    def by_row(self) -> Iterator[list[tuple[int, int]]]:
        """For each row the ranges of its samples."""
        ranges: list[list[tuple[int, int]]] = [[] for _ in range(self.num_rows)]
        for row, start, stop in self.samples:
            ranges[row].append((start, stop))
        return iter(ranges)

    def flat_indices(self, device: torch.device) -> torch.Tensor:
        """Indices of all samples' positions in the rows laid end to end, int64; kept for the next layer."""
        if self._flat_indices is None or self._flat_indices.device != device:
            parts = [torch.arange(r * self.length + a, r * self.length + b) for r, a, b in self.samples]
            self._flat_indices = (torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)).to(device)
        return self._flat_indices


def from_position_ids(position_ids: torch.Tensor, num_rows: int) -> SequenceLayout:
    """A layout from positions of shape [rows or 1, length]: where one does not follow its neighbour a sample begins.

    The rule transformers uses to find packed sequences. Positions of several kinds, [kinds, rows, length], tell where
    samples begin only when there are four, the first of them the text's (Qwen-VL); else a row is one sample.
    """
    length = position_ids.shape[-1]
    if position_ids.ndim == 3:
        if position_ids.shape[0] != 4:
            return whole_rows(num_rows, length)
        position_ids = position_ids[0]
    breaks = (position_ids.diff(dim=-1) != 1).expand(num_rows, -1).cpu()
    samples = []
    for row in range(num_rows):
        starts = [0, *(breaks[row].nonzero().flatten() + 1).tolist()]
        samples += [(row, a, b) for a, b in zip(starts, [*starts[1:], length], strict=True)]
    return SequenceLayout(num_rows, length, samples)


def from_attention_mask(mask: torch.Tensor) -> SequenceLayout:
    """A layout from a padding mask [rows, length]: one sample a row, padding before or behind it."""
    if mask.ndim != 2:
        raise NotImplementedError(
            f"attention_mask of shape {tuple(mask.shape)}: attention over layouts takes padding masks of shape "
            "[rows, length] only; give samples by restarting position_ids instead of a 4-D mask"
        )
    mask = mask.detach().to(device="cpu", dtype=torch.bool)
    samples = []
    for row, tokens in enumerate(mask):
        places = tokens.nonzero().flatten()
        if places.numel() == 0:
            continue
        start, stop = int(places[0]), int(places[-1]) + 1
        if stop - start != places.numel():
            raise ValueError(f"attention_mask: row {row} has padding between tokens; padding may be at the ends only")
        samples.append((row, start, stop))
    return SequenceLayout(mask.shape[0], mask.shape[1], samples)


def whole_rows(num_rows: int, length: int) -> SequenceLayout:
    """Every row is one sample without padding."""
    return SequenceLayout(num_rows, length, [(row, 0, length) for row in range(num_rows)])
