"""Log-probabilities, entropies and their gradients over rows of scores whose columns come tile by tile.

For scores z of a row, with m their maximum and S = sum(exp(z - m)):

    log p(y) = (z_y - m) - log S
    H        = log S - sum(exp(z - m) (z - m)) / S
    d log p(y) / dz = [y] - p        dH / dz = -p (log p + H)        p = exp(z - m) / S

Both sums have terms of one sign, so nothing cancels. Callers own all memory; tiles are consumed in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, eq=False)
class RowSums:
    """Running statistics of rows: enough for log-probabilities, entropies and a backward that recomputes the scores.

    ``highest``, ``total``, ``label_score`` and, for entropies, ``weighted``: one value a row, in the scores' dtype.
    """

    highest: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor | None
    label_score: torch.Tensor

    @classmethod
    def start(cls, num_rows: int, like: torch.Tensor, dtype: torch.dtype, *, entropy: bool) -> RowSums:
        """Of no columns yet, on the device of ``like``."""
        zeros = [torch.zeros(num_rows, dtype=dtype, device=like.device) for _ in range(3)]
        # Half the lowest value: its difference to any score is finite, and its exponential is zero.
        highest = torch.full_like(zeros[0], torch.finfo(dtype).min / 2)
        # A label that no tile has must not pass for one of score 0.
        return cls(highest, zeros[0], zeros[1] if entropy else None, zeros[2].fill_(torch.nan))

    def rows(self, part: slice) -> RowSums:
        """The same statistics for a part of the rows; shares their memory."""
        weighted = None if self.weighted is None else self.weighted[part]
        return RowSums(self.highest[part], self.total[part], weighted, self.label_score[part])

    def add(self, scores: torch.Tensor, labels: torch.Tensor, first: int, spare: torch.Tensor | None) -> None:
        """Takes the columns ``first`` and on: ``scores`` [rows, columns], overwritten, as is ``spare`` of that shape.

        ``spare`` is needed for entropies only. ``labels``: [rows]; those outside of the columns are another tile's.
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
    """What turns scores into their gradient: a few numbers a row, made once from the gradients of the results.

    ``scale`` (a float, or one value a row) multiplies the gradient: that of the scores is ``scale`` times that of
    logits where scores are logits times ``scale``.
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
        scale: torch.Tensor | float,
    ) -> RowGradients:
        """From gradients [rows], one of which may be None, and what :class:`RowSums` held at its end."""
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
        """The same numbers for a part of the rows."""
        slope = None if self.slope is None else self.slope[part]
        of_label = None if self.of_label is None else self.of_label[part]
        return RowGradients(self.highest[part], self.constant[part], slope, of_label)

    def apply_(self, scores: torch.Tensor, labels: torch.Tensor, first: int, spare: torch.Tensor | None) -> None:
        """Turns ``scores`` [rows, columns from ``first`` on] into their gradient, in place.

        ``spare``, of that shape, is overwritten; needed where entropies have gradients.
        """
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
    """Which labels lie in the columns, and a valid place [rows, 1] for each."""
    local = labels - first
    inside = (local >= 0) & (local < num_columns)
    return inside, local.clamp(0, num_columns - 1).unsqueeze(1)


def _clamp(differences: torch.Tensor) -> None:
    """Scores of -inf (tokens that a model excludes) add 0, not 0 times infinity: the exponential of -1e4 is 0, too."""
    differences.clamp_(min=-1e4)
