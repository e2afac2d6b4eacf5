"""Policy losses over rows against loops over samples in fp64, however samples are cut; properties; presets by hand."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2x import rl
from fsdp2x.sequence import pack_samples
from policies import Rollout, draw_rollouts, plain_loss, rows_of

SETTINGS = {
    "grpo": dataclasses.replace(rl.GRPO, kl="k3", kl_weight=0.1),
    "dapo": rl.DAPO,
    "dr_grpo": dataclasses.replace(rl.DR_GRPO, max_tokens=9, kl="k2", kl_weight=0.3),
    "gspo": dataclasses.replace(rl.GSPO, clip=(0.1, 0.2)),
    "cispo": dataclasses.replace(rl.CISPO, clip=(0.3, 0.5)),
    "reinforce": dataclasses.replace(rl.REINFORCE, kl="k1", kl_weight=0.2),
    "dual": dataclasses.replace(rl.GRPO, dual_clip=1.5, kl="k3+", kl_weight=0.1, entropy_weight=0.05),
    "gspo_tokens": dataclasses.replace(rl.DAPO, ratio="sequence", clip=(0.05, 0.1), dual_clip=1.2),
    "cispo_sequences": dataclasses.replace(rl.CISPO, ratio="sequence", mean="samples"),
}


def losses(rollouts, cut, which, **given_):
    """Loss, its gradients by sample, and the other numbers, of rollouts cut into ranks of rows of samples."""
    rows = rows_of(rollouts, cut)
    tokens = [[rl.RowTokens(row) for row in rank] for rank in rows]
    whole = rl.count_step(row for rank in tokens for row in rank)
    count = dataclasses.replace(whole, ranks=len(cut))
    leaves = [rollout.logp.clone().requires_grad_() for rollout in rollouts]
    entropies = [rollout.entropy.clone().requires_grad_() for rollout in rollouts]
    totals = torch.zeros(4, dtype=torch.float64)
    for packed, of_rank in zip(rows, tokens, strict=True):
        for row, part in zip(packed, of_rank, strict=True):
            place = Rollout.placer(row)
            scores = rl.Scores(place(leaves), place(entropies), {})
            values = {name: place([getattr(r, name) for r in rollouts]) for name in ("old", "reference", "weights")}
            values |= {name: value for name, value in given_.items() if name in values}
            advantages = torch.tensor([r.advantage for r in rollouts], dtype=torch.float64)
            found = rl.policy_loss(scores, part, advantages, count, which, **values)
            (found.loss / len(cut)).backward()
            numbers = [*found[:3], found.entropy]
            totals += torch.stack([one.detach() for one in numbers]) / len(cut)
    zeros = [torch.zeros_like(leaf) for leaf in leaves]
    grads = [z if leaf.grad is None else leaf.grad for leaf, z in zip(leaves, zeros, strict=True)]
    of_entropy = [z if leaf.grad is None else leaf.grad for leaf, z in zip(entropies, zeros, strict=True)]
    return totals, grads, of_entropy


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
    totals, grads, of_entropy = losses(rollouts, data.draw(cuts(num_samples)), SETTINGS[name])
    wanted = plain_loss(rollouts, SETTINGS[name])
    torch.testing.assert_close(totals, wanted[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grads, wanted[1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(of_entropy, wanted[2], rtol=1e-9, atol=1e-9)


ONE_ROW = [[[0, 1, 2]]]


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
def test_a_policy_that_has_not_moved(name):
    """r = 1 everywhere: the loss is -mean(A), by tokens or by samples, and dloss/dlogp = -A / N."""
    rollouts = draw_rollouts(3, seed=1)
    which = dataclasses.replace(SETTINGS[name], kl=None, kl_weight=0.0)
    totals, grads, _ = losses(rollouts, ONE_ROW, which, old=None, weights=None, reference=None)
    sizes = [int(rollout.has_label.sum()) for rollout in rollouts]
    total = sum(sizes) if which.mean == "tokens" else None
    parts = [size / total if total else 1 / 3 for size in sizes]
    expected = -sum(part * rollout.advantage for part, rollout in zip(parts, rollouts, strict=True))
    assert math.isclose(totals[0], expected, rel_tol=1e-12) and totals[1] == 0 and abs(totals[2]) < 1e-15
    for rollout, grad, part, size in zip(rollouts, grads, parts, sizes, strict=True):
        wanted = rollout.has_label.double() * (-rollout.advantage * part / size)
        torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo", "reinforce", "gspo_tokens"])
def test_groups_without_variance_have_exactly_no_gradient(name):
    rollouts = draw_rollouts(6, seed=2)
    for rollout, advantage in zip(rollouts, rl.group_advantages([0.1] * 3 + [0.7] * 3, [0] * 3 + [1] * 3), strict=True):
        rollout.advantage = float(advantage)
    which = dataclasses.replace(SETTINGS[name], kl=None, kl_weight=0.0)
    totals, grads, _ = losses(rollouts, [[[0, 3], [1]], [[2, 5], [4]]], which)
    assert totals[0] == 0 and not any(grad.any() for grad in grads)


@pytest.mark.parametrize(
    ("advantage", "difference", "dual", "is_clipped"),
    [
        (1.0, 0.5, None, True),
        (1.0, -0.5, None, False),
        (-1.0, -0.5, None, True),
        (-1.0, 0.5, None, False),
        (-1.0, 0.5, 1.5, True),
        (-1.0, 0.3, 1.5, False),
        (0.0, 0.5, None, False),
    ],
)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.each_pair
def test_clipped_tokens_have_exactly_no_gradient(advantage, difference, dual, is_clipped, ratio):
    rollouts = draw_rollouts(1, seed=3)
    rollouts[0].advantage, rollouts[0].old = advantage, rollouts[0].logp - difference
    totals, grads, _ = losses(rollouts, [[[0]]], rl.PolicySettings(ratio=ratio, dual_clip=dual))
    assert totals[1] == float(is_clipped)
    assert (grads[0] == 0).all() if is_clipped or not advantage else (grads[0][rollouts[0].has_label] != 0).all()


def test_gspo_gives_each_token_of_a_sample_the_same_gradient():
    rollouts = draw_rollouts(4, seed=4)
    _, grads, _ = losses(rollouts, [[[0, 1], [2]], [[3], []]], SETTINGS["gspo"], weights=None)
    assert any(grad.any() for grad in grads)
    for rollout, grad in zip(rollouts, grads, strict=True):
        assert len(set(grad[rollout.has_label].tolist())) == 1


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2():
    rollouts, found = draw_rollouts(3, seed=5), {}
    for kl in ("k2", "k3", "k3+"):
        which = rl.PolicySettings(kind="reinforce", kl=kl, kl_weight=1.0)
        found[kl] = losses(rollouts, ONE_ROW, which)
    torch.testing.assert_close(found["k3+"][0], found["k3"][0])
    torch.testing.assert_close(found["k3+"][1], found["k2"][1])
    assert not torch.allclose(found["k3"][0], found["k2"][0])


def test_garbage_where_there_is_no_label_is_not_seen():
    rollouts = draw_rollouts(3, seed=6)
    expected = losses(rollouts, ONE_ROW, SETTINGS["dual"])
    for rollout in rollouts:
        for values in (rollout.old, rollout.reference, rollout.weights):
            values[~rollout.has_label] = math.nan
    got = losses(rollouts, ONE_ROW, SETTINGS["dual"])
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_ratios_far_away_stay_finite():
    rollouts = draw_rollouts(2, seed=7)
    for sign, rollout in zip((1, -1), rollouts, strict=True):
        rollout.old, rollout.advantage = rollout.logp + sign * 300.0, -1.0
    totals, grads, _ = losses(rollouts, [[[0, 1]]], rl.GRPO)
    assert totals.isfinite().all() and all(grad.isfinite().all() for grad in grads)


def test_an_empty_row_reaches_what_its_scores_came_from():
    row = pack_samples([], pad_to_multiple_of=4)
    part = rl.RowTokens(row)
    count = rl.count_step([part])
    leaf = torch.zeros(1, 4, requires_grad=True)
    for which in (rl.GRPO, rl.GSPO, rl.CISPO):
        found = rl.policy_loss(rl.Scores(leaf * 2, None, {}), part, torch.empty(0), count, which, old=torch.zeros(1, 4))
        found.loss.backward()
        assert found.loss == 0 and leaf.grad is not None and not leaf.grad.any()
        leaf.grad = None
    assert count.tokens == count.samples == 1


# ---- the presets


# From the papers, and from what TRL documents (huggingface.co/docs/trl: GRPOConfig, "Paper Index"):
#   GRPO        arXiv 2402.03300: a mean over samples of means over tokens, epsilon 0.2 and beta 0.0 as in GRPOConfig.
#   DAPO        arXiv 2503.14476: epsilon 0.2 below and 0.28 above, a mean over all tokens, no KL.
#   Dr. GRPO    arXiv 2503.20783: sums over tokens, divided by a constant instead of lengths.
#   GSPO        arXiv 2507.18071, section 5.1: epsilon 3e-4 below and 4e-4 above, one ratio for each sample.
#   CISPO       arXiv 2506.13585: the detached ratio times log p, a mean over all tokens, no lower bound.
#               The upper bound is 5, because epsilon_high=5.0 in ms-swift's documentation is the bound itself.
#   REINFORCE   -A log p, a mean over all tokens.


def loss_of_two(which, ratios, logs=(-1.0, -2.0, -0.5, -1.0, -3.0)):
    """Loss and clipped part of a sample of two tokens with A = 1, and one of three with A = -2, from their ratios.

    Entropies and a reference are there, and must not count.
    """
    samples = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5, 6, 7], "labels": [-100, 5, 6, 7]}]
    row = pack_samples(samples)
    part = rl.RowTokens(row)
    assert row.next_labels.tolist() == [[2, 3, -100, 5, 6, 7, -100]]

    def place(values):
        return torch.tensor([[*values[:2], math.nan, *values[2:], math.nan]], dtype=torch.float64)

    logp = place(logs).nan_to_num()
    old = place([log - math.log(ratio) for log, ratio in zip(logs, ratios, strict=True)])
    scores = rl.Scores(logp, torch.full_like(logp, 7.0), {})
    advantages = torch.tensor([1.0, -2.0], dtype=torch.float64)
    found = rl.policy_loss(
        scores, part, advantages, rl.count_step([part]), which, old=old, reference=torch.full_like(logp, -9.0)
    )
    return float(found.loss), float(found.clipped)


# Two above 1 with A = 1, of which the first is cut off; with A = -2 one far below, one inside, one far above.
RATIOS = (1.5, 1.1, 0.05, 0.9, 6.0)


@pytest.mark.parametrize(
    ("name", "loss", "clipped"),
    [
        # -1.2 and -1.1; 2 * 0.8, 2 * 0.9 and 2 * 6: means of -1.15 and 15.4 / 3.
        ("GRPO", (-1.15 + 15.4 / 3) / 2, 0.4),
        # -1.28 and -1.1; the same: a fifth of all.
        ("DAPO", (-2.38 + 15.4) / 5, 0.4),
        # -2.3 and 15.4, over ten tokens that a response may have, and two samples.
        ("DR_GRPO", 13.1 / 10 / 2, 0.4),
        # -(1.5 * -1 + 1.1 * -2) = 3.7 and 2 * (0.05 * -0.5 + 0.9 * -1 + 5 * -3) = -31.85.
        ("CISPO", -28.15 / 5, 0.0),
        # -(-1 - 2) = 3 and 2 * (-0.5 - 1 - 3) = -9.
        ("REINFORCE", -6 / 5, 0.0),
    ],
)
def test_a_preset_by_hand(name, loss, clipped):
    which = getattr(rl, name)
    if name == "DR_GRPO":
        which = dataclasses.replace(which, max_tokens=10)
    found = loss_of_two(which, RATIOS)
    assert math.isclose(found[0], loss, rel_tol=1e-12) and math.isclose(found[1], clipped, abs_tol=1e-12)


@pytest.mark.parametrize(
    ("first", "second", "loss", "clipped"),
    [
        # Ratios of samples; inside of the bounds they are themselves, and outside 1.0004 and 0.9997.
        (1.00035, 0.99975, (-1.00035 + 2 * 0.99975) / 2, 0.0),
        (1.00045, 0.99965, (-1.0004 + 2 * 0.9997) / 2, 1.0),
        (0.5, 6.0, (-0.5 + 2 * 6.0) / 2, 0.0),
    ],
)
def test_gspo_by_hand(first, second, loss, clipped):
    """Tokens lie far apart: their ratios' geometric mean is the sample's."""
    ratios = (first * 3, first / 3, second * 4, second * 2, second / 8)
    found = loss_of_two(rl.GSPO, ratios)
    assert math.isclose(found[0], loss, rel_tol=1e-12) and math.isclose(found[1], clipped, abs_tol=1e-12)


# ---- refusals


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "ppo"}, "kind must be 'clip', 'cispo' or 'reinforce', got 'ppo'"),
        ({"mean": "mean"}, "mean must be 'tokens', 'samples' or 'constant'"),
        ({"clip": (1.2, 0.2)}, "clip must be"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1, got 1.0"),
        ({"kl": "k3"}, "belong together"),
        ({"kl_weight": 0.1}, "belong together"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_settings_that_mean_nothing(change, said):
    with pytest.raises(ValueError, match=said):
        rl.PolicySettings(**change)


@pytest.mark.parametrize(
    ("which", "change", "said"),
    [
        (rl.DR_GRPO, {}, "needs max_tokens"),
        (SETTINGS["grpo"], {"reference": None}, "kl='k3' needs the reference model's log-probabilities"),
        (rl.GRPO, {"old": torch.zeros(1, 3)}, r"policy_loss: old: expected one value for each .* got shape \[1, 3\]"),
        (rl.GRPO, {"weights": torch.zeros(3)}, "policy_loss: weights: expected one value for each"),
    ],
)
def test_wrong_arguments(which, change, said):
    with pytest.raises(ValueError, match=said):
        losses(draw_rollouts(3, seed=8), ONE_ROW, which, **change)


def test_an_entropy_weight_needs_entropies():
    part = rl.RowTokens(pack_samples([{"input_ids": [1, 2, 3]}]))
    scores = rl.Scores(torch.zeros(1, 3), None, {})
    with pytest.raises(ValueError, match=r"score\(..., entropy=True\)"):
        which = rl.PolicySettings(entropy_weight=0.1)
        rl.policy_loss(scores, part, torch.zeros(1), rl.count_step([part]), which)
    with pytest.raises(ValueError, match=r"spread: .* got shape \[0\].*samples \[0\]"):
        rl.policy_loss(scores, part, torch.zeros(0), rl.count_step([part]))


PLAIN = {"dual_clip": None, "max_tokens": None, "kl": None, "kl_weight": 0.0, "entropy_weight": 0.0}
PRESETS = {
    "GRPO": {"kind": "clip", "ratio": "token", "clip": (0.2, 0.2), "mean": "samples", **PLAIN},
    "DAPO": {"kind": "clip", "ratio": "token", "clip": (0.2, 0.28), "mean": "tokens", **PLAIN},
    "DR_GRPO": {"kind": "clip", "ratio": "token", "clip": (0.2, 0.2), "mean": "constant", **PLAIN},
    "GSPO": {"kind": "clip", "ratio": "sequence", "clip": (3e-4, 4e-4), "mean": "samples", **PLAIN},
    "CISPO": {"kind": "cispo", "ratio": "token", "clip": (1.0, 4.0), "mean": "tokens", **PLAIN},
    "REINFORCE": {"kind": "reinforce", "ratio": "token", "clip": (0.2, 0.2), "mean": "tokens", **PLAIN},
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_its_paper_says(name):
    assert dataclasses.asdict(getattr(rl, name)) == PRESETS[name]
