"""Sketches: a few numbers for a tensor, from which the distance of two tensors can be estimated.

A sketch has ``NUM_SIGNS`` sums of all elements, each with random signs that depend on an element's position. The mean
square of the differences of two sketches estimates the squared distance of the tensors (Alon, Matias, and Szegedy 1996,
the "tug of war" sketch). Sums are linear, so the sketches of the shards of a tensor add up to the sketch of the tensor.

The sign of an element is the product of the signs of its row and of its column in a table of ``_NUM_COLUMNS`` columns.
There are four sets of signs for rows, and four for columns with each of them.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

_NUM_SETS = 4
NUM_SIGNS = _NUM_SETS**2
# After the sums: the sum of squares, and the number of elements that are not finite.
NUM_VALUES = NUM_SIGNS + 2
_NUM_COLUMNS = 1024
# Elements that are converted to float64 at once.
_CHUNK_NUMEL = 1 << 20


@torch.no_grad()
def sketch(tensor: Tensor, offset: int = 0) -> Tensor:
    """Returns ``NUM_VALUES`` float64 numbers on the tensor's device. ``offset``: flat index of the first element."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = (flat.to_dense() if flat.is_sparse else flat).detach().reshape(-1)
    total = torch.zeros(NUM_VALUES, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK_NUMEL):
        _add(total, flat[start : start + _CHUNK_NUMEL].to(torch.float64), offset + start)
    return total


def _add(total: Tensor, part: Tensor, offset: int) -> None:
    square = part.dot(part)
    if not square.isfinite():
        finite = part.isfinite()
        total[-1] += part.numel() - finite.sum()
        part = torch.where(finite, part, 0)
        square = part.dot(part)
    total[-2] += square
    first_row, before = divmod(offset, _NUM_COLUMNS)
    after = -(before + part.numel()) % _NUM_COLUMNS
    rows = (F.pad(part, (before, after)) if before or after else part).view(-1, _NUM_COLUMNS)
    folded = _row_signs(first_row, len(rows), part.device) @ rows
    total[:NUM_SIGNS] += (folded.unsqueeze(1) @ _column_signs(part.device)).view(-1)


@functools.cache
def _column_signs(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (_NUM_SETS, _NUM_COLUMNS, _NUM_SETS), generator=generator, dtype=torch.float64)
    return (2 * signs - 1).to(device)


@functools.lru_cache(256)
def _row_signs(first: int, count: int, device: torch.device) -> Tensor:
    """Signs by the bits of a hash of the row (the finalizer of MurmurHash3)."""
    word = (torch.arange(first, first + count, device=device) + 1) & 0xFFFFFFFF
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        word = ((word ^ (word >> 15)) * factor) & 0xFFFFFFFF
    bits = (word ^ (word >> 16)) >> torch.arange(_NUM_SETS, device=device).unsqueeze(1)
    return (1 - 2 * (bits & 1)).to(torch.float64)


def combine(parts: list[Tensor]) -> Tensor:
    """Returns the sketch of a tensor from the sketches of its shards."""
    return torch.stack(parts).sum(0)


def average(parts: list[Tensor], count: int) -> Tensor:
    """Returns the sketch of the sum of tensors divided by ``count``. Its norm is estimated."""
    total = combine(parts)
    mean = total / count
    mean[-2], mean[-1] = mean[:NUM_SIGNS].square().mean(), torch.stack(parts)[:, -1].max()
    return mean


def distance(a: Tensor, b: Tensor) -> float:
    """Estimates the Euclidean distance of two tensors from their sketches. Infinite if only one is finite."""
    if a[-1] != b[-1]:
        return float("inf")
    return (a[:NUM_SIGNS] - b[:NUM_SIGNS]).square().mean().sqrt().item()


def norm(a: Tensor) -> float:
    """Returns the Euclidean norm of a tensor's finite elements."""
    return a[-2].sqrt().item()
