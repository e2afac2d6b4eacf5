"""Causal attention of the last positions to all, by torch's flash kernels for a CPU, which take equal lengths only.

The queries see all keys before them, which needs no mask, and each other, which is causal attention of equal lengths.
With the logarithms ``a`` and ``b`` of the two sums of exponentials, the outputs are added as in ring attention (Liu et
al., 2023): ``l = log(exp(a) + exp(b))`` and ``o = exp(a - l) o_a + exp(b - l) o_b``. The backward of each part takes
``o`` and ``l`` in place of its own."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from fsdp2x.base import torch_private


def takes(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Returns whether the kernels support these tensors."""
    return q.device.type == "cpu" and q.dtype.is_floating_point and q.shape[-1] == v.shape[-1]


class TailAttention(torch.autograd.Function):
    """[samples, heads, queries, dim] -> the same. k, v: [samples, kv heads, keys, dim], more keys than queries."""

    @staticmethod
    def forward(ctx, q, k, v, scale: float | None):
        parts = ctx.parts = _Parts(q, k, scale)
        before, at = parts.split(k), parts.split(v)
        first, a = parts.attend(parts.fold(q), before[0], at[0], is_causal=False)
        second, b = parts.attend(q, parts.repeat(before[1]), parts.repeat(at[1]), is_causal=True)
        first, a = parts.unfold(first), parts.unfold(a)
        log_sums = torch.logaddexp(a, b)
        share = (a - log_sums).exp_().unsqueeze(-1)
        out = torch.lerp(second.to(log_sums.dtype), first.to(log_sums.dtype), share).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, out, log_sums = ctx.saved_tensors
        parts: _Parts = ctx.parts
        before, at = parts.split(k), parts.split(v)
        dq, *first = parts.differentiate(
            parts.fold(grad), parts.fold(q), before[0], at[0], parts.fold(out), parts.fold(log_sums), is_causal=False
        )
        dq_own, *second = parts.differentiate(
            grad, q, parts.repeat(before[1]), parts.repeat(at[1]), out, log_sums, is_causal=True
        )
        dk, dv = (torch.cat((x, parts.sum_groups(y)), dim=2) for x, y in zip(first, second, strict=True))
        return parts.unfold(dq) + dq_own, dk, dv, None


class _Parts:
    """The keys before the queries, and those at them. Heads that share a kv head are queries of one head for the first.

    ``fold``: [samples, heads, queries, ...] -> [samples, kv heads, heads of one * queries, ...].
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, scale: float | None) -> None:
        self.samples, self.heads, self.num, _ = q.shape
        self.kv_heads, self.groups = k.shape[1], q.shape[1] // k.shape[1]
        self.scale = scale

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.split((x.shape[2] - self.num, self.num), dim=2)

    def fold(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(self.samples, self.kv_heads, self.groups * self.num, *x.shape[3:])

    def unfold(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(self.samples, self.heads, self.num, *x.shape[3:])

    def repeat(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.groups == 1 else x.repeat_interleave(self.groups, dim=1)

    def sum_groups(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.groups == 1 else x.unflatten(1, (self.kv_heads, self.groups)).sum(2)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool):
        return torch_private.cpu_flash(q, k, v, 0.0, is_causal, scale=self.scale)

    def differentiate(self, grad, q, k, v, out, log_sums, is_causal: bool):
        return torch_private.cpu_flash_backward(grad, q, k, v, out, log_sums, 0.0, is_causal, scale=self.scale)
