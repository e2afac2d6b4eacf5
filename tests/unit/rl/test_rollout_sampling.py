"""fsdp2x.rollout.sample: greedy is `generate`, log-probabilities are `rl.score`'s, and what it refuses."""

import pytest
import torch

from fsdp2x import rl
from fsdp2x.rollout import Sampling, sample
from models import VOCAB, build

MODELS = ("qwen3", "llama", "mixtral")
PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [7, 6, 5, 4, 3], [5]]


def scored(model, prompt, completion, temperature=1.0):
    """Log-probabilities of the response's tokens, by one forward over all of them."""
    inputs = torch.tensor([prompt + completion.tokens])
    labels = torch.full_like(inputs, -100)
    labels[0, len(prompt) - 1 : -1] = torch.tensor(completion.tokens)
    with torch.no_grad():
        found = rl.score(model, {"input_ids": inputs}, labels, temperature=temperature)
    return found.log_probs[0, len(prompt) - 1 : -1]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_generate(name):
    model = build(name).eval()
    found = sample(model, PROMPTS, Sampling(7, num_samples=2, temperature=0.0))
    assert [c.prompt for c in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    for completion in found:
        prompt = PROMPTS[completion.prompt]
        whole = model.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=7, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert completion.tokens == whole[0, len(prompt) :].tolist()
        torch.testing.assert_close(
            torch.tensor(completion.log_probs), scored(model, prompt, completion), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_those_of_score(name, temperature):
    model = build(name).eval()
    stops = (4, 5, 6)
    found = sample(model, PROMPTS, Sampling(8, 6, temperature, stops, seed=1))
    assert len(found) == 6 * len(PROMPTS)
    assert {len(c.tokens) for c in found} > {8}, "some stop early, some do not"
    for completion in found:
        tokens = completion.tokens
        assert not set(tokens[:-1]) & set(stops) and (len(tokens) == 8 or tokens[-1] in stops)
        expected = scored(model, PROMPTS[completion.prompt], completion, temperature)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-5)


def test_drawn_as_often_as_likely():
    model = build("qwen3").eval()
    prompt = [3, 4, 5]
    found = sample(model, [prompt], Sampling(1, num_samples=4000, temperature=0.7))
    with torch.no_grad():
        expected = (model(input_ids=torch.tensor([prompt])).logits[0, -1] / 0.7).softmax(-1)
    counts = torch.bincount(torch.tensor([c.tokens[0] for c in found]), minlength=VOCAB)
    deviation = (expected * (1 - expected) / 4000).sqrt()
    assert ((counts / 4000 - expected).abs() < 5 * deviation + 1e-3).all()


def test_a_seed_says_what_is_drawn():
    model = build("qwen3").eval()
    first, again, other = ([c.tokens for c in sample(model, PROMPTS, Sampling(8, 2, seed=seed))] for seed in (1, 1, 2))
    assert first == again != other
    assert first[0] != first[1], "samples of a prompt differ"
    assert sample(model, [], Sampling(8)) == []


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
        sample(build("qwen3"), prompts, Sampling(2))
