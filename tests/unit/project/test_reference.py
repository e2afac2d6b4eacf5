"""The comparisons that parity tests rest on: they must see every difference."""

import pytest
import torch

from reference import same


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
