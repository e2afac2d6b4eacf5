"""Exchanges of ranks that share sequences, around attention: heads for positions, and keys and values.

Ulysses (Jacobs et al., 2023) exchanges heads for positions::

    rank r holds [rows, all heads, its positions]  --to_heads-->  [rows, its heads, all positions]
                                                                        | attention
    rank r holds [rows, its positions, all heads] <--to_positions-- [rows, all positions, its heads]

One ``all_to_all_single`` carries queries, keys and values together, another the result. Backward makes the same two in
the other direction. If ranks do not divide the kv heads, these are repeated first, as often as needed, so that each
rank gets equally many and those of its query heads.

Context parallelism gathers keys and values: each rank has the queries of its positions only, and attends to all keys
(Grattafiori et al., 2024, section 3.3.2). One all-gather carries keys and values before kv heads are repeated, and in
backward one reduce-scatter the sums of their gradients. With both, heads are exchanged first: "all positions" above are
then those of a context rank's part, and each rank gathers its own heads only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from fsdp2x.models.all_to_all import all_to_all
from fsdp2x.models.sequence.layout import Peers, SequenceLayout
from fsdp2x.models.sequence.varlen import Rules, attend


def exchanged_heads(num_heads: int, num_kv_heads: int, size: int) -> tuple[int, int]:
    """Returns the query heads, and the kv heads after repetition, that each of ``size`` ranks computes.

    Raises:
        ValueError: the ranks do not divide the query heads, or these are not a multiple of the kv heads.
    """
    if num_heads % size:
        fitting = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ValueError(
            f"Ulysses over {size} ranks: {num_heads} attention heads cannot be split evenly. The size of the group "
            f"must be one of {', '.join(map(str, fitting))}, or use apply_context_parallel, which splits no heads"
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} attention heads are not a multiple of {num_kv_heads} kv heads")
    return num_heads // size, math.lcm(num_kv_heads, size) // size


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
        num, kv = exchanged_heads(*heads, ulysses)
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
    num, num_kv = exchanged_heads(query.shape[1], key.shape[1], peers.size)
    q, k, v = query, key, value
    if peers.size > 1:
        repeats = num_kv * peers.size // key.shape[1]
        k, v = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (key, value))
        q, k, v = _to_heads((query, k, v), peers)
    if shard.context.size > 1:
        k, v = _GatherKeys.apply(k, v, shard.context)
    if rules.sinks is not None:
        rules = replace(rules, sinks=rules.sinks[peers.rank * num : (peers.rank + 1) * num])
    attended = attend(q, k, v, layout, rules)
    return attended.contiguous() if peers.size == 1 else _to_positions(attended, peers)


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


def _to_heads(tensors: Sequence[torch.Tensor], peers: Peers) -> list[torch.Tensor]:
    """Tensors [rows, all heads, part, dim] -> the same of this rank's heads and all positions."""
    # [rows, ranks * heads, part, dim] -> [ranks, rows, part, heads * dim]
    by_rank = [x.unflatten(1, (peers.size, -1)).permute(1, 0, 3, 2, 4).flatten(3) for x in tensors]
    received = all_to_all(torch.cat(by_rank, dim=-1), peers.group)
    rows = received.transpose(0, 1).flatten(1, 2)
    parts = rows.split([x.shape[-1] for x in by_rank], dim=-1)
    return [part.unflatten(-1, (-1, x.shape[-1])).transpose(1, 2) for part, x in zip(parts, tensors, strict=True)]


def _to_positions(attended: torch.Tensor, peers: Peers) -> torch.Tensor:
    """[rows, all positions, this rank's heads, dim] -> [rows, part, all heads, dim]."""
    received = all_to_all(attended.unflatten(1, (peers.size, -1)).transpose(0, 1), peers.group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)
