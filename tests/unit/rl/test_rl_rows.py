"""Samples and tokens of packed rows: where values lie, corrections; advantages of groups."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2x import rl
from fsdp2x.sequence import pack_samples

# Lengths and prompts as in the drawing of fsdp2x/rl/rows.py, then padding.
SAMPLES = [
    {"input_ids": [10, 11, 12, 13, 14], "labels": [-100, -100, -100, 13, 14]},
    {"input_ids": [20, 21, 22], "labels": [-100, -100, 22]},
    {"input_ids": [30, 31], "labels": [-100, -100]},
]


def packed(members=(0, 1)):
    row = pack_samples(SAMPLES, list(members), pad_to_multiple_of=4)
    return row, rl.RowTokens(row)


def test_where_values_of_samples_lie():
    row, tokens = packed()
    assert row.next_labels.tolist() == [[-100, -100, 13, 14, -100, -100, 22, -100]]
    assert tokens.has_label.tolist() == [[False, False, True, True, False, False, True, False]]
    assert tokens.lengths.tolist() == [2, 1]
    assert tokens.spread(torch.tensor([5.0, 7.0, 9.0])).tolist() == [[0, 0, 5, 5, 0, 0, 7, 0]]
    assert tokens.shares().tolist() == [[0, 0, 0.5, 0.5, 0, 0, 1, 0]]


def test_where_values_of_tokens_lie():
    """One for each token, or one for each token of the response: both where the token is predicted."""
    _, tokens = packed()
    of_all = [[0, 0, 0, 1.3, 1.4], torch.tensor([0, 0, 2.2]), [9, 9]]
    of_labels = [[1.3, 1.4], [2.2], []]
    for values in (of_all, of_labels, [of_all[0], of_labels[1], None]):
        made = tokens.align(values)
        torch.testing.assert_close(made, torch.tensor([[0, 0, 1.3, 1.4, 0, 0, 2.2, 0]]))
    with pytest.raises(ValueError, match=r"sample 1 has 3 tokens .* \[2\]"):
        tokens.align([[1.3, 1.4], [1, 2]])


def test_a_sample_without_labels_counts():
    _, tokens = packed((2, 0))
    assert tokens.lengths.tolist() == [0, 2]
    count = rl.count_step([tokens, packed((1,))[1]])
    assert (count.tokens, count.samples, count.ranks) == (3, 3, 1)
    with pytest.raises(ValueError, match="count_step: no rows"):
        rl.count_step([])


# ---- corrections


def test_an_engine_that_reports_nothing_is_trusted():
    _, tokens = packed()
    old = torch.full((1, 8), -1.0, requires_grad=True)
    behaviour = torch.full((1, 8), -2.0)
    behaviour[0, 3] = math.nan
    weights = rl.importance_weights(old, behaviour, tokens, high=2.0)
    assert weights.tolist() == [[0, 0, 2, 1, 0, 0, 2, 0]] and not weights.requires_grad
    broken = torch.full((1, 8), math.nan)
    assert rl.importance_weights(broken, behaviour, tokens)[0, 2].isnan()  # the trainer's own are no such case


def test_wrong_corrections():
    _, tokens = packed()
    zeros = torch.zeros(1, 8)
    with pytest.raises(ValueError, match="high must be positive, got 0"):
        rl.importance_weights(zeros, zeros, tokens, high=0.0)
    with pytest.raises(ValueError, match="importance_weights: behaviour: expected one value"):
        rl.importance_weights(zeros, zeros[0], tokens)


# ---- advantages


@settings(max_examples=20, deadline=None)
@given(
    ids=st.lists(st.sampled_from([3, -7, 2**62, 5]), max_size=12),
    seed=st.integers(0, 99),
)
def test_advantages_are_a_loop_over_groups(ids, seed):
    rewards = torch.randint(0, 3, (len(ids),), generator=torch.Generator().manual_seed(seed)).double() / 10
    got = rl.group_advantages(rewards, ids, epsilon=1e-3)
    expected = torch.zeros(len(ids))
    for index, group in enumerate(ids):
        of_group = rewards[[i for i, other in enumerate(ids) if other == group]]
        if (of_group == of_group[0]).all():
            assert got[index] == 0
            continue
        expected[index] = (rewards[index] - of_group.mean()) / (of_group.std() + 1e-3)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    assert got.dtype == torch.float32


def test_equal_rewards_whose_mean_is_another_number():
    rewards = [0.1] * 3  # their sum over 3 is not 0.1
    assert sum(rewards) / 3 != 0.1
    assert rl.group_advantages([*rewards, 5.0], [1, 1, 1, 2]).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("rewards", "ids", "said"),
    [
        ([1.0, 2.0], [1], r"expected one reward and one group id for every sample, got shapes \[2\] and \[1\]"),
        ([1.0, math.nan], [1, 1], "the reward of sample 1 is nan"),
        ([math.inf], [1], "the reward of sample 0 is inf"),
    ],
)
def test_wrong_rewards(rewards, ids, said):
    with pytest.raises(ValueError, match=f"group_advantages: {said}"):
        rl.group_advantages(rewards, ids)
