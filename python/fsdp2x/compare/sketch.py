"""Sketches: a few numbers for a tensor, from which the distance of two tensors can be estimated.

A sketch has ``NUM_SIGNS`` sums of all elements, each with random signs that depend on an element's position. The mean
square of the differences of two sketches estimates the squared distance of the tensors (Alon, Matias, and Szegedy 1996,
the "tug of war" sketch). Sums are linear, so the sketches of the shards of a tensor add up to the sketch of the tensor.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

NUM_SIGNS = 16
# After the sums: sum of squares, largest absolute value, and number of elements that are not finite.
NUM_VALUES = NUM_SIGNS + 3
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
    if part.is_floating_point() and not (finite := torch.isfinite(part)).all():
        total[-1] += part.numel() - finite.sum()
        part = torch.where(finite, part, 0)
    first_row, before = divmod(offset, _NUM_COLUMNS)
    after = -(before + part.numel()) % _NUM_COLUMNS
    rows = torch.nn.functional.pad(part, (before, after)).view(-1, _NUM_COLUMNS)
    columns = _column_signs(part.device)
    total[:NUM_SIGNS] += (rows @ columns * _row_signs(first_row, len(rows), part.device)).sum(0)
    total[-3] += part.dot(part)
    total[-2] = torch.maximum(total[-2], part.abs().max())


@functools.cache
def _column_signs(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (_NUM_COLUMNS, NUM_SIGNS), generator=generator, dtype=torch.float64)
    return (2 * signs - 1).to(device)


def _row_signs(first: int, count: int, device: torch.device) -> Tensor:
    """Signs by the bits of a hash of the row (the finalizer of MurmurHash3)."""
    word = (torch.arange(first, first + count, device=device) + 1) & 0xFFFFFFFF
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        word = ((word ^ (word >> 15)) * factor) & 0xFFFFFFFF
    bits = (word ^ (word >> 16)).unsqueeze(1) >> torch.arange(NUM_SIGNS, device=device)
    return (1 - 2 * (bits & 1)).to(torch.float64)


def combine(parts: list[Tensor]) -> Tensor:
    """Returns the sketch of a tensor from the sketches of its shards."""
    stacked = torch.stack(parts)
    total = stacked.sum(0)
    total[-2] = stacked[:, -2].max()
    return total


def distance(a: Tensor, b: Tensor) -> float:
    """Estimates the Euclidean distance of two tensors from their sketches. Infinite if only one is finite."""
    if a[-1] != b[-1]:
        return float("inf")
    return (a[:NUM_SIGNS] - b[:NUM_SIGNS]).square().mean().sqrt().item()


def norm(a: Tensor) -> float:
    """Returns the Euclidean norm of a tensor's finite elements."""
    return a[-3].sqrt().item()
