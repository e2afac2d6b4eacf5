"""vLLM and SGLang as engines: what is asked over HTTP, and what of an answer becomes a completion."""

import json

import pytest

from fsdp2x.rollout import Completion, RolloutError, Sampling
from fsdp2x.train.grpo.http_engines import HttpEngine
from http_server import http_server

PROMPTS = [[5, 6], [7]]


def vllm(asked):
    """Two responses in the wrong order; the second prompt's weights change in the middle."""
    words, prompt = asked["sampling_params"], asked["token_ids"]
    spans = [(3, 2)] if prompt == [5, 6] else [(3, 1), (4, 1)]
    ends = [sum(count for _, count in spans[: i + 1]) for i in range(len(spans))]
    versions = [
        {"version": str(version), "start": end - count, "end": end}
        for (version, count), end in zip(spans, ends, strict=True)
    ]
    return {
        "choices": [
            {
                "index": index,
                "token_ids": [10 * index, words["seed"] % 97],
                "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.5 - index}]},
                "weight_versions": versions,
            }
            for index in (1, 0)
        ]
    }


def sglang(asked):
    seed = asked["sampling_params"]["sampling_seed"] % 97
    return [
        {
            "meta_info": {
                "weight_version": "3",
                "output_token_logprobs": [[-0.5, 10 * index, None], [-1.5 - index, seed, None]],
            }
        }
        for index in (0, 1)
    ]


@pytest.mark.parametrize(
    ("kind", "server", "path"), [("vllm", vllm, "/inference/v1/generate"), ("sglang", sglang, "/generate")]
)
def test_answers_become_completions_in_the_order_of_the_prompts(kind, server, path):
    requests = []

    def answer(request, text):
        asked = json.loads(text)
        requests.append((request.path, asked))
        return 200, json.dumps(server(asked)).encode()

    sampling = Sampling(max_tokens=2, num_samples=2, temperature=0.7, stop_ids=(9,), seed=11, top_p=0.9, top_k=5)
    with http_server(answer) as url:
        engine = HttpEngine(kind, url, adapter="an adapter", timeout_s=20)
        engine.ask(PROMPTS, sampling)
        with pytest.raises(RuntimeError, match="collect.. the answer"):
            engine.ask(PROMPTS, sampling)
        found = engine.collect()
        engine.close()
    assert [(c.prompt, c.tokens[0]) for c in found] == [(0, 0), (0, 10), (1, 0), (1, 10)]
    assert [c.log_probs for c in found] == [[-0.5, -1.5], [-0.5, -2.5]] * 2
    assert found[0] == Completion(0, [0, found[0].tokens[1]], [-0.5, -1.5], [(3, 2)], 3)
    asked = [one for _, one in requests]
    assert {one.get("model") or one["lora_path"] for one in asked} == {"an adapter"}
    if kind == "vllm":
        assert found[2].versions == [3, 4] and found[2].admitted == 3
    assert found[0].tokens[1] != found[2].tokens[1], "prompts have seeds of their own"
    for asked_path, asked in requests:
        words = asked["sampling_params"]
        assert asked_path == path
        assert {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "n": 2}.items() <= words.items()
        assert words["stop_token_ids"] == [9] and words["ignore_eos"]
    assert sorted(asked.get("token_ids") or asked["input_ids"] for _, asked in requests) == sorted(PROMPTS)


@pytest.mark.parametrize("status", [None, 500])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_refuses_or_leaves_is_named(kind, status):
    with http_server(lambda request, text: status and (status, b"out of memory")) as url:
        engine = HttpEngine(kind, url, timeout_s=5)
        engine.ask(PROMPTS, Sampling(max_tokens=2))
        with pytest.raises(RolloutError, match=f"{kind} at {url} failed: .*" + ("out of memory" if status else "")):
            engine.collect()
        engine.close()
