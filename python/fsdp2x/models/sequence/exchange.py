"""Heads for positions and back: the two all-to-alls around attention under Ulysses sequence parallelism.

::

    rank r holds [rows, all heads, its positions]  --to_heads-->  [rows, its heads, all positions]
                                                                        | attention
    rank r holds [rows, its positions, all heads] <--to_positions-- [rows, all positions, its heads]

One ``all_to_all_single`` carries queries, keys and values together, another the result; backward makes the same two in
the other direction. The scheme is DeepSpeed-Ulysses (Jacobs et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from fsdp2x.models.sequence.layout import RankPart, SequenceLayout
from fsdp2x.models.sequence.varlen import Rules, attend


@dataclass(frozen=True)
class HeadPlan:
    """Which heads each of ``size`` ranks computes; kv heads travel to every rank that has one of their query heads.

    Raises:
        ValueError: the ranks cannot have equally many query heads.
    """

    num_heads: int
    num_kv_heads: int
    size: int

    def __post_init__(self) -> None:
        if self.num_heads % self.size:
            fitting = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"Ulysses over {self.size} ranks: {self.num_heads} attention heads cannot be split evenly; the size of "
                f"the group must be one of {', '.join(map(str, fitting))}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} attention heads are not a multiple of {self.num_kv_heads} kv heads")

    def heads(self, rank: int) -> tuple[int, int]:
        """Start and stop of a rank's query heads."""
        part = self.num_heads // self.size
        return rank * part, (rank + 1) * part

    def kv_heads(self, rank: int) -> tuple[int, int]:
        """Start and stop of the kv heads that a rank's query heads use."""
        group = self.num_heads // self.num_kv_heads
        start, stop = self.heads(rank)
        return start // group, (stop - 1) // group + 1

    def kv_index(self, rank: int) -> list[int] | None:
        """For each of a rank's query heads its place among the rank's kv heads; None when they are equal groups."""
        group = self.num_heads // self.num_kv_heads
        start, stop = self.heads(rank)
        first, last = self.kv_heads(rank)
        index = [head // group - first for head in range(start, stop)]
        num, num_kv = stop - start, last - first
        if num % num_kv == 0 and index == [place // (num // num_kv) for place in range(num)]:
            return None
        return index


def attend_over_ranks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: SequenceLayout, rules: Rules
) -> torch.Tensor:
    """Attention of this rank's positions to all positions of their samples.

    Args:
        query, key, value: [rows, heads or kv heads, positions of this rank, dim]

    Returns:
        [rows, positions of this rank, heads, dim of value]
    """
    shard = layout.shard
    plan = HeadPlan(query.shape[1], key.shape[1], shard.size)
    q, k, v = _ToHeads.apply(query, key, value, plan, shard)
    if (index := plan.kv_index(shard.rank)) is not None:
        places = torch.tensor(index, device=k.device)
        k, v = k.index_select(1, places), v.index_select(1, places)
    if rules.sinks is not None:
        rules = replace(rules, sinks=rules.sinks[slice(*plan.heads(shard.rank))])
    return _ToPositions.apply(attend(q, k, v, layout, rules), shard)


def _all_to_all(
    send: torch.Tensor,
    shard: RankPart,
    send_sizes: list[int] | None = None,
    receive_sizes: list[int] | None = None,
) -> torch.Tensor:
    """1-D tensors; sizes in elements, None for equal parts."""
    received = send.new_empty(send.numel() if receive_sizes is None else sum(receive_sizes))
    dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=shard.group)
    return received


class _Pieces:
    """Sizes and places of what travels between two ranks: [rows, positions, its q | k | v heads of all dims]."""

    def __init__(self, query: torch.Tensor, value: torch.Tensor, plan: HeadPlan, shard: RankPart) -> None:
        self.rows, _, self.part, self.dim = query.shape
        self.value_dim = value.shape[-1]
        self.plan, self.shard = plan, shard
        self.widths = [self._widths(rank) for rank in range(shard.size)]

    def _widths(self, rank: int) -> tuple[int, int, int]:
        start, stop = self.plan.heads(rank)
        first, last = self.plan.kv_heads(rank)
        return (stop - start) * self.dim, (last - first) * self.dim, (last - first) * self.value_dim

    @property
    def sizes_to_heads(self) -> list[int]:
        """Elements for each rank's heads, at this rank's positions."""
        return [self.rows * self.part * sum(widths) for widths in self.widths]

    @property
    def sizes_to_positions(self) -> list[int]:
        """Elements for each rank's positions, of this rank's heads."""
        return [self.rows * self.part * sum(self.widths[self.shard.rank])] * self.shard.size

    def split(self, buffer: torch.Tensor, widths: tuple[int, int, int]) -> list[torch.Tensor]:
        """Views [..., heads, dim] of q, k and v in a buffer whose last dim holds them side by side."""
        dims = (self.dim, self.dim, self.value_dim)
        parts = buffer.split(widths, dim=-1)
        return [part.unflatten(-1, (-1, dim)) for part, dim in zip(parts, dims, strict=True)]

    def by_rank(self, buffer: torch.Tensor) -> list[list[torch.Tensor]]:
        """Views [rows, heads, positions, dim] of each rank's q, k and v in a buffer laid out as sizes_to_heads."""
        views = []
        for flat, widths in zip(buffer.split(self.sizes_to_heads), self.widths, strict=True):
            block = flat.view(self.rows, self.part, sum(widths))
            views.append([one.transpose(1, 2) for one in self.split(block, widths)])
        return views

    def ranges(self, rank: int) -> list[slice]:
        """A rank's heads among all heads of q, k and v."""
        kv = slice(*self.plan.kv_heads(rank))
        return [slice(*self.plan.heads(rank)), kv, kv]


class _ToHeads(torch.autograd.Function):
    """q, k, v [rows, all heads, part, dim] -> the same of this rank's heads and all positions."""

    @staticmethod
    def forward(ctx, query, key, value, plan: HeadPlan, shard: RankPart):
        pieces = ctx.pieces = _Pieces(query, value, plan, shard)
        ctx.num_kv_heads = key.shape[1]
        send = query.new_empty(sum(pieces.sizes_to_heads))
        for rank, views in enumerate(pieces.by_rank(send)):
            for view, source, heads in zip(views, (query, key, value), pieces.ranges(rank), strict=True):
                view.copy_(source[:, heads])
        received = _all_to_all(send, shard, pieces.sizes_to_heads, pieces.sizes_to_positions)
        rows = received.view(shard.size, pieces.rows, pieces.part, -1).transpose(0, 1).flatten(1, 2)
        return tuple(one.transpose(1, 2) for one in pieces.split(rows, pieces.widths[shard.rank]))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        pieces: _Pieces = ctx.pieces
        shard = pieces.shard
        send = grads[0].new_empty(sum(pieces.sizes_to_positions))
        blocks = send.view(shard.size, pieces.rows, pieces.part, -1)
        for view, grad in zip(pieces.split(blocks, pieces.widths[shard.rank]), grads, strict=True):
            # [rows, heads, ranks * part, dim] -> [ranks, rows, part, heads, dim]
            view.copy_(grad.unflatten(2, (shard.size, pieces.part)).permute(2, 0, 3, 1, 4))
        received = _all_to_all(send, shard, pieces.sizes_to_positions, pieces.sizes_to_heads)
        heads = (pieces.plan.num_heads, ctx.num_kv_heads, ctx.num_kv_heads)
        dims = (pieces.dim, pieces.dim, pieces.value_dim)
        results = [received.new_zeros(pieces.rows, num, pieces.part, dim) for num, dim in zip(heads, dims, strict=True)]
        for rank, views in enumerate(pieces.by_rank(received)):
            # A kv head that went to several ranks gets the sum of their gradients.
            for result, view, place in zip(results, views, pieces.ranges(rank), strict=True):
                result[:, place] += view
        return *results, None, None


class _ToPositions(torch.autograd.Function):
    """[rows, all positions, this rank's heads, dim] -> [rows, part, all heads, dim]."""

    @staticmethod
    def forward(ctx, attended: torch.Tensor, shard: RankPart):
        ctx.shard = shard
        return _positions_of(attended, shard)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        shard = ctx.shard
        rows, part, heads, dim = grad.shape
        # [rows, part, ranks * heads, dim] -> [ranks, rows, part, heads, dim]
        send = grad.unflatten(2, (shard.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
        received = _all_to_all(send.view(-1), shard).view(shard.size, rows, part, heads // shard.size, dim)
        return received.transpose(0, 1).flatten(1, 2), None


def _positions_of(attended: torch.Tensor, shard: RankPart) -> torch.Tensor:
    rows, length, heads, dim = attended.shape
    part = length // shard.size
    send = attended.unflatten(1, (shard.size, part)).transpose(0, 1).contiguous()
    received = _all_to_all(send.view(-1), shard).view(shard.size, rows, part, heads, dim)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)
