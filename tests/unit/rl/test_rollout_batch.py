"""The engine's batch: rows of different lengths that join and leave are what each of them is alone."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2x.rl.rollout import batch as module
from fsdp2x.rl.rollout.batch import Batch
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


def plain_log_probs(model, row, temperature=1.0):
    """Returns a response's log-probabilities from one forward without a cache: [tokens, vocabulary]."""
    logits = model(input_ids=torch.tensor([row.tokens]), use_cache=False).logits[0, row.num_prompt - 1 : -1]
    return (logits / (temperature or 1.0)).log_softmax(-1)


def check_rows(model, request):
    """Log-probabilities are those of the row alone, and greedy tokens are the likeliest."""
    asked = request.sampling
    for row in request.rows:
        made = torch.tensor(row.tokens[row.num_prompt :])
        assert 1 <= len(made) <= asked.max_tokens and sum(count for _, count in row.spans) == len(made)
        assert not set(made[:-1].tolist()) & request.stops
        assert len(made) == asked.max_tokens or int(made[-1]) in request.stops
        expected = plain_log_probs(model, row, asked.temperature)
        of_made = expected.gather(-1, made[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row.log_probs), of_made, **TOLERANCE)
        if asked.temperature == 0:
            assert (of_made >= expected.amax(-1) - 1e-5).all()


prompts = st.lists(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=12), min_size=1, max_size=4)
samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, 9),
    num_samples=st.integers(1, 3),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0]),
    stop_ids=st.sets(st.integers(3, VOCAB - 1), max_size=6).map(tuple),
    seed=st.integers(0, 3),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
)


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_join_at_any_time_are_those_alone(name):
    model = MODELS[name]()

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        requests=st.lists(st.tuples(prompts, samplings, st.integers(0, 6)), min_size=1, max_size=4),
        max_rows=st.integers(1, 9),
        max_tokens=st.integers(21, 90),
        dropped=st.none() | st.integers(0, 3),
    )
    def run(requests, max_rows, max_tokens, dropped):
        batch = Batch(model, max_rows=max_rows, max_tokens=max_tokens)
        taken, done = [], []
        while requests or not batch.is_idle:
            if requests and (batch.is_idle or requests[0][2] == 0):
                asked, sampling, _ = requests.pop(0)
                taken.append(batch.add(asked, sampling))
            elif requests:
                requests[0] = (*requests[0][:2], requests[0][2] - 1)
            done += batch.step()
            assert len(batch._rows) <= max_rows
            limits = [row.limit for row in batch._rows]
            assert len(limits) * max(limits, default=0) <= max_tokens
            if len(taken) == dropped and taken[-1] not in done:
                batch.drop(taken.pop())
                dropped = None
        assert sorted(map(id, done)) == sorted(map(id, taken))
        for request in taken:
            check_rows(model, request)

    run()


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
    batch = Batch(model)
    batch.add([[3] * 9, [4]], Sampling(12, 2, seed=8))
    batch.step()
    request = batch.add(prompts[2:], sampling, numbers=[2, 3])
    while not batch.is_idle:
        batch.step()
    assert [c.tokens for c in request.completions()] == [c.tokens for c in expected[6:]]
    assert [c.tokens for c in sample(model, prompts[2:], sampling)] != [c.tokens for c in expected[6:]]


def test_a_cache_of_old_weights_is_computed_again(monkeypatch):
    """New weights before each forward, several of them for one token, while rows of other lengths join."""
    monkeypatch.setattr(module, "_FILL_TOKENS", 8)
    models = [model_of("qwen3", seed=seed) for seed in range(2)]
    held, version = model_of("qwen3"), 0

    @contextlib.contextmanager
    def weights():
        held.load_state_dict(models[version % 2].state_dict())
        yield version

    batch = Batch(held, weights)
    requests = [batch.add([[3, 4, 5], [6] * 7], Sampling(6, 2, seed=1))]
    for version in (0, 0, 1, 2, 2):  # noqa: B007
        batch.step()
    requests.append(batch.add([[9] * 5], Sampling(3)))
    while not batch.is_idle:
        version += 1
        batch.step()
    assert requests[0].rows[0].spans == [(0, 2), (1, 1), (2, 2), (3, 1)]
    for request in requests:
        for row in request.rows:
            made = torch.tensor(row.tokens[row.num_prompt :])
            by_model = [plain_log_probs(one, row).gather(-1, made[:, None])[:, 0] for one in models]
            versions = [v for v, count in row.spans for _ in range(count)]
            expected = torch.stack([by_model[v % 2][place] for place, v in enumerate(versions)])
            torch.testing.assert_close(torch.tensor(row.log_probs), expected, **TOLERANCE)


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
    tokens, log_probs = draw(logits.expand(num, -1), [sampling] * num, noise)
    expected = allowed(probs.tolist(), sampling)
    assert set(tokens.tolist()) <= expected
    torch.testing.assert_close(log_probs, probs.log()[tokens], msg="before the truncation")
    share = torch.zeros(VOCAB).scatter(0, torch.tensor(sorted(expected)), 1.0) * probs
    share /= share.sum()
    counts = torch.bincount(tokens, minlength=VOCAB) / num
    assert ((counts - share).abs() < 5 * (share * (1 - share) / num).sqrt() + 1e-3).all()


def test_rows_with_other_settings_are_drawn_apart():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)).mul(2)
    asked = [Sampling(1), Sampling(1, temperature=0.0), Sampling(1, top_k=2), Sampling(1, temperature=2.0, top_p=0.3)]
    noise = [0.3, 0.6, 0.99, 0.999999]
    together = draw(logits, asked, noise)
    for row, one in enumerate(asked):
        alone = draw(logits[row : row + 1], [one], noise[row : row + 1])
        assert together[0][row] == alone[0][0]
        torch.testing.assert_close(together[1][row], alone[1][0])
    assert together[0][1] == logits[1].argmax()


def test_random_numbers_belong_to_a_response():
    assert uniforms(3, 1, 2, 5) == uniforms(3, 1, 2, 9)[:5]
    seen = {tuple(uniforms(seed, prompt, one, 2)) for seed in range(3) for prompt in range(3) for one in range(3)}
    assert len(seen) == 27 and all(0 <= number < 1 for pair in seen for number in pair)
    # The last token is never beyond the vocabulary, nor one of probability 0.
    logits = torch.zeros(1, VOCAB).index_fill(1, torch.tensor([VOCAB - 1]), -torch.inf)
    assert draw(logits, [Sampling(1)], [1 - 2.0**-53])[0].item() == VOCAB - 2


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
        ({"max_batch_tokens": 5}, "need 6 positions, but the engine has max_batch_tokens=5"),
    ],
)
def test_limits_that_are_refused(limits, said):
    with pytest.raises(ValueError, match=said):
        sample(model_of("qwen3"), [[3, 4]], Sampling(4), **limits)
