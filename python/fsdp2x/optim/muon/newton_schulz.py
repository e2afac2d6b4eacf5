"""Orthogonalizes matrices by Newton-Schulz iterations, plain or on the Gram matrix, and counts their cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

Triples = Sequence[tuple[float, float, float]]
METHODS = ("standard", "gram")

# Steps of the Gram iteration until it starts again: 2, then 3 each (Zhang, Amsel, Chen, and Dao, 2026, for 5 steps).
# Rounding makes eigenvalues of the Gram matrix negative, and further steps would amplify them.
_FIRST_PART, _PART = 2, 3


def orthogonalize(matrices: Tensor, coefficients: Triples, eps: float, method: str = "standard") -> Tensor:
    """``U S' V^T`` of matrices ``U S V^T``, with singular values S' near 1, in the dtype of ``matrices``.

    Each triple (a, b, c) of ``coefficients`` makes one step: ``X <- a X + (b G + c G G) X`` with ``G = X X^T``, on the
    smaller side of X. X begins with a Frobenius norm of 1 (Jordan et al., "Muon", 2024). A single matrix uses the
    products of ``torch.optim.Muon``, and has its bits. Several matrices are one batch.

    Args:
        matrices: [m, n] or [k, m, n]; may be overwritten.
        eps: the least norm that is divided by.
        method: "gram" computes the same polynomial on G where that takes fewer operations, see ``uses_gram``.
    """
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices
    iterate = _iterate_gram if method == "gram" and uses_gram(x.size(-2), x.size(-1), len(coefficients)) else _iterate
    x = iterate(x, coefficients, eps)
    return x.mT if is_tall else x


def _normalize(x: Tensor, eps: float) -> Tensor:
    return x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps) if x.ndim == 3 else x.norm().clamp(min=eps))


def _iterate(x: Tensor, coefficients: Triples, eps: float) -> Tensor:
    x = _normalize(x, eps)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _iterate_gram(x: Tensor, coefficients: Triples, eps: float) -> Tensor:
    """The same polynomial as products of Q with X: ``Z = b G + c G G``, ``Q <- Q (a + Z)``, ``G <- (a + Z) G (a + Z)``.

    This is Gram Newton-Schulz with its restart (Zhang, Amsel, Chen, and Dao, "Gram Newton-Schulz", 2026).
    For bfloat16 matrices it iterates in float16. After the norm is 1, its range is enough, and it rounds 8 times finer.
    Most CPUs emulate 16-bit products, so they iterate in float32.
    """
    dtype, is_short = x.dtype, x.dtype is torch.bfloat16
    x = _normalize(x.float() if is_short else x, eps)
    x = x.half() if is_short and x.device.type != "cpu" else x
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for begin, end in _parts(len(coefficients)):
        part = coefficients[begin:end]
        gram = x @ x.mT
        transform = gram
        for step, (a, b, c) in enumerate(part):
            z = add_product(gram, gram, gram, beta=b, alpha=c)
            if step + 1 < len(part):
                half = add_product(gram, gram, z, beta=a)
                gram = add_product(half, z, half, beta=a)
            if step > 0:
                transform = add_product(transform, transform, z, beta=a)
            else:
                transform = z
                transform.diagonal(dim1=-2, dim2=-1).add_(a)
        x = transform @ x
    return x.to(dtype)


def _parts(steps: int) -> list[tuple[int, int]]:
    """The first and the last step (exclusive) of each part of the Gram iteration."""
    begins = [0, *range(_FIRST_PART, steps, _PART)]
    return list(itertools.pairwise([*begins, steps]))


def uses_gram(rows: int, columns: int, steps: int) -> bool:
    """Whether "gram" iterates on the Gram matrix: not for square or small matrices, where it gains nothing."""
    small = min(rows, columns)
    return small >= _LEAST_GRAM_SIDE and _gram_flops(rows, columns, steps) < _standard_flops(rows, columns, steps)


# Below it the additional products cost more to start than they save.
_LEAST_GRAM_SIDE = 64


def flops(num: int, rows: int, columns: int, steps: int, method: str) -> int:
    """Multiplications and additions, each pair counted once, of ``num`` matrices."""
    is_gram = method == "gram" and uses_gram(rows, columns, steps)
    return num * (_gram_flops if is_gram else _standard_flops)(rows, columns, steps)


def _standard_flops(rows: int, columns: int, steps: int) -> int:
    small, large = sorted((rows, columns))
    return steps * small * small * (2 * large + small)


def _gram_flops(rows: int, columns: int, steps: int) -> int:
    """Each part has two products with X and, over its steps, four on G for each but three."""
    small, large = sorted((rows, columns))
    return small * small * sum(2 * large + (4 * (end - begin) - 3) * small for begin, end in _parts(steps))
