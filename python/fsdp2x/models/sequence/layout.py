"""Describes where samples are in the rows of a batch, so that attention keeps them apart.

A layout is made once per micro-batch, is immutable, and is passed to every attention call as a keyword argument. So a
recomputation under gradient checkpointing sees the layout of its own forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

# The keyword argument that carries a layout through a model's forward.
KEYWORD = "sequence_layout"

Range = tuple[int, int]


class Peers(NamedTuple):
    """A process group and this rank's place in it; by default this rank alone."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1


class RankPart:
    """The positions of every sequence that each rank of a sequence-parallel group holds.

    Each of the ``context`` ranks holds one part: chunks ``r`` and ``2 * size - 1 - r`` of ``2 * size`` equal chunks.
    Causal attention is then the same work for each. The ranks of ``ulysses`` cut such a part, or without ``context``
    the sequence, into equal slices. The rank in the whole group is ``context.rank * ulysses.size + ulysses.rank``::

        chunk      0    1    2    3          context 2, ulysses 1
        rank       0    1    1    0
    """

    __slots__ = ("group", "rank", "size", "ulysses", "context")

    def __init__(self, everyone: Peers, ulysses: Peers, context: Peers) -> None:
        self.group, self.rank, self.size = everyone
        self.ulysses, self.context = ulysses, context

    @property
    def multiple(self) -> int:
        """Lengths that the ranks can share are multiples of this."""
        context, ulysses = self.context.size, self.ulysses.size
        return ulysses if context == 1 else math.lcm(2 * context, context * ulysses)

    def ranges_of(self, rank: int, length: int) -> list[Range]:
        """Ascending start and stop of the positions that a rank of the whole group holds."""
        context, ulysses = divmod(rank, self.ulysses.size)
        ranges = self.context_ranges(context, length)
        part = length // self.size
        return _narrow(ranges, ulysses * part, (ulysses + 1) * part)

    def context_ranges(self, rank: int, length: int) -> list[Range]:
        """Ascending start and stop of the positions that a context rank's part has."""
        size = self.context.size
        if size == 1:
            return [(0, length)]
        chunk, mirrored = length // (2 * size), 2 * size - 1 - rank
        if mirrored == rank + 1:
            return [(rank * chunk, (mirrored + 1) * chunk)]
        return [(one * chunk, (one + 1) * chunk) for one in (rank, mirrored)]


def _narrow(ranges: list[Range], start: int, stop: int) -> list[Range]:
    """Those of the positions in ``ranges``, counted in their order, that are ``start`` to ``stop``."""
    found, place = [], 0
    for first, last in ranges:
        low, high = max(first, first + start - place), min(last, first + stop - place)
        if low < high:
            found.append((low, high))
        place += last - first
    return found


class SequenceLayout:
    """Samples of ``num_rows`` rows of ``length`` positions. A position outside of any sample is padding.

    ``samples`` are ``(row, start, stop)`` in ascending order without overlap. With ``shard``, a rank computes the
    positions of ``local_ranges`` only, and ranks exchange what attention needs. ``inputs_sliced``: the model gets the
    tokens of this part only. Below, Ulysses:

    ::

        row 0 | sample 0 | sample 1    | sample 2 |pad|     samples = ((0, 0, 5), (0, 5, 12), (0, 12, 17))
              ^ rank 0 of 2      ^ rank 1 of 2              length = 18

    It is a plain class, because every unit of a sharded model would search a dataclass for tensors.

    Raises:
        ValueError: samples overlap, leave their row, are empty, or do not ascend.
    """

    __slots__ = ("num_rows", "length", "samples", "shard", "inputs_sliced", "_flat_pieces")

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
        if shard is not None and length % shard.multiple:
            raise ValueError(f"a length of {length} is not a multiple of {shard.multiple}; pad it first")
        self.num_rows, self.length, self.samples = num_rows, length, tuple(samples)
        self.shard, self.inputs_sliced = shard, inputs_sliced
        self._flat_pieces: FlatPieces | None = None

    def __repr__(self) -> str:
        ranks = "" if self.shard is None else f", rank {self.shard.rank} of {self.shard.size}"
        return f"SequenceLayout({len(self.samples)} samples in {self.num_rows} rows of {self.length}{ranks})"

    def cut(self, shard: RankPart | None, length: int, inputs_sliced: bool) -> SequenceLayout:
        """Returns the same samples in rows padded at the end to ``length``, over the ranks of ``shard``."""
        return SequenceLayout(self.num_rows, length, self.samples, shard, inputs_sliced)

    @property
    def local_ranges(self) -> list[Range]:
        """Ascending start and stop of the positions this rank computes."""
        return [(0, self.length)] if self.shard is None else self.shard.ranges_of(self.shard.rank, self.length)

    @property
    def local_length(self) -> int:
        """How many positions of a row this rank computes."""
        return self.length if self.shard is None else self.length // self.shard.size

    @property
    def query_ranges(self) -> list[Range]:
        """Positions whose queries this rank has in attention. With Ulysses, those of all ranks that exchange heads."""
        if self.shard is None:
            return [(0, self.length)]
        return self.shard.context_ranges(self.shard.context.rank, self.length)

    def take(self, whole: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Returns this rank's positions of a tensor that has all positions along ``dim``."""
        parts = [whole.narrow(dim, start, stop - start) for start, stop in self.local_ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, parts: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """Returns all positions along ``dim``. ``parts``: results of :meth:`take` on each rank, in rank order."""
        assert self.shard is not None, "a layout over ranks"
        pieces = {}
        for rank, part in enumerate(parts):
            ranges = self.shard.ranges_of(rank, self.length)
            pieces |= zip(ranges, part.split([stop - start for start, stop in ranges], dim), strict=True)
        return torch.cat([pieces[place] for place in sorted(pieces)], dim)

    @property
    def num_padding(self) -> int:
        """Padding positions over all rows."""
        return self.num_rows * self.length - sum(stop - start for _, start, stop in self.samples)

    def common_range(self) -> tuple[int, int] | None:
        """Start and stop of the sample if every row has one, at the same place. One attention call then suffices."""
        ranges = {(start, stop) for _, start, stop in self.samples}
        rows = {row for row, _, _ in self.samples}
        if len(ranges) == 1 and len(rows) == len(self.samples) == self.num_rows:
            return ranges.pop()
        return None

    def by_row(self) -> Iterator[list[Range]]:
        """Returns the ranges of each row's samples."""
        ranges: list[list[Range]] = [[] for _ in range(self.num_rows)]
        for row, start, stop in self.samples:
            ranges[row].append((start, stop))
        return iter(ranges)

    def pieces(self, samples: Sequence[Range]) -> list[Piece]:
        """Cuts a row's queries on this rank into runs that see the same keys: (number of queries, range of keys)."""
        pieces: list[Piece] = []
        for first, last in self.query_ranges:
            place = first
            for start, stop in samples:
                low, high = max(start, first), min(stop, last)
                if low < high:
                    pieces += [(low - place, None)] if low > place else []
                    pieces.append((high - low, (start, high)))
                    place = high
            if place < last:
                pieces.append((last - place, None))
        return pieces

    def flat_pieces(self, device: torch.device) -> FlatPieces:
        """:meth:`pieces` of all rows laid end to end; kept for the next layer."""
        if self._flat_pieces is None or self._flat_pieces.queries.device != device:
            queries, keys, place = [], [], 0
            for row, samples in enumerate(self.by_row()):
                for size, seen in self.pieces(samples):
                    if seen is not None:
                        queries.append(torch.arange(place, place + size, device="cpu"))
                        keys.append(torch.arange(*seen, device="cpu") + row * self.length)
                    place += size
            self._flat_pieces = FlatPieces.of(queries, keys, device)
        return self._flat_pieces


# Queries that lie next to each other, and the range of keys of which they are the last positions; None at padding.
Piece = tuple[int, Range | None]


class FlatPieces(NamedTuple):
    """Indices of the positions of all pieces in rows laid end to end, int64, and the pieces' sizes."""

    queries: torch.Tensor
    keys: torch.Tensor
    num_queries: list[int]
    num_keys: list[int]

    @classmethod
    def of(cls, queries: list[torch.Tensor], keys: list[torch.Tensor], device: torch.device) -> FlatPieces:
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        flat_queries, flat_keys = (torch.cat([nothing, *parts]).to(device) for parts in (queries, keys))
        return cls(flat_queries, flat_keys, [len(part) for part in queries], [len(part) for part in keys])


def from_position_ids(position_ids: torch.Tensor, num_rows: int) -> SequenceLayout:
    """Makes a layout from positions of shape [rows or 1, length]. A sample begins where positions do not continue.

    transformers finds packed sequences by the same rule. Positions of several kinds, [kinds, rows, length], show
    samples only if there are four and the first is the text's (Qwen-VL). Otherwise a row is one sample.
    """
    length = position_ids.shape[-1]
    text = _positions_of_text(position_ids)
    if text is None:
        return whole_rows(num_rows, length)
    breaks = (text.diff(dim=-1) != 1).expand(num_rows, -1).cpu()
    samples = []
    for row in range(num_rows):
        starts = [0, *(breaks[row].nonzero().flatten() + 1).tolist()]
        samples += [(row, a, b) for a, b in zip(starts, [*starts[1:], length], strict=True)]
    return SequenceLayout(num_rows, length, samples)


def _positions_of_text(position_ids: torch.Tensor) -> torch.Tensor | None:
    if position_ids.ndim < 3:
        return position_ids
    return position_ids[0] if position_ids.shape[0] == 4 else None


def from_attention_mask(mask: torch.Tensor, position_ids: torch.Tensor | None = None) -> SequenceLayout:
    """Makes a layout from a padding mask [rows, length] and positions as in :func:`from_position_ids`.

    A row is padded at its ends. Between its tokens, a sample begins where positions restart at 0.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        shown = f"of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else f"({type(mask).__name__})"
        raise NotImplementedError(
            f"attention_mask {shown}: attention over layouts takes padding masks of shape "
            "[rows, length] only. Mark samples by restarting position_ids instead of a 4-D mask."
        )
    numbers = mask.detach().cpu()
    mask = numbers.bool()
    if not torch.equal(numbers, mask.to(numbers.dtype)):
        raise ValueError(
            "attention_mask: expected 1 for tokens and 0 for padding, got other values. Mark samples by restarting "
            "position_ids, without an attention_mask."
        )
    positions = None if position_ids is None else _positions_of_text(position_ids)
    if positions is not None:
        positions = positions.detach().cpu().expand(mask.shape)
    samples = []
    for row, tokens in enumerate(mask):
        places = tokens.nonzero().flatten()
        if places.numel() == 0:
            continue
        start, stop = int(places[0]), int(places[-1]) + 1
        if stop - start != places.numel():
            raise ValueError(f"attention_mask: row {row} has padding between tokens. Pad at the ends only.")
        starts = [start]
        if positions is not None:
            starts += ((positions[row, start:stop].diff() != 1).nonzero().flatten() + start + 1).tolist()
            for place in starts[1:]:
                if positions[row, place] != 0:  # transformers takes the row for one sample, but without a mask for two
                    raise ValueError(
                        f"position_ids: row {row} goes from {positions[row, place - 1]} to {positions[row, place]} at "
                        f"column {place}, next to an attention_mask. Restart positions at 0 where a sample begins, "
                        "omit the attention_mask, or pass sequence_layout=SequenceLayout(...)."
                    )
        samples += [(row, a, b) for a, b in zip(starts, [*starts[1:], stop], strict=True)]
    return SequenceLayout(mask.shape[0], mask.shape[1], samples)


def whole_rows(num_rows: int, length: int) -> SequenceLayout:
    """Makes a layout in which every row is one sample without padding."""
    return SequenceLayout(num_rows, length, [(row, 0, length) for row in range(num_rows)])
