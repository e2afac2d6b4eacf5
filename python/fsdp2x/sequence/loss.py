"""The mean loss over all label tokens of a step, wherever they lie, and log-probabilities without copies of the logits.

Ranks and micro-batches hold different numbers of label tokens, so a mean of means is wrong. Here every token weighs
``1 / num_tokens`` with ``num_tokens`` counted over all ranks and micro-batches of the step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from fsdp2x.sequence.packing import IGNORE

_CHUNK_TOKENS = 1024


def count_label_tokens(
    next_labels: torch.Tensor | Iterable[torch.Tensor], *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Label tokens of one optimizer step over all ranks: a float64 scalar, at least 1. Collective.

    Args:
        next_labels: int64 labels of this rank, already shifted, -100 where there is none; of one micro-batch or an
            iterable of all micro-batches of the step. Slices of sequence-parallel ranks count their own.
        group: the ranks over which gradients are averaged; default all.
    """
    labels = [next_labels] if isinstance(next_labels, torch.Tensor) else list(next_labels)
    if not labels:
        raise ValueError(
            "count_label_tokens: no micro-batches; a rank without samples passes the labels of an empty bin"
        )
    count = sum((part != IGNORE).sum() for part in labels).to(torch.float64)
    if dist.is_initialized():
        dist.all_reduce(count, group=group)
    return count.clamp(min=1.0)


def token_mean_loss(
    logits: torch.Tensor,
    next_labels: torch.Tensor,
    num_tokens: torch.Tensor | float,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """This rank's part of the mean cross-entropy over ``num_tokens``, for gradients that are averaged over ranks.

        num_tokens = count_label_tokens(row.next_labels for row in rows)
        for i, row in enumerate(rows):
            with fsdp2x.accumulate(model, last=i == len(rows) - 1):
                token_mean_loss(model(**row.inputs).logits, row.next_labels, num_tokens).backward()

    ``sum of this rank's token losses * ranks / num_tokens``: the mean over ranks, which ``fully_shard`` makes of the
    gradients, cancels ``ranks``; gradients of the micro-batches add up. ``mean_over_ranks`` of the losses, summed over
    micro-batches, is the loss itself. Without labels the result is zero and still reaches every parameter.

    Args:
        logits: [..., tokens, vocabulary], any floating dtype; the loss is computed in fp32.
        next_labels: [..., tokens], int64, already shifted; -100 where there is none.
        num_tokens: what ``count_label_tokens`` returned for the step.
        group: the ranks over which gradients are averaged; default all.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    total = -token_log_probs(logits, next_labels, temperature=temperature).sum()
    return total * (ranks / num_tokens if isinstance(num_tokens, float | int) else (ranks / num_tokens).to(total))


@torch.no_grad()
def mean_over_ranks(value: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The mean of a scalar over ranks, detached. Collective."""
    mean = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size(group)
    return mean


def token_log_probs(
    logits: torch.Tensor, next_labels: torch.Tensor, *, temperature: float = 1.0, chunk_tokens: int = _CHUNK_TOKENS
) -> torch.Tensor:
    """``log_softmax(logits / temperature)`` at the labels: fp32 of the labels' shape, zero where the label is -100.

    Computed in fp32 over chunks of tokens, forward and backward: beside the logits and their gradient, in their own
    dtype, only ``chunk_tokens`` rows exist at a time.

    Args:
        logits: [..., vocabulary]. next_labels: [...], int64.

    Raises:
        ValueError: shapes that do not belong together, or a temperature that is not positive.
    """
    _check(logits, next_labels.shape, temperature)
    return _LogProbs.apply(logits, next_labels, temperature, chunk_tokens)


def token_entropy(logits: torch.Tensor, *, temperature: float = 1.0, chunk_tokens: int = _CHUNK_TOKENS) -> torch.Tensor:
    """Entropy of ``softmax(logits / temperature)`` in nats: fp32 [...] for logits [..., vocabulary], in chunks."""
    _check(logits, logits.shape[:-1], temperature)
    return _Entropy.apply(logits, temperature, chunk_tokens)


def _check(logits: torch.Tensor, shape: torch.Size, temperature: float) -> None:
    if logits.shape[:-1] != shape:
        raise ValueError(f"logits of shape {list(logits.shape)} do not belong to labels of shape {list(shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, labels: torch.Tensor, temperature: float, chunk: int):
        rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        result = torch.zeros(targets.shape, dtype=torch.float32, device=logits.device)
        norms = torch.empty_like(result)
        for part in _chunks(rows, chunk):
            scores = rows[part].float() / temperature
            norms[part] = scores.logsumexp(-1)
            wanted = scores.gather(-1, targets[part].clamp(min=0).unsqueeze(-1)).squeeze(-1)
            result[part] = torch.where(targets[part] == IGNORE, 0.0, wanted - norms[part])
        ctx.save_for_backward(logits, labels, norms)
        ctx.temperature, ctx.chunk = temperature, chunk
        return result.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        logits, labels, norms = ctx.saved_tensors
        rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        scale = torch.where(targets == IGNORE, 0.0, grad.reshape(-1)) / ctx.temperature
        result = torch.empty_like(rows)
        for part in _chunks(rows, ctx.chunk):
            weights = (rows[part].float() / ctx.temperature - norms[part].unsqueeze(-1)).exp_()
            weights.mul_(-scale[part].unsqueeze(-1))
            weights.scatter_add_(-1, targets[part].clamp(min=0).unsqueeze(-1), scale[part].unsqueeze(-1))
            result[part] = weights
        return result.view(logits.shape), None, None, None


class _Entropy(torch.autograd.Function):
    """H = lse - sum(p * s) with scores s = logits / temperature; dH/ds = -p * (log p + H)."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, temperature: float, chunk: int):
        rows = logits.reshape(-1, logits.shape[-1])
        result = torch.empty(rows.shape[0], dtype=torch.float32, device=logits.device)
        for part in _chunks(rows, chunk):
            logs = (rows[part].float() / temperature).log_softmax(-1)
            result[part] = -(logs.exp() * logs).sum(-1)
        ctx.save_for_backward(logits, result)
        ctx.temperature, ctx.chunk = temperature, chunk
        return result.view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        logits, entropy = ctx.saved_tensors
        rows, scale = logits.reshape(-1, logits.shape[-1]), grad.reshape(-1, 1) / ctx.temperature
        result = torch.empty_like(rows)
        for part in _chunks(rows, ctx.chunk):
            logs = (rows[part].float() / ctx.temperature).log_softmax(-1)
            result[part] = -scale[part] * logs.exp() * (logs + entropy[part].unsqueeze(-1))
        return result.view(logits.shape), None, None


def _chunks(rows: torch.Tensor, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, rows.shape[0], chunk)]
