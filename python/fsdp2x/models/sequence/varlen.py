"""Block-diagonal causal attention over the samples of a layout, without a mask of the whole row.

Each sample is one call of torch's scaled_dot_product_attention; a sliding window is done in blocks of queries, so that
work and memory grow with the window and not with the square of the sample. Soft caps and attention sinks, which that
function lacks, are computed explicitly in fp32. On CUDA in half precision one variable-length flash call does all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from fsdp2x.models.sequence.layout import SequenceLayout

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
