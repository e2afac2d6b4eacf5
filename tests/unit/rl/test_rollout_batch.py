"""The sampler's batch: rows of different lengths that join and leave are what each of them is alone."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2x.rl.rollout import batch as module
from fsdp2x.rl.rollout.draw import draw, uniforms
from fsdp2x.rollout import Sampling, sample
from models import VOCAB, build

TOLERANCE = {"rtol": 0, "atol": 1e-5}


def model_of(name, attention="sdpa", **overrides):
    model = build(name, **overrides).eval().requires_grad_(False)
    model.set_attn_implementation(attention)
    return model


MODELS = {
    "llama": lambda: model_of("llama"),
    "eager": lambda: model_of("qwen3", "eager"),
    "window": lambda: model_of("mixtral", sliding_window=4),
    "gpt2": lambda: model_of("gpt2"),
}


def plain_log_probs(model, prompt, tokens, temperature):
    """Returns a response's log-probabilities from one forward without a cache: [tokens, vocabulary]."""
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / (temperature or 1.0)).log_softmax(-1)


def check(model, prompts, asked, completion):
    """Log-probabilities are those of the row alone, and greedy tokens are the likeliest."""
    made = torch.tensor(completion.tokens)
    assert 1 <= len(made) <= asked.max_tokens and not set(made[:-1].tolist()) & set(asked.stop_ids)
    assert len(made) == asked.max_tokens or int(made[-1]) in asked.stop_ids
    expected = plain_log_probs(model, prompts[completion.prompt], completion.tokens, asked.temperature)
    of_made = expected.gather(-1, made[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.log_probs), of_made, **TOLERANCE)
    if asked.temperature == 0:
        assert (of_made >= expected.amax(-1) - 1e-5).all()


prompts_of_requests = st.lists(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=12), min_size=1, max_size=6)
samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, 9),
    num_samples=st.integers(1, 4),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    stop_ids=st.sets(st.integers(3, VOCAB - 1), max_size=6).map(tuple),
    seed=st.integers(0, 3),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
)


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_join_at_any_time_are_those_alone(name, monkeypatch):
    """A row joins when another one ends, so limits and stops decide when."""
    model = MODELS[name]()
    monkeypatch.setattr(module, "_FILL_TOKENS", 16)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(prompts=prompts_of_requests, sampling=samplings, max_rows=st.integers(1, 9), max_tokens=st.integers(21, 90))
    def run(prompts, sampling, max_rows, max_tokens):
        found = sample(model, prompts, sampling, max_batch_rows=max_rows, max_batch_tokens=max_tokens)
        assert [c.prompt for c in found] == [i for i in range(len(prompts)) for _ in range(sampling.num_samples)]
        for completion in found:
            check(model, prompts, sampling, completion)

    run()


@pytest.mark.parametrize(
    ("limits", "most"), [({}, 18), ({"max_batch_rows": 7}, 7), ({"max_batch_tokens": 50}, 50 // 14)]
)
def test_limits_bound_what_runs_together(limits, most, monkeypatch):
    counts = []

    def counted(logits, *others):
        counts.append(len(logits))
        return draw(logits, *others)

    monkeypatch.setattr(module, "draw", counted)
    sample(model_of("qwen3"), [[3] * 9] * 6, Sampling(5, 3, stop_ids=(4, 5)), **limits)
    assert max(counts) == most


def test_responses_do_not_depend_on_the_batch():
    model = model_of("qwen3")
    prompts = [[3, 4, 5, 6, 7], [8, 9], [7, 6, 5, 4, 3], [5]]
    sampling = Sampling(8, 3, 0.9, (4, 5, 6), seed=3, top_p=0.95)
    expected = sample(model, prompts, sampling)
    for limits in ({"max_batch_rows": 1}, {"max_batch_rows": 5}, {"max_batch_tokens": 30}):
        found = sample(model, prompts, sampling, **limits)
        assert [c.tokens for c in found] == [c.tokens for c in expected]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), **TOLERANCE)
    # Neither on other prompts nor on how many samples are drawn of each.
    fewer = sample(model, prompts[:2], dataclasses.replace(sampling, num_samples=2))
    assert [c.tokens for c in fewer] == [expected[index].tokens for index in (0, 1, 3, 4)]


# ---- drawing


def allowed(probs, sampling):
    """The tokens that may be drawn, one after the other."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    mass = sum(probs[token] for token in order)
    kept, before = [], 0.0
    for token in order:
        if before < sampling.top_p or sampling.top_p == 1:
            kept.append(token)
        before += probs[token] / mass
    return {token for token in kept if probs[token] >= sampling.min_p * max(probs)}


@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 5, "top_p": 0.7},
        {"top_p": 0.4},
        {"top_p": 0.999},
        {"min_p": 0.3},
        {"min_p": 0.05, "top_p": 0.9, "top_k": 9},
        {},
    ],
    ids=str,
)
def test_what_may_be_drawn(asked, monkeypatch):
    monkeypatch.setattr("fsdp2x.rl.rollout.draw._NUM_SORTED", 4)
    sampling = Sampling(1, temperature=0.8, **asked)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)).mul(2)
    probs = (logits / 0.8).softmax(-1)
    num = 4000
    noise = uniforms(0, 0, 0, num)
    tokens, log_probs = draw(logits.expand(num, -1), sampling, noise)
    expected = allowed(probs.tolist(), sampling)
    assert set(tokens.tolist()) <= expected
    torch.testing.assert_close(log_probs, probs.log()[tokens], msg="before the truncation")
    share = torch.zeros(VOCAB).scatter(0, torch.tensor(sorted(expected)), 1.0) * probs
    share /= share.sum()
    counts = torch.bincount(tokens, minlength=VOCAB) / num
    assert ((counts - share).abs() < 5 * (share * (1 - share) / num).sqrt() + 1e-3).all()


def test_random_numbers_belong_to_a_response():
    assert uniforms(3, 1, 2, 5) == uniforms(3, 1, 2, 9)[:5]
    seen = {tuple(uniforms(seed, prompt, one, 2)) for seed in range(3) for prompt in range(3) for one in range(3)}
    assert len(seen) == 27 and all(0 <= number < 1 for pair in seen for number in pair)
    # The last token is never beyond the vocabulary, nor one of probability 0.
    logits = torch.zeros(1, VOCAB).index_fill(1, torch.tensor([VOCAB - 1]), -torch.inf)
    assert draw(logits, Sampling(1), [1 - 2.0**-53])[0].item() == VOCAB - 2


def test_logits_that_are_not_finite():
    model = model_of("llama")
    model.lm_head.weight[5] = torch.nan
    with pytest.raises(FloatingPointError, match="the model's logits are not finite"):
        sample(model, [[3, 4]], Sampling(2))


def test_layers_with_another_state_are_refused():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    moe = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    config = Qwen3NextConfig(
        vocab_size=VOCAB, num_hidden_layers=2, head_dim=8, linear_value_head_dim=8, **sizes, **moe, **linear
    )
    with pytest.raises(NotImplementedError, match="layers with a LinearAttention.* Sample with vLLM or SGLang"):
        sample(Qwen3NextForCausalLM(config).eval(), [[3, 4]], Sampling(2))


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max_batch_rows": 0}, "must be at least 1, got 0, 65536"),
        ({"max_batch_tokens": 5}, "need 6 positions, but max_batch_tokens=5"),
    ],
)
def test_limits_that_are_refused(limits, said):
    with pytest.raises(ValueError, match=said):
        sample(model_of("qwen3"), [[3, 4]], Sampling(4), **limits)


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 2.0}, TypeError, "max_tokens must be int, got 2.0"),
        ({"max_tokens": 2, "num_samples": True}, TypeError, "num_samples must be int"),
        ({"max_tokens": 2, "seed": -1}, ValueError, "seed must be at least 0"),
        ({"max_tokens": 2, "temperature": -0.5}, ValueError, "temperature must be finite and at least 0, got -0.5"),
        ({"max_tokens": 2, "temperature": float("nan")}, ValueError, "temperature must be finite"),
        ({"max_tokens": 2, "top_k": -1}, ValueError, "top_k must be at least 0, got -1"),
        ({"max_tokens": 2, "top_p": 0.0}, ValueError, "top_p must be above 0 and at most 1, got 0.0"),
        ({"max_tokens": 2, "min_p": 1.5}, ValueError, "min_p must be from 0 to 1, got 1.5"),
        ({"max_tokens": 2, "temperature": "1"}, TypeError, "temperature must be float"),
        ({"max_tokens": 2, "stop_ids": ("2",)}, TypeError, "stop_ids must be a collection of int"),
        ({"max_tokens": 2, "stop_ids": None}, TypeError, "stop_ids must be a collection of int"),
    ],
)
def test_settings_that_are_refused(settings, error, said):
    with pytest.raises(error, match=said):
        Sampling(**settings)


@pytest.mark.parametrize(
    ("prompts", "error", "said"),
    [
        ([[3], []], ValueError, "prompt 1 is empty"),
        ([[3, VOCAB]], ValueError, f"prompt 0 has the token {VOCAB}, but the vocabulary has {VOCAB}"),
        ([[-1]], ValueError, "prompt 0 has the token -1"),
        ([[3] * 100_000], ValueError, "prompt 0 of 100000 tokens and max_tokens=2 exceed the model's"),
        ([[3], "text"], TypeError, "prompt 1 must be a list of token ids, got 'text'. Use the tokenizer first"),
    ],
)
def test_prompts_that_are_refused(prompts, error, said):
    with pytest.raises(error, match=said):
        sample(model_of("qwen3"), prompts, Sampling(2))
