"""The comparisons that parity tests rest on: they must see every difference."""

import pytest
import torch

import models
from reference import changes, mean_of_ranks, same


def test_same_sees_one_bit():
    value = torch.tensor([1.0, 2.0])
    same([value, {"a": (value, 3, None)}], [value.clone(), {"a": (value, 3, None)}])
    nudged = torch.nextafter(value, torch.tensor(9.0))
    with pytest.raises(AssertionError, match=r"\[1\]\.a: not bitwise equal"):
        same([value, {"a": nudged}], [value, {"a": value}])
    same(nudged, value, rtol=1e-6, atol=0.0)
    with pytest.raises(AssertionError):
        same(value + 1, value, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (None, torch.ones(1)),
        (torch.ones(1), None),
        (torch.ones(1), torch.ones(1, dtype=torch.float64)),
        (torch.ones(2), torch.ones(1)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 2}, {"a": 1}),
        ([1], [1, 2]),
        (1, 2),
    ],
)
def test_same_sees_structure(got, expected):
    with pytest.raises(AssertionError):
        same(got, expected)
    with pytest.raises(AssertionError):
        same([got], [expected], rtol=10.0, atol=10.0)


def test_changes():
    assert changes([1.0, 2.0, 1.5])
    assert not changes([1.0, 1.0]) and not changes([1.0]) and not changes([1.0, 2.0, 1.0])


def test_mean_of_ranks_is_the_mean():
    model = torch.nn.Linear(2, 1, bias=False)
    unused = torch.nn.Linear(1, 1)
    model.add_module("unused", unused)
    losses = mean_of_ranks(model, lambda m, rank: m(torch.full((1, 2), float(rank))).sum(), 3)
    assert torch.equal(model.weight.grad, torch.ones(1, 2)) and unused.weight.grad is None
    assert losses.shape == (3,)


@pytest.mark.parametrize("name", models.NAMES)
def test_models_are_reproducible_and_differ_by_seed(name):
    first, again, other = models.build(name), models.build(name), models.build(name, seed=1)
    same(dict(again.named_parameters()), dict(first.named_parameters()))
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert not torch.equal(models.batch(name, 0)["input_ids"], models.batch(name, 1)["input_ids"])
