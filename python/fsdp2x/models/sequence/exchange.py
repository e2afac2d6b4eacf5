"""Exchanges of ranks that share sequences, around attention: heads for positions, and keys and values.

Ulysses (Jacobs et al., 2023) exchanges heads for positions::

    rank r holds [rows, all heads, its positions]  --to_heads-->  [rows, its heads, all positions]
                                                                        | attention
    rank r holds [rows, its positions, all heads] <--to_positions-- [rows, all positions, its heads]

One ``all_to_all_single`` carries queries, keys and values together, another the result. Backward makes the same two in
the other direction.

Context parallelism gathers keys and values: each rank has the queries of its positions only, and attends to all keys
(Grattafiori et al., 2024, section 3.3.2). One all-gather carries keys and values before kv heads are repeated, and in
backward one reduce-scatter the sums of their gradients. With both, heads are exchanged first: "all positions" above are
then those of a context rank's part, and each rank gathers its own heads only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from fsdp2x.models.sequence.layout import Peers, SequenceLayout
from fsdp2x.models.sequence.varlen import Rules, attend


@dataclass(frozen=True)
class HeadPlan:
    """Which heads each of ``size`` ranks computes; kv heads travel to every rank that has one of their query heads."""

    num_heads: int
    num_kv_heads: int
    size: int

    def __post_init__(self) -> None:
        if self.num_heads % self.size:
            fitting = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"Ulysses over {self.size} ranks: {self.num_heads} attention heads cannot be split evenly. The size of "
                f"the group must be one of {', '.join(map(str, fitting))}, or use apply_context_parallel, which splits "
                "no heads"
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


@dataclass(frozen=True)
class ExchangedBytes:
    """Bytes that a rank exchanges in a layer for one micro-batch; backward sends as many again as ``sent``.

    ``kept``: keys and values of all positions, which context parallelism holds from forward to backward.
    """

    sent: int
    kept: int

    @classmethod
    def of(cls, positions: int, heads: tuple[int, int], dims: tuple[int, int], ranks: tuple[int, int], itemsize: int):
        """
        Args:
            positions: of a micro-batch, over all ranks that share it. heads: query and kv heads. dims: of keys and
            queries, and of values. ranks: of Ulysses, and of context parallelism.
        """
        ulysses, context = ranks
        plan = HeadPlan(*heads, ulysses)
        num, kv = plan.num_heads // ulysses, max(stop - start for start, stop in map(plan.kv_heads, range(ulysses)))
        sent = positions // (ulysses * context) * (ulysses - 1) * (num + kv) * sum(dims)
        gathered = positions * kv * sum(dims) if context > 1 else 0
        return cls((sent + gathered // context * (context - 1)) * itemsize, gathered * itemsize)


def attend_over_ranks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: SequenceLayout, rules: Rules
) -> torch.Tensor:
    """Attention of this rank's positions to all positions of their samples.

    Ranks of Ulysses exchange heads, ranks of context parallelism gather keys and values.

    Args:
        query, key, value: [rows, heads or kv heads, positions of this rank, dim]

    Returns:
        [rows, positions of this rank, heads, dim of value]
    """
    shard = layout.shard
    assert shard is not None, "the layout is over ranks"
    peers = shard.ulysses
    plan = HeadPlan(query.shape[1], key.shape[1], peers.size)
    q, k, v = (query, key, value) if peers.size == 1 else _ToHeads.apply(query, key, value, plan, peers)
    if shard.context.size > 1:
        k, v = _GatherKeys.apply(k, v, shard.context)
    if (index := plan.kv_index(peers.rank)) is not None:
        places = torch.tensor(index, device=k.device)
        k, v = k.index_select(1, places), v.index_select(1, places)
    if rules.sinks is not None:
        rules = replace(rules, sinks=rules.sinks[slice(*plan.heads(peers.rank))])
    attended = attend(q, k, v, layout, rules)
    return attended.contiguous() if peers.size == 1 else _ToPositions.apply(attended, peers)


class _GatherKeys(torch.autograd.Function):
    """k, v [rows, kv heads, positions of a context rank, dim] -> the same of all positions, in their order."""

    @staticmethod
    def forward(ctx, key, value, peers: Peers):
        ctx.peers, ctx.dims = peers, (key.shape[-1], value.shape[-1])
        mine = torch.cat((key, value), dim=-1)
        everyone = mine.new_empty(peers.size, *mine.shape)
        dist.all_gather_into_tensor(everyone.view(-1), mine.view(-1), group=peers.group)
        rows, heads, part, _ = mine.shape
        whole = [mine.new_empty(rows, heads, part * peers.size, dim) for dim in ctx.dims]
        for held, places in _chunks(everyone):
            for one, source in zip(whole, held.split(ctx.dims, -1), strict=True):
                one[:, :, places] = source
        return tuple(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        peers: Peers = ctx.peers
        rows, heads, length, _ = grads[0].shape
        everyone = grads[0].new_empty(peers.size, rows, heads, length // peers.size, sum(ctx.dims))
        for held, places in _chunks(everyone):
            for grad, part in zip(grads, held.split(ctx.dims, -1), strict=True):
                part.copy_(grad[:, :, places])
        mine = torch.empty_like(everyone[0])
        dist.reduce_scatter_tensor(mine.view(-1), everyone.view(-1), group=peers.group)
        return *mine.split(ctx.dims, -1), None


def _chunks(everyone: torch.Tensor) -> list[tuple[torch.Tensor, slice]]:
    """Views of the chunks in [context ranks, rows, heads, part, dim], and their places in the sequence."""
    size, chunk = everyone.shape[0], everyone.shape[3] // 2
    found = []
    for rank in range(size):
        for view, place in zip(everyone[rank].split(chunk, 2), (rank, 2 * size - 1 - rank), strict=True):
            found.append((view, slice(place * chunk, (place + 1) * chunk)))
    return found


def _all_to_all(
    send: torch.Tensor,
    shard: Peers,
    send_sizes: list[int] | None = None,
    receive_sizes: list[int] | None = None,
) -> torch.Tensor:
    """1-D tensors; sizes in elements, None for equal parts."""
    received = send.new_empty(send.numel() if receive_sizes is None else sum(receive_sizes))
    dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=shard.group)
    return received


class _Pieces:
    """Sizes and places of what travels between two ranks: [rows, positions, its q | k | v heads of all dims]."""

    def __init__(self, query: torch.Tensor, value: torch.Tensor, plan: HeadPlan, shard: Peers) -> None:
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
    def forward(ctx, query, key, value, plan: HeadPlan, shard: Peers):
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
    def forward(ctx, attended: torch.Tensor, shard: Peers):
        ctx.shard = shard
        rows, length, heads, dim = attended.shape
        part = length // shard.size
        send = attended.unflatten(1, (shard.size, part)).transpose(0, 1).contiguous()
        received = _all_to_all(send.view(-1), shard).view(shard.size, rows, part, heads, dim)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        shard = ctx.shard
        rows, part, heads, dim = grad.shape
        # [rows, part, ranks * heads, dim] -> [ranks, rows, part, heads, dim]
        send = grad.unflatten(2, (shard.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
        received = _all_to_all(send.view(-1), shard).view(shard.size, rows, part, heads // shard.size, dim)
        return received.transpose(0, 1).flatten(1, 2), None
