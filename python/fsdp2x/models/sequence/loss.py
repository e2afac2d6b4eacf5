"""Computes the mean loss over all label tokens of a step, and log-probabilities without copies of the logits.

Ranks and micro-batches hold different numbers of label tokens, so a mean of means is wrong. Here every token has the
weight ``1 / num_tokens`` with ``num_tokens`` counted over all ranks and micro-batches of the step.

``RowSums`` and ``RowGradients`` take rows of scores whose columns come tile by tile. For scores z of a row, with m
their maximum and S = sum(exp(z - m)):

    log p(y) = (z_y - m) - log S
    H        = log S - sum(exp(z - m) (z - m)) / S
    d log p(y) / dz = [y] - p        dH / dz = -p (log p + H)        p = exp(z - m) / S

Both sums have terms of one sign, so nothing cancels. Callers own all memory. Tiles are consumed in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from fsdp2x.base.arguments import checked
from fsdp2x.models.sequence.packing import IGNORE

_CHUNK_TOKENS = 1024


@checked
def count_label_tokens(
    next_labels: torch.Tensor | Iterable[torch.Tensor], *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Counts label tokens of one optimizer step over all ranks: a float64 scalar. Collective.

    If it is zero, no rank has a label. Leave such a step out, because AdamW moves parameters whose gradient is zero.

    Args:
        next_labels: int64 labels of this rank, already shifted, -100 for none, of one micro-batch or an iterable of all
            micro-batches of the step. Slices of sequence-parallel ranks count their own.
        group: ranks over which gradients are averaged. Default: all.

    Raises:
        ValueError: there are no micro-batches.
    """
    labels = [next_labels] if isinstance(next_labels, torch.Tensor) else list(next_labels)
    if not labels:
        raise ValueError(
            "count_label_tokens: no micro-batches. A rank without samples passes the labels of an empty bin."
        )
    count = torch.stack([(part != IGNORE).sum() for part in labels]).sum().to(torch.float64)
    if dist.is_initialized():
        dist.all_reduce(count, group=group)
    return count


@checked
def token_mean_loss(
    logits: torch.Tensor,
    next_labels: torch.Tensor,
    num_tokens: torch.Tensor | float,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Computes this rank's part of the mean cross-entropy over ``num_tokens``, for gradients averaged over ranks.

        num_tokens = count_label_tokens(row.next_labels for row in rows)
        for i, row in enumerate(rows):
            with fsdp2x.accumulate(model, last=i == len(rows) - 1):
                token_mean_loss(model(**row.inputs).logits, row.next_labels, num_tokens).backward()

    The result is ``sum of this rank's token losses * ranks / num_tokens``. The mean over ranks that ``fully_shard``
    makes of the gradients cancels ``ranks``, and gradients of micro-batches add up. ``mean_over_ranks`` of the losses,
    summed over micro-batches, is the loss. Without labels the result is zero and still reaches every parameter.

    Args:
        logits: [..., tokens, vocabulary], any floating dtype. The loss is computed in fp32.
        next_labels: [..., tokens], int64, already shifted, -100 for none.
        num_tokens: result of ``count_label_tokens`` for the step.
        group: ranks over which gradients are averaged. Default: all.
        temperature: a positive number.

    Returns:
        A scalar.
    """
    return mean_of_tokens(token_log_probs(logits, next_labels, temperature=temperature), num_tokens, group=group)


@checked
def mean_of_tokens(
    log_probs: torch.Tensor, num_tokens: torch.Tensor | float, *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Returns what :func:`token_mean_loss` does, of log-probabilities that ``fsdp2x.rl.score`` computed without logits.

    Args:
        log_probs: [..., tokens], zero where there is no label.
        num_tokens: result of ``count_label_tokens`` for the step.
        group: ranks over which gradients are averaged. Default: all.

    Returns:
        A scalar.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    num_tokens = num_tokens + (num_tokens == 0)  # zero times 1, not NaN, without labels
    share = ranks / num_tokens if isinstance(num_tokens, float | int) else (ranks / num_tokens).to(log_probs)
    return -log_probs.sum() * share


@checked
@torch.no_grad()
def mean_over_ranks(value: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Returns the mean of a scalar over the ranks of ``group`` (default: all), detached. Collective."""
    mean = value.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size(group)
    return mean


@checked
def token_log_probs(
    logits: torch.Tensor,
    next_labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = _CHUNK_TOKENS,
) -> torch.Tensor:
    """Returns ``log_softmax(logits / temperature)`` at the labels, of their shape, zero where the label is -100.

    It computes in fp32 (fp64 for fp64 logits), in chunks of tokens, forward and backward. So it needs ``chunk_tokens``
    fp32 rows in addition to the logits and their gradient. ``fsdp2x.rl.score`` needs no logits at all.

    Args:
        logits: [..., vocabulary].
        next_labels: [...], int64.
        temperature: a positive number.
        chunk_tokens: number of tokens per chunk.

    Raises:
        ValueError: shapes do not match, the temperature is not positive, or on a CPU a label is outside of the
            vocabulary (on a device its log-probability is NaN, to avoid a synchronization).
    """
    check_temperature(temperature)
    if logits.shape[:-1] != next_labels.shape:
        raise ValueError(
            f"logits of shape {list(logits.shape)} do not belong to labels of shape {list(next_labels.shape)}"
        )
    if next_labels.device.type == "cpu":
        check_labels(next_labels, logits.shape[-1])
    return _FromLogits.apply(logits, next_labels, 1.0 / temperature, chunk_tokens)


def check_temperature(temperature: float) -> None:
    """Raises ``ValueError`` unless the temperature is positive."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def check_labels(labels: torch.Tensor, num_tokens: int) -> int:
    """Returns the number of labeled positions. Synchronizes with the device."""
    has_label = labels != IGNORE
    wrong = has_label & ((labels < 0) | (labels >= num_tokens))
    num_labels, num_wrong = torch.stack((has_label.sum(), wrong.sum())).tolist()
    if num_wrong:
        raise ValueError(
            f"{num_wrong} labels are outside of the vocabulary of {num_tokens} tokens, the first is "
            f"{int(labels[wrong][0])}. Use {IGNORE} for positions without a label."
        )
    return num_labels


class _FromLogits(torch.autograd.Function):
    """Computes log-probabilities by chunks of rows. Each chunk is one tile of all columns."""

    @staticmethod
    def forward(ctx, logits, labels, scale: float, chunk: int):
        rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        sums = RowSums.start(rows.shape[0], rows, _wide(rows.dtype), entropy=False)
        for part, scores in _chunks(rows, chunk, scale):
            sums.rows(part).add(scores, targets[part], 0, None)
        ctx.save_for_backward(logits, labels, sums.highest, sums.total)
        ctx.scale, ctx.chunk = scale, chunk
        return torch.where(targets == IGNORE, 0.0, sums.log_probs).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs):
        logits, labels, highest, total = ctx.saved_tensors
        rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        grad_log_probs = torch.where(targets == IGNORE, 0.0, grad_log_probs.reshape(-1))
        gradients = RowGradients.of(highest, total, grad_log_probs, None, None, ctx.scale)
        result = torch.empty_like(rows)
        for part, scores in _chunks(rows, ctx.chunk, ctx.scale):
            gradients.rows(part).apply_(scores, targets[part], 0, None)
            result[part] = scores
        return result.view(logits.shape), None, None, None


def _chunks(rows: torch.Tensor, chunk: int, scale: float) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields chunks of rows times ``scale`` in the wide dtype, one after another in the same memory."""
    memory = torch.empty(min(chunk, rows.shape[0]), rows.shape[1], dtype=_wide(rows.dtype), device=rows.device)
    for start in range(0, rows.shape[0], chunk):
        part = slice(start, min(start + chunk, rows.shape[0]))
        yield part, memory[: part.stop - start].copy_(rows[part]).mul_(scale)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the compute dtype: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(slots=True, eq=False)
class RowSums:
    """Running statistics of rows: enough for log-probabilities, entropies and a backward that recomputes the scores.

    ``highest``, ``total``, ``label_score`` and, for entropies, ``weighted`` have one value per row, in the scores'
    dtype.
    """

    highest: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor | None
    label_score: torch.Tensor

    @classmethod
    def start(cls, num_rows: int, like: torch.Tensor, dtype: torch.dtype, *, entropy: bool) -> RowSums:
        """Returns statistics of no columns, on the device of ``like``."""
        zeros = [torch.zeros(num_rows, dtype=dtype, device=like.device) for _ in range(3)]
        # Half the lowest value, because its difference to any score is finite and its exponential is zero.
        highest = torch.full_like(zeros[0], torch.finfo(dtype).min / 2)
        # A label in no tile must not look like one of score 0.
        return cls(highest, zeros[0], zeros[1] if entropy else None, zeros[2].fill_(torch.nan))

    def rows(self, part: slice) -> RowSums:
        """Returns the same statistics for a part of the rows, in the same memory."""
        weighted = None if self.weighted is None else self.weighted[part]
        return RowSums(self.highest[part], self.total[part], weighted, self.label_score[part])

    def add(self, scores: torch.Tensor, labels: torch.Tensor, first: int, spare: torch.Tensor | None) -> None:
        """Adds a tile of the vocabulary, which starts at ``first``. Overwrites ``scores`` and ``spare``.

        Both are [rows, words of the tile]. Entropies need ``spare``. ``labels`` are [rows]. Labels of other tiles are
        left out.
        """
        inside, places = _find(labels, first, scores.shape[1])
        found = scores.gather(1, places).squeeze(1)
        self.label_score.copy_(torch.where(inside, found, self.label_score))
        highest = torch.maximum(self.highest, scores.amax(1))
        shift = self.highest - highest
        scores.sub_(highest.unsqueeze(1))
        if self.weighted is None:
            exps = scores.exp_()
        else:
            assert spare is not None, "entropies need a second tile"
            exps = torch.exp(scores, out=spare)
            self.weighted.add_(shift * self.total).mul_(shift.exp())
            _clamp(scores)
            self.weighted.add_(scores.mul_(exps).sum(1))
        self.total.mul_(shift.exp()).add_(exps.sum(1))
        self.highest.copy_(highest)

    @property
    def log_probs(self) -> torch.Tensor:
        return self.label_score - self.highest - self.total.log()

    @property
    def entropies(self) -> torch.Tensor:
        assert self.weighted is not None, "started without entropies"
        return self.total.log() - self.weighted / self.total


@dataclass(slots=True, eq=False)
class RowGradients:
    """Numbers that turn scores into their gradient: a few per row, made once from the gradients of the results.

    ``scale`` multiplies the gradient. If scores are logits times ``scale``, the
    gradient of the logits is ``scale`` times that of the scores.
    """

    highest: torch.Tensor
    constant: torch.Tensor
    slope: torch.Tensor | None
    of_label: torch.Tensor | None

    @classmethod
    def of(
        cls,
        highest: torch.Tensor,
        total: torch.Tensor,
        grad_log_probs: torch.Tensor | None,
        grad_entropies: torch.Tensor | None,
        entropies: torch.Tensor | None,
        scale: float,
    ) -> RowGradients:
        """Makes them from gradients [rows], one of which may be None, and the final :class:`RowSums`."""
        of_label = None if grad_log_probs is None else grad_log_probs * scale
        constant = torch.zeros_like(total) if of_label is None else -of_label
        slope = None
        if grad_entropies is not None:
            assert entropies is not None, "gradients of entropies need the entropies"
            slope = -grad_entropies * scale
            constant = constant + slope * (entropies - total.log())
            slope = slope / total
        return cls(highest, constant / total, slope, of_label)

    def rows(self, part: slice) -> RowGradients:
        """Returns the same numbers for a part of the rows."""
        slope = None if self.slope is None else self.slope[part]
        of_label = None if self.of_label is None else self.of_label[part]
        return RowGradients(self.highest[part], self.constant[part], slope, of_label)

    def apply_(self, scores: torch.Tensor, labels: torch.Tensor, first: int, spare: torch.Tensor | None) -> None:
        """Replaces ``scores`` of a tile, as in `RowSums.add`, by their gradient."""
        scores.sub_(self.highest.unsqueeze(1))
        if self.slope is None:
            scores.exp_().mul_(self.constant.unsqueeze(1))
        else:
            assert spare is not None, "gradients of entropies need a second tile"
            exps = torch.exp(scores, out=spare)
            _clamp(scores)
            scores.mul_(self.slope.unsqueeze(1)).add_(self.constant.unsqueeze(1)).mul_(exps)
        if self.of_label is not None:
            inside, places = _find(labels, first, scores.shape[1])
            scores.scatter_add_(1, places, torch.where(inside, self.of_label, 0.0).unsqueeze(1))


def _find(labels: torch.Tensor, first: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns which labels are in the columns, and a valid place [rows, 1] for each."""
    local = labels - first
    inside = (local >= 0) & (local < num_columns)
    return inside, local.clamp(0, num_columns - 1).unsqueeze(1)


def _clamp(differences: torch.Tensor) -> None:
    """Clamps, so that scores of -inf (excluded tokens) add 0, not 0 times infinity: exp(-1e4) is also 0."""
    differences.clamp_(min=-1e4)
