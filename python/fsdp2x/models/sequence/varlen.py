"""Block-diagonal causal attention over the samples of a layout, on one rank or over the ranks of a sequence.

Each sample is one call of torch's scaled_dot_product_attention; a sliding window is done in blocks of queries, so that
work and memory grow with the window and not with the square of the sample. Soft caps and attention sinks, which that
function lacks, are computed explicitly in fp32. On CUDA in half precision one variable-length flash call does all.

Under Ulysses (Jacobs et al., 2023) heads are exchanged for positions around attention::

    rank r holds [rows, all heads, its positions]  --to_heads-->  [rows, its heads, all positions]
                                                                        | attention
    rank r holds [rows, its positions, all heads] <--to_positions-- [rows, all positions, its heads]

One ``all_to_all_single`` carries queries, keys and values together, another the result. Backward makes the same two in
the other direction.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fsdp2x.models.sequence.layout import RankPart, SequenceLayout

_MIN_BLOCK = 64  # queries of one call under a sliding window


@dataclass(frozen=True)
class Rules:
    """How scores become weights: ``softmax(softcap(q k^T * scale))`` over the keys a query may see.

    ``window``: a query sees itself and the ``window - 1`` positions before it. ``softcap``: scores become
    ``softcap * tanh(score / softcap)`` (Gemma 2). ``sinks``: [heads], one more score per head that takes weight and
    gives nothing (GPT-OSS).
    """

    scale: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def explicit(self) -> bool:
        return self.softcap is not None or self.sinks is not None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: SequenceLayout, rules: Rules
) -> torch.Tensor:
    """Attention inside each sample; zeros at padding.

    Args:
        query: [rows, heads, length, dim]. key, value: [rows, kv heads, length, dim or another], kv heads divide heads;
            query head ``h`` uses kv head ``h // (heads / kv heads)``.

    Returns:
        [rows, length, heads, dim of value]
    """
    if query.is_cuda and (kernel := flash_kernel()) is not None and flash_takes(query, value, rules):
        return attend_flat(query, key, value, layout, rules, kernel)
    common = layout.common_range()
    if common is not None:
        start, stop = common
        out = _attend_samples(query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop], rules)
        if (start, stop) != (0, layout.length):
            out = F.pad(out, (0, 0, start, layout.length - stop))
        return out.transpose(1, 2)
    rows = []
    for row, ranges in enumerate(layout.by_row()):
        parts, pieces, place = [], [], 0
        for start, stop in [*ranges, (layout.length, layout.length)]:
            pieces += [(False, start - place), (True, stop - start)]
            place = stop
        pieces = [piece for piece in pieces if piece[1] > 0]
        # Of one split: the backward of a slice would be zeros of the whole row for each sample.
        sizes = [size for _, size in pieces]
        cuts = (whole[row : row + 1].split(sizes, dim=2) for whole in (query, key, value))
        for (is_sample, _), q, k, v in zip(pieces, *cuts, strict=True):
            if is_sample:
                parts.append(_attend_samples(q, k, v, rules))
            else:
                # Padding still hangs on the inputs: a row of nothing but padding must reach every parameter.
                parts.append((q[..., :1] * 0.0).expand(*q.shape[:3], v.shape[-1]))
        rows.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).transpose(1, 2)


def _attend_samples(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Samples of one length, [samples, heads, length, dim] -> [samples, heads, length, dim of value]."""
    length = q.shape[2]
    if rules.window is None or length <= rules.window:
        return _block(q, k, v, rules, None)
    block = max(rules.window, _MIN_BLOCK)
    parts = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first = max(0, start - rules.window + 1)
        distance = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(first, stop, device=q.device)
        seen = (distance >= 0) & (distance < rules.window)
        parts.append(_block(q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop], rules, seen))
    return torch.cat(parts, dim=2)


def _block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules, seen: torch.Tensor | None) -> torch.Tensor:
    """Queries against keys; ``seen`` [queries, keys], None for causal attention of equal lengths."""
    if rules.explicit:
        return _explicit(q, k, v, rules, seen)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=seen,
        dropout_p=rules.dropout,
        is_causal=seen is None,
        scale=rules.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _explicit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules, seen: torch.Tensor | None
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if rules.scale is None else rules.scale)
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    if seen is None:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = scores.float().masked_fill(~seen, float("-inf"))
    if rules.sinks is not None:
        sinks = rules.sinks.float().view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return F.dropout(weights.to(v.dtype), p=rules.dropout) @ v


# ---- one call for all samples, on CUDA


@lru_cache(maxsize=1)
def flash_kernel() -> Callable | None:
    """torch's variable-length attention, where this torch has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def flash_takes(query: torch.Tensor, value: torch.Tensor, rules: Rules) -> bool:
    """Whether the flash kernel computes these rules on these tensors."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    plain = not rules.explicit and rules.dropout == 0.0
    return half and plain and query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0


def attend_flat(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: SequenceLayout,
    rules: Rules,
    kernel: Callable,
) -> torch.Tensor:
    """As :func:`attend`, all samples end to end in one call of ``kernel``, which has varlen_attn's signature."""
    rows, heads, length, _ = query.shape
    indices = layout.flat_indices(query.device)
    out = query.new_zeros(rows * length, heads, value.shape[-1])
    if not layout.samples:
        return (out + query.sum() * 0.0).view(rows, length, heads, -1)
    sizes = [stop - start for _, start, stop in layout.samples]
    cu_seqlens = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(query.device)
    options = {"scale": rules.scale, "window_size": (-1 if rules.window is None else rules.window - 1, 0)}
    if key.shape[1] != heads:
        if "enable_gqa" in inspect.signature(kernel).parameters:
            options["enable_gqa"] = True
        else:
            groups = heads // key.shape[1]
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    q, k, v = (x.transpose(1, 2).flatten(0, 1).index_select(0, indices) for x in (query, key, value))
    attended = kernel(q, k, v, cu_seqlens, cu_seqlens, max(sizes), max(sizes), **options)
    return out.index_copy(0, indices, attended).view(rows, length, heads, -1)


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
    assert shard is not None, "the layout is over ranks"
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
