"""Sketches add up over shards, estimate distances, and count what is not finite."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2x.compare.sketch import combine, distance, norm, sketch


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 300), st.lists(st.integers(0, 40), max_size=3))
def test_shards_add_up(rows, columns, cuts):
    full = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    edges = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    parts = [sketch(full[start:end], start * columns) for start, end in zip(edges, edges[1:], strict=False)]
    torch.testing.assert_close(combine(parts), sketch(full), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("numel", [20, 1000, 30_000])
def test_distances_are_estimated(numel):
    torch.manual_seed(0)
    ratios = []
    for _ in range(50):
        full, noise = torch.randn(numel), 1e-3 * torch.randn(numel)
        ratios.append(distance(sketch(full), sketch(full + noise)) / noise.norm().item())
    assert 0.9 < sum(ratios) / 50 < 1.1
    assert min(ratios) > 0.5 and max(ratios) < 1.6


def test_places_matter():
    full = torch.arange(4000.0)
    swapped = full.clone()
    swapped[1], swapped[3000] = full[3000], full[1]
    assert distance(sketch(full), sketch(swapped)) > 1000
    assert norm(sketch(full)) == norm(sketch(swapped))


def test_only_equal_numbers_of_nan_are_near():
    full = torch.ones(8)
    damaged = full.index_fill(0, torch.tensor([3]), float("nan"))
    assert distance(sketch(full), sketch(damaged)) == float("inf")
    assert distance(sketch(damaged), sketch(damaged)) == 0
