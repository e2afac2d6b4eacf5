"""Block-diagonal causal attention over the samples of a layout, on one rank or over the ranks of a sequence.

Each sample is one call of torch's scaled_dot_product_attention; a sliding window is done in blocks of queries, so that
work and memory grow with the window and not with the square of the sample. That function lacks queries of the last
positions only, soft caps, and attention sinks: see ``flash.py`` and ``blocks.py``. On CUDA in half precision one
variable-length flash call does all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fsdp2x.models.sequence import flash
from fsdp2x.models.sequence.blocks import BlockAttention, Rules
from fsdp2x.models.sequence.layout import Range, SequenceLayout

_MIN_BLOCK = 64  # queries of one call with a sliding window


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: SequenceLayout, rules: Rules
) -> torch.Tensor:
    """Computes attention inside each sample, with zeros at padding.

    Args:
        query: [rows, heads, positions of the layout's query_ranges, dim].
        key, value: [rows, kv heads, length, dim or another], kv heads divide heads; query head ``h`` uses kv head
            ``h // (heads / kv heads)``.

    Returns:
        [rows, positions of the queries, heads, dim of value]
    """
    if query.is_cuda and flash_takes(query, value, rules):
        from torch.nn.attention.varlen import varlen_attn  # importing it takes more than a second

        return attend_flat(query, key, value, layout, rules, varlen_attn)
    common = layout.common_range()
    if common is not None:
        return _attend_rows(query, key, value, layout, [common], rules).transpose(1, 2)
    rows = zip(query.split(1), key.split(1), value.split(1), layout.by_row(), strict=True)
    parts = [_attend_rows(q, k, v, layout, samples, rules) for q, k, v, samples in rows]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).transpose(1, 2)


def _attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: SequenceLayout,
    samples: list[Range],
    rules: Rules,
) -> torch.Tensor:
    """Rows of the same samples: [rows, heads, positions of the queries, dim of value]."""
    pieces = layout.pieces(samples)
    # One split for all: the backward of a slice would be zeros of the whole row for each sample.
    bounds = [0, *(place for sample in samples for place in sample), layout.length]
    sizes = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    keys, values = (
        {start: part for (start, _), part in zip(samples, x.split(sizes, 2)[1::2], strict=True)} for x in (key, value)
    )
    parts = []
    for q, (_, seen) in zip(query.split([size for size, _ in pieces], 2), pieces, strict=True):
        if seen is None:
            # Padding still hangs on the inputs: a row of nothing but padding must reach every parameter.
            parts.append((q[..., :1] * 0.0).expand(*q.shape[:3], value.shape[-1]))
        else:
            start, num = seen[0], seen[1] - seen[0]
            parts.append(_attend_sample(q, keys[start][:, :, :num], values[start][:, :, :num], rules))
    if all(seen is None for _, seen in pieces):
        # So must the keys, for whose gradients other ranks may wait.
        parts[0] = parts[0] + (key[:, :, :0].sum() + value[:, :, :0].sum())
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attend_sample(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> torch.Tensor:
    """The last positions of samples of one length to all: [samples, heads, queries, dim], as many keys or more."""
    num, length = q.shape[2], k.shape[2]
    sees_all = rules.window is None or length <= rules.window
    if num < length and sees_all and rules.is_plain and flash.takes(q, v):
        return flash.TailAttention.apply(q, k, v, rules.scale)
    if rules.explicit or (num < length and rules.dropout == 0.0):
        return BlockAttention.apply(q, k, v, rules.sinks, rules)
    if num == length and sees_all:
        return _block(q, k, v, rules, None)
    block = num if rules.window is None else max(rules.window, _MIN_BLOCK)
    parts = []
    for start in range(length - num, length, block):
        stop = min(start + block, length)
        first = 0 if rules.window is None else max(0, start - rules.window + 1)
        distance = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(first, stop, device=q.device)
        seen = (distance >= 0) if rules.window is None else (distance >= 0) & (distance < rules.window)
        queries = q[:, :, start - length + num : stop - length + num]
        parts.append(_block(queries, k[:, :, first:stop], v[:, :, first:stop], rules, seen))
    return torch.cat(parts, dim=2)


def _block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules, seen: torch.Tensor | None) -> torch.Tensor:
    """Computes queries against keys. ``seen`` is [queries, keys], or None for causal attention of equal lengths."""
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


# ---- one call for all samples, on CUDA


def flash_takes(query: torch.Tensor, value: torch.Tensor, rules: Rules) -> bool:
    """Returns whether the flash kernel supports these rules on these tensors."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    return half and rules.is_plain and query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0


def attend_flat(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: SequenceLayout,
    rules: Rules,
    kernel: Callable,
) -> torch.Tensor:
    """Does the same as :func:`attend`, in one call of ``kernel``, which has varlen_attn's signature."""
    rows, heads, length, _ = query.shape
    pieces = layout.flat_pieces(query.device)
    out = query.new_zeros(rows * length, heads, value.shape[-1])
    if not pieces.num_queries:
        # Empty sums: the output still depends on all inputs, and no sum of large values can overflow.
        nothing = query[:, :, :0].sum() + key[:, :, :0].sum() + value[:, :, :0].sum()
        return (out + nothing).view(rows, length, heads, -1)
    sizes = (pieces.num_queries, pieces.num_keys)
    # A piece's queries are the last positions of its keys, as the kernel aligns them.
    cu_q, cu_k = (
        torch.tensor([0, *n], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32).to(query.device)
        for n in sizes
    )
    options = {"scale": rules.scale, "window_size": (-1 if rules.window is None else rules.window - 1, 0)}
    if key.shape[1] != heads:
        if "enable_gqa" in inspect.signature(kernel).parameters:
            options["enable_gqa"] = True
        else:
            groups = heads // key.shape[1]
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    indices = (pieces.queries, pieces.keys, pieces.keys)
    q, k, v = (
        x.transpose(1, 2).flatten(0, 1).index_select(0, index)
        for x, index in zip((query, key, value), indices, strict=True)
    )
    attended = kernel(q, k, v, cu_q, cu_k, max(sizes[0]), max(sizes[1]), **options)
    return out.index_copy(0, pieces.queries, attended).view(rows, length, heads, -1)
