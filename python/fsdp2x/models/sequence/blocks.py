"""Causal attention in blocks of queries whose backward computes the scores again: no mask, no weights are kept.

Queries are the last positions of the keys, which torch's scaled_dot_product_attention computes with a mask of all
queries and keys only. For scores s of a query (scaled, capped), sink t of its head, and the gradient g of its output o:

    l  = log(sum(exp(s)) + exp(t))          p = exp(s - l)          o = p v
    ds = p (g v^T - g o)                    dt = -exp(t - l) (g o)

as in FlashAttention (Dao et al., 2022, appendix B.4). A soft cap c multiplies ds by ``1 - (s / c)^2``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

# Scores of one block: on a CPU they should stay in its caches, elsewhere few and large products are faster.
_SCORES_ON_CPU, _SCORES = 2**21, 2**27
_MIN_QUERIES = 16


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

    @property
    def is_plain(self) -> bool:
        """Whether flash kernels know all but the window."""
        return not self.explicit and self.dropout == 0.0


class BlockAttention(torch.autograd.Function):
    """[samples, heads, queries, dim] -> [samples, heads, queries, dim of value]; sums and softmax in fp32.

    Args:
        q: the last positions of the keys. k, v: [samples, kv heads, keys, dim or another].
        sinks: those of ``rules``, again, for their gradient.
        rules: without dropout.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, rules: Rules):
        shape = (*q.shape[:3], v.shape[-1])
        blocks = _Blocks(q, k, v, rules)
        out = q.new_empty(shape)
        log_sums = torch.empty(q.shape[:3], dtype=blocks.wide, device=q.device)
        for block in blocks:
            scores, _ = blocks.scores(block)
            sink = blocks.sinks_of(block, sinks)
            highest = scores.amax(-1, keepdim=True)
            highest = highest if sink is None else torch.maximum(highest, sink)
            total = scores.sub_(highest).exp_().sum(-1, keepdim=True)
            total = total if sink is None else total + (sink - highest).exp()
            weighted = torch.bmm(scores.to(v.dtype), blocks.v[:, block.keys])
            blocks.of(out, block).copy_(blocks.ungroup(weighted / total, block))
            blocks.of(log_sums.unsqueeze(-1), block).copy_(blocks.ungroup(highest + total.log(), block))
        ctx.save_for_backward(q, k, v, sinks, out, log_sums)
        ctx.rules = rules
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, sinks, out, log_sums = ctx.saved_tensors
        blocks = _Blocks(q, k, v, ctx.rules)
        # Sums over blocks, and over the queries of a kv head, in fp32.
        dk, dv = (torch.zeros_like(x, dtype=blocks.wide) for x in (blocks.k, blocks.v))
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        inner = (grad.to(blocks.wide) * out).sum(-1, keepdim=True)
        for block in blocks:
            keys, values, queries = blocks.k[:, block.keys], blocks.v[:, block.keys], blocks.group(q, block)
            scores, slope = blocks.scores(block)
            weights = scores.sub_(blocks.group(log_sums.unsqueeze(-1), block)).exp_()
            grads = blocks.group(grad, block)
            dv[:, block.keys] += torch.bmm(weights.to(v.dtype).transpose(1, 2), grads)
            of_scores = torch.bmm(grads, values.transpose(1, 2)).to(blocks.wide)
            of_scores.sub_(blocks.group(inner, block)).mul_(weights)
            if slope is not None:
                of_scores.mul_(slope)
            of_scores = of_scores.to(q.dtype)
            blocks.of(dq, block).copy_(blocks.ungroup(torch.bmm(of_scores, keys), block))
            dk[:, block.keys] += torch.bmm(of_scores.transpose(1, 2), queries)
        ds = None
        if sinks is not None:
            taken = (sinks.to(blocks.wide).view(1, -1, 1) - log_sums).exp() * inner.squeeze(-1)
            ds = -taken.sum((0, 2)).to(sinks.dtype)
        dk, dv = dk.mul_(blocks.scale).to(k.dtype).view(k.shape), dv.to(v.dtype).view(v.shape)
        return dq.mul_(blocks.scale), dk, dv, ds, None


class _Block(NamedTuple):
    """Queries of a block, and the keys that any of them sees; the last key is that of the last query."""

    queries: slice
    keys: slice


class _Blocks:
    """The blocks of an attention call; heads that share a kv head are rows of one product."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> None:
        self.q, self.rules = q, rules
        self.k, self.v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        self.groups = q.shape[1] // k.shape[1]
        self.scale = q.shape[-1] ** -0.5 if rules.scale is None else rules.scale
        self.wide = torch.promote_types(q.dtype, torch.float32)

    def __iter__(self) -> Iterator[_Block]:
        (samples, heads, num, _), length = self.q.shape, self.k.shape[1]
        window = self.rules.window or length
        most = _SCORES_ON_CPU if self.q.device.type == "cpu" else _SCORES
        # Under a window longer blocks would compute more scores that nothing sees.
        size = max(min(most // (samples * heads * min(length, 2 * window)), window), _MIN_QUERIES)
        for start in range(0, num, size):
            stop = min(start + size, num)
            last = length - num + stop
            yield _Block(slice(start, stop), slice(max(0, last - (stop - start) - window + 1), last))

    def of(self, tensor: torch.Tensor, block: _Block) -> torch.Tensor:
        """The block's queries of [samples, heads, queries, dim]."""
        return tensor[:, :, block.queries]

    def group(self, tensor: torch.Tensor, block: _Block) -> torch.Tensor:
        """The block's part of [samples, heads, queries, dim] as [samples * kv heads, heads of one * queries, dim]."""
        return self.of(tensor, block).reshape(self.k.shape[0], -1, tensor.shape[-1])

    def ungroup(self, rows: torch.Tensor, block: _Block) -> torch.Tensor:
        """The inverse of :meth:`group`."""
        samples, heads = self.q.shape[:2]
        return rows.view(samples, heads, block.queries.stop - block.queries.start, -1)

    def sinks_of(self, block: _Block, sinks: torch.Tensor | None) -> torch.Tensor | None:
        """One score a row of the products, [samples * kv heads, rows, 1]."""
        if sinks is None:
            return None
        samples, num = self.q.shape[0], block.queries.stop - block.queries.start
        rows = sinks.to(self.wide).view(1, -1, 1, 1).expand(samples, -1, num, 1)
        return rows.reshape(self.k.shape[0], -1, 1)

    def scores(self, block: _Block) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scaled, capped scores with -inf where a query sees nothing, and the derivative of the soft cap."""
        scores = torch.bmm(self.group(self.q, block), self.k[:, block.keys].transpose(1, 2)).to(self.wide)
        scores.mul_(self.scale)
        slope = None
        if (cap := self.rules.softcap) is not None:
            bounded = scores.div_(cap).tanh_()
            slope = 1.0 - bounded * bounded
            scores = bounded.mul_(cap)
        num, seen = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
        rows = scores.view(-1, num, seen)
        if self.rules.window is None:
            # Every query sees all keys except the last ones.
            hidden = torch.ones(num, num, dtype=torch.bool, device=rows.device).triu_(1)
            rows[:, :, seen - num :].masked_fill_(hidden, float("-inf"))
        else:
            distance = torch.arange(seen - num, seen, device=rows.device)[:, None] - torch.arange(
                seen, device=rows.device
            )
            rows.masked_fill_((distance < 0) | (distance >= self.rules.window), float("-inf"))
        return scores, slope
