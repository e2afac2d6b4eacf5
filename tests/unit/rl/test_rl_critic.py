"""Advantages and value losses over rows against quadratic formulas and loops over samples in fp64; the value model."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sequences
from fsdp2x import rl
from fsdp2x.sequence import pack_samples, use_varlen_attention
from policies import Rollout

NO_LABEL = -100


@st.composite
def samples_in_rows(draw):
    """(samples, rows of them, values by sample): labels lie anywhere, and a sample or a row may have none."""
    lengths = draw(st.lists(st.integers(2, 12), max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    samples, numbers = [], []
    for length in lengths:
        labels = torch.arange(1, length + 1)
        labels[torch.rand(length, generator=generator) < draw(st.sampled_from([0.0, 0.4, 1.0]))] = NO_LABEL
        samples.append({"input_ids": torch.arange(1, length + 1), "labels": labels})
        numbers.append(torch.randn(4, length, generator=generator, dtype=torch.float64))
    num_rows = draw(st.integers(1, 3))
    cut = [[] for _ in range(num_rows)]
    for index in range(len(lengths)):
        cut[draw(st.integers(0, num_rows - 1))].append(index)
    return samples, [pack_samples(samples, members, pad_to_multiple_of=4) for members in cut], numbers


def label_places(sample):
    """Returns the positions that predict a sample's labels."""
    return [t for t in range(len(sample["labels"]) - 1) if sample["labels"][t + 1] != NO_LABEL]


def plain_gae(rewards, values, gamma, lam):
    """The sum of all later TD errors, each with its own power: quadratic time."""
    count = len(rewards)
    errors = [rewards[t] + (gamma * values[t + 1] if t + 1 < count else 0.0) - values[t] for t in range(count)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, count)) for t in range(count)]


def placed(row, numbers, index):
    """Row ``index`` of the samples' numbers, with garbage at positions without a label."""
    if not numbers:
        return torch.full(row.input_ids.shape, math.nan, dtype=torch.float64)
    whole = Rollout.placer(row)([of_sample[index] for of_sample in numbers])
    return whole.where(row.next_labels != NO_LABEL, math.nan)


@settings(max_examples=60, deadline=None)
@given(
    drawn=samples_in_rows(),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    whiten=st.booleans(),
)
def test_gae_is_the_sum_of_later_errors(drawn, gamma, lam, whiten):
    samples, packed, numbers = drawn
    rows = [rl.RowTokens(row) for row in packed]
    rewards, values = ([placed(row, numbers, index) for row in packed] for index in (0, 1))
    advantages, returns = rl.gae(rewards, values, rows, gamma=gamma, lam=lam, whiten=whiten)
    wanted = [torch.zeros(of_sample.shape[1], dtype=torch.float64) for of_sample in numbers]
    of_returns = [one.clone() for one in wanted]
    for index, (sample, (reward, value, *_)) in enumerate(zip(samples, numbers, strict=True)):
        places = label_places(sample)
        found = plain_gae(reward[places].tolist(), value[places].tolist(), gamma, lam)
        wanted[index][places] = torch.tensor(found, dtype=torch.float64)
        of_returns[index][places] = wanted[index][places] + value[places]
    if whiten:
        parts = [one[label_places(sample)] for one, sample in zip(wanted, samples, strict=True)]
        everything = torch.cat([torch.empty(0), *parts])
        mean = everything.mean() if len(everything) else 0.0
        variance = everything.var() if len(everything) > 1 else torch.zeros(())
        for one, sample in zip(wanted, samples, strict=True):
            one[label_places(sample)] = (one[label_places(sample)] - mean) / (variance + 1e-8).sqrt()
    for row, got, got_returns in zip(packed, advantages, returns, strict=True):
        assert got.dtype == torch.float32 and got.shape == row.input_ids.shape
        if numbers:
            place = Rollout.placer(row)
            torch.testing.assert_close(got, place(wanted).float(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got_returns, place(of_returns).float(), rtol=1e-5, atol=1e-5)
        assert not got[~rl.RowTokens(row).has_label].any() and got_returns.isfinite().all()


def one_row():
    """A sample with labels in two turns, one without a label, one with a single label."""
    samples = [
        {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [-100, 2, 3, -100, -100, 6]},
        {"input_ids": [7, 8], "labels": [-100, -100]},
        {"input_ids": [9, 10], "labels": [-100, 10]},
    ]
    row = pack_samples(samples, pad_to_multiple_of=4)
    return row, rl.RowTokens(row)


def test_a_reward_of_a_response_by_hand():
    """Undiscounted and lam=1: every label token earns what is left of the reward; the tool's tokens are skipped."""
    _, tokens = one_row()
    rewards = tokens.on_last([2.0, 9.0, -1.0])
    assert rewards.tolist() == [[0, 0, 0, 0, 2, 0, 0, 0, -1, 0, 0, 0]]
    values = torch.full((1, 12), 0.5)
    advantages, returns = rl.gae([rewards], [values], [tokens], lam=1.0)
    assert advantages[0].tolist() == [[1.5, 1.5, 0, 0, 1.5, 0, 0, 0, -1.5, 0, 0, 0]]
    assert returns[0].tolist() == [[2, 2, 0, 0, 2, 0, 0, 0, -1, 0, 0, 0]]
    one_step, _ = rl.gae([rewards], [values], [tokens], lam=0.0, gamma=0.5)
    assert one_step[0].tolist() == [[-0.25, -0.25, 0, 0, 1.5, 0, 0, 0, -1.5, 0, 0, 0]]


# ---- the loss


@pytest.mark.parametrize("mean", ["tokens", "samples", "constant"])
@pytest.mark.parametrize("clip", [None, 0.3])
@settings(max_examples=20, deadline=None)
@given(drawn=samples_in_rows())
def test_value_loss_is_a_loop_over_tokens(mean, clip, drawn):
    """However samples are cut into rows, and rows over ranks."""
    samples, packed, numbers = drawn
    rows = [rl.RowTokens(row) for row in packed]
    count = dataclasses.replace(rl.count_step(rows), ranks=3)
    leaves = [of_sample[1].clone().requires_grad_() for of_sample in numbers]
    total, clipped = 0.0, 0.0
    for row, tokens in zip(packed, rows, strict=True):
        now = Rollout.placer(row)(leaves) if numbers else torch.zeros(row.input_ids.shape, dtype=torch.float64)
        found = rl.value_loss(
            now, tokens, placed(row, numbers, 2), count, old=placed(row, numbers, 3), clip=clip, mean=mean, max_tokens=7
        )
        if numbers:
            (found.loss / 3).backward()
        total, clipped = total + float(found.loss.detach()) / 3, clipped + float(found.clipped) / 3
    num_tokens = max(sum(len(label_places(sample)) for sample in samples), 1)
    others = [of_sample[1].clone().requires_grad_() for of_sample in numbers]
    expected, num_clipped = torch.zeros((), dtype=torch.float64), 0
    for sample, leaf, (_, _, target, old) in zip(samples, others, numbers, strict=True):
        places = label_places(sample)
        for t in places:
            loss = (leaf[t] - target[t]) ** 2
            if clip is not None:
                moved = torch.clamp(leaf[t], old[t] - clip, old[t] + clip)
                num_clipped += int((moved - target[t]) ** 2 > loss)
                loss = torch.max(loss, (moved - target[t]) ** 2)
            by_sample = 1 / len(samples)
            share = {"tokens": 1 / num_tokens, "samples": by_sample / len(places), "constant": by_sample / 7}
            expected = expected + 0.5 * loss * share[mean]
    assert math.isclose(total, float(expected.detach()), rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(clipped, num_clipped / num_tokens, rel_tol=1e-9, abs_tol=1e-12)
    if expected.requires_grad:
        expected.backward()
    for leaf, other in zip(leaves, others, strict=True):
        wanted = torch.zeros_like(leaf) if other.grad is None else other.grad
        torch.testing.assert_close(leaf.grad, wanted, rtol=1e-9, atol=1e-12)


def test_the_clip_by_hand():
    """A value that moved too far in the wrong direction keeps its gradient; in the right one it has none."""
    _, tokens = one_row()
    values = torch.zeros(1, 12, requires_grad=True)
    count = rl.count_step([tokens])
    old = torch.full((1, 12), -1.0)
    toward = rl.value_loss(values, tokens, torch.ones(1, 12), count, old=old, clip=0.5)
    assert math.isclose(toward.loss.detach(), 0.5 * 1.5**2, rel_tol=1e-6) and toward.clipped == 1
    toward.loss.backward()
    assert not values.grad.any()
    away = rl.value_loss(values, tokens, torch.full((1, 12), -2.0), count, old=old, clip=0.5)
    away.loss.backward()
    assert away.loss == 2 and away.clipped == 0 and math.isclose(values.grad.sum(), 2.0, rel_tol=1e-6)


# ---- the model


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_values_are_the_head_on_hidden_states(name):
    """This holds for causal and base models. Packed samples see the same as alone, and the first values are zero."""
    source = sequences.build(name)
    samples = sequences.make_samples(source, [5, 3, 7])
    critic = rl.ValueModel(source.model if name == "llama" else source)
    use_varlen_attention(critic)
    row = pack_samples(samples)
    values = critic(**row.inputs)
    assert values.shape == row.input_ids.shape and values.dtype == torch.float32 and not values.any()
    torch.nn.init.normal_(critic.head.weight)
    torch.nn.init.constant_(critic.head.bias, 0.25)
    for sample, got in zip(samples, row.unpack(critic(**row.inputs)), strict=True):
        hidden = source.model(input_ids=sample["input_ids"][None]).last_hidden_state[0]
        torch.testing.assert_close(got, hidden @ critic.head.weight[0] + 0.25, rtol=1e-4, atol=1e-4)
    own = {name for name, _ in critic.named_parameters()} - {"head.weight", "head.bias"}
    assert own == {name for name, _ in source.named_parameters()} - {"lm_head.weight"}


def test_a_bf16_model_has_fp32_values():
    critic = rl.ValueModel(sequences.build("llama").bfloat16())
    torch.nn.init.ones_(critic.head.weight)
    with torch.autocast("cpu", torch.bfloat16):
        values = critic(input_ids=torch.tensor([[1, 2, 3]]))
    hidden = critic.base_model(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state
    assert critic.head.weight.dtype == values.dtype == torch.float32
    torch.testing.assert_close(values, hidden.float().sum(-1), rtol=1e-5, atol=1e-5)


# ---- refusals


def test_what_is_no_model_of_transformers():
    from peft import LoraConfig, get_peft_model

    with pytest.raises(TypeError, match="Linear is not a transformers model"):
        rl.ValueModel(torch.nn.Linear(2, 2))
    adapted = get_peft_model(sequences.build("llama"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(TypeError, match=r"has adapters. Pass the model without them .*modules_to_save"):
        rl.ValueModel(adapted)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gamma": 1.5}, "gae: rank 0: gamma and lam must be between 0 and 1, got 1.5 and 0.95"),
        ({"lam": -0.1}, "got 1.0 and -0.1"),
        ({"values": []}, "1 rewards and 0 values for 1 rows"),
        ({"rewards": [torch.zeros(12)]}, r"rewards\[0\]: expected one value .* got shape \[12\]"),
        ({"values": [torch.full((1, 12), math.inf)]}, r"values\[0\] has a label token whose value is not finite"),
    ],
)
def test_wrong_arguments_of_gae(change, said):
    _, tokens = one_row()
    arguments = {"rewards": [torch.zeros(1, 12)], "values": [torch.zeros(1, 12)], "rows": [tokens], **change}
    with pytest.raises(ValueError, match=said):
        rl.gae(**arguments)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"clip": 0.2}, r"clip must be positive and needs the values before the update.*old=values\[i\]"),
        ({"clip": 0.0, "old": torch.zeros(1, 12)}, "clip must be positive"),
        ({"old": torch.zeros(1, 3)}, r"value_loss: old: expected one value .* got shape \[1, 3\]"),
        ({"mean": "constant"}, "needs max_tokens"),
        ({"mean": "rows"}, "mean must be 'tokens', 'samples' or 'constant'"),
    ],
)
def test_wrong_arguments_of_the_loss(change, said):
    _, tokens = one_row()
    with pytest.raises(ValueError, match=said):
        rl.value_loss(torch.zeros(1, 12), tokens, torch.zeros(1, 12), rl.count_step([tokens]), **change)
