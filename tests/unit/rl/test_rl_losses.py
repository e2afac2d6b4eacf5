"""Policy losses over rows against loops over samples in fp64, however samples are cut; properties; refusals."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2x import rl
from fsdp2x.sequence import pack_samples
from policies import Rollout, draw_rollouts, plain_loss, rows_of

SETTINGS = {"grpo": dataclasses.replace(rl.GRPO, kl_weight=0.1), "dapo": rl.DAPO}


def losses(rollouts, cut, which, **given_):
    """Loss, its gradients by sample, and the other numbers, of rollouts cut into ranks of rows of samples."""
    rows = rows_of(rollouts, cut)
    tokens = [[rl.RowTokens(row) for row in rank] for rank in rows]
    whole = rl.count_step(row for rank in tokens for row in rank)
    count = dataclasses.replace(whole, ranks=len(cut))
    leaves = [rollout.logp.clone().requires_grad_() for rollout in rollouts]
    totals = torch.zeros(4, dtype=torch.float64)
    for packed, of_rank in zip(rows, tokens, strict=True):
        for row, part in zip(packed, of_rank, strict=True):
            place = Rollout.placer(row)
            scores = rl.Scores(place(leaves), place([rollout.entropy for rollout in rollouts]), {})
            values = {name: place([getattr(r, name) for r in rollouts]) for name in ("old", "reference", "weights")}
            values |= {name: value for name, value in given_.items() if name in values}
            advantages = torch.tensor([r.advantage for r in rollouts], dtype=torch.float64)
            found = rl.policy_loss(scores, part, advantages, count, which, **values)
            (found.loss / len(cut)).backward()
            numbers = [*found[:3], found.entropy]
            totals += torch.stack([one.detach() for one in numbers]) / len(cut)
    return totals, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


@st.composite
def cuts(draw, num_samples):
    """Samples over 1 to 4 ranks, those of a rank over the same number of rows; ranks and rows may be empty."""
    num_ranks, num_rows = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    cut = [[[] for _ in range(num_rows)] for _ in range(num_ranks)]
    for index in draw(st.permutations(range(num_samples))):
        cut[draw(st.integers(0, num_ranks - 1))][draw(st.integers(0, num_rows - 1))].append(index)
    return cut


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=12, deadline=None)
@given(data=st.data(), seed=st.integers(0, 999), num_samples=st.integers(1, 6))
def test_any_cut_is_a_loop_over_samples(name, data, seed, num_samples):
    """Ranks x micro-batches x packing change nothing but rounding."""
    rollouts = draw_rollouts(num_samples, seed)
    totals, grads = losses(rollouts, data.draw(cuts(num_samples)), SETTINGS[name])
    wanted = plain_loss(rollouts, SETTINGS[name])
    torch.testing.assert_close(totals, wanted[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grads, wanted[1], rtol=1e-9, atol=1e-9)


ONE_ROW = [[[0, 1, 2]]]


def test_groups_without_variance_have_exactly_no_gradient():
    rollouts = draw_rollouts(6, seed=2)
    for rollout, advantage in zip(rollouts, rl.group_advantages([0.1] * 3 + [0.7] * 3, [0] * 3 + [1] * 3), strict=True):
        rollout.advantage = float(advantage)
    totals, grads = losses(rollouts, [[[0, 3], [1]], [[2, 5], [4]]], rl.DAPO)
    assert totals[0] == 0 and not any(grad.any() for grad in grads)


@pytest.mark.parametrize(
    ("advantage", "difference", "is_clipped"),
    [(1.0, 0.5, True), (1.0, -0.5, False), (-1.0, -0.5, True), (-1.0, 0.5, False), (0.0, 0.5, False)],
)
def test_clipped_tokens_have_exactly_no_gradient(advantage, difference, is_clipped):
    rollouts = draw_rollouts(1, seed=3)
    rollouts[0].advantage, rollouts[0].old = advantage, rollouts[0].logp - difference
    totals, grads = losses(rollouts, [[[0]]], rl.PolicySettings())
    assert totals[1] == float(is_clipped)
    assert (grads[0] == 0).all() if is_clipped or not advantage else (grads[0][rollouts[0].has_label] != 0).all()


def test_garbage_where_there_is_no_label_is_not_seen():
    rollouts = draw_rollouts(3, seed=6)
    expected = losses(rollouts, ONE_ROW, SETTINGS["grpo"])
    for rollout in rollouts:
        for values in (rollout.old, rollout.reference, rollout.weights):
            values[~rollout.has_label] = math.nan
    got = losses(rollouts, ONE_ROW, SETTINGS["grpo"])
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_ratios_far_away_stay_finite():
    rollouts = draw_rollouts(2, seed=7)
    for sign, rollout in zip((1, -1), rollouts, strict=True):
        rollout.old, rollout.advantage = rollout.logp + sign * 300.0, -1.0
    totals, grads = losses(rollouts, [[[0, 1]]], rl.GRPO)
    assert totals.isfinite().all() and all(grad.isfinite().all() for grad in grads)


def test_an_empty_row_reaches_what_its_scores_came_from():
    row = pack_samples([], pad_to_multiple_of=4)
    part = rl.RowTokens(row)
    count = rl.count_step([part])
    leaf = torch.zeros(1, 4, requires_grad=True)
    found = rl.policy_loss(rl.Scores(leaf * 2, None, {}), part, torch.empty(0), count, old=torch.zeros(1, 4))
    found.loss.backward()
    assert found.loss == 0 and leaf.grad is not None and not leaf.grad.any()
    assert count.tokens == count.samples == 1


def test_a_preset_is_what_its_paper_says():
    """GRPO: arXiv 2402.03300, a mean over samples, epsilon 0.2. DAPO: arXiv 2503.14476, a mean over tokens, 0.28."""
    assert dataclasses.asdict(rl.GRPO) == {"clip": (0.2, 0.2), "mean": "samples", "kl_weight": 0.0}
    assert dataclasses.asdict(rl.DAPO) == {"clip": (0.2, 0.28), "mean": "tokens", "kl_weight": 0.0}


# ---- refusals


@pytest.mark.parametrize(
    ("change", "said"),
    [({"mean": "mean"}, "mean must be 'tokens' or 'samples'"), ({"clip": (1.2, 0.2)}, "clip must be")],
)
def test_settings_that_mean_nothing(change, said):
    with pytest.raises(ValueError, match=said):
        rl.PolicySettings(**change)


@pytest.mark.parametrize(
    ("which", "change", "said"),
    [
        (SETTINGS["grpo"], {"reference": None}, "kl_weight=0.1 needs the reference model's log-probabilities"),
        (rl.GRPO, {"old": torch.zeros(1, 3)}, r"policy_loss: old: expected one value for each .* got shape \[1, 3\]"),
        (rl.GRPO, {"weights": torch.zeros(3)}, "policy_loss: weights: expected one value for each"),
    ],
)
def test_wrong_arguments(which, change, said):
    with pytest.raises(ValueError, match=said):
        losses(draw_rollouts(3, seed=8), ONE_ROW, which, **change)


def test_advantages_that_lack_a_sample():
    part = rl.RowTokens(pack_samples([{"input_ids": [1, 2, 3]}]))
    with pytest.raises(ValueError, match=r"spread: .* got shape \[0\].*samples \[0\]"):
        rl.policy_loss(rl.Scores(torch.zeros(1, 3), None, {}), part, torch.zeros(0), rl.count_step([part]))
