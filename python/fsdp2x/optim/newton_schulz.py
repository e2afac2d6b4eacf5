"""Orthogonal factors of matrices by Newton-Schulz iterations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def orthogonalize(matrices: Tensor, coefficients: Sequence[tuple[float, float, float]], eps: float) -> Tensor:
    """``U S' V^T`` of matrices ``U S V^T``, with singular values S' near 1, in the dtype of ``matrices``.

    One step for each triple (a, b, c) of ``coefficients``: ``X <- a X + (b G + c G G) X`` with ``G = X X^T``, on the
    smaller side of X, which begins with a Frobenius norm of 1 (Jordan et al., "Muon", 2024). A single matrix goes
    through the products of ``torch.optim.Muon``, and has its bits; several are one batch.

    Args:
        matrices: [m, n] or [k, m, n]; may be overwritten.
        eps: the least norm that is divided by.
    """
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices
    if x.ndim == 2:
        x.div_(x.norm().clamp(min=eps))
        for a, b, c in coefficients:
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    else:
        x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps))
        for a, b, c in coefficients:
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def step_flops(num: int, rows: int, columns: int) -> int:
    """Floating point operations of one step over ``num`` matrices, but for a factor of 2."""
    small, large = sorted((rows, columns))
    return num * small * small * (2 * large + small)
