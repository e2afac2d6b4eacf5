"""Sketches add up over shards, estimate distances, and count what is not finite."""

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


def test_distances_are_estimated():
    torch.manual_seed(0)
    ratios = []
    for _ in range(50):
        full, noise = torch.randn(3000), 1e-3 * torch.randn(3000)
        ratios.append(distance(sketch(full), sketch(full + noise)) / noise.norm().item())
    assert 0.95 < sum(ratios) / 50 < 1.05
    assert min(ratios) > 0.4 and max(ratios) < 1.8


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
