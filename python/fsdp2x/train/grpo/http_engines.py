"""Uses vLLM and SGLang servers as engines: sends token ids, and gets token ids with log-probabilities.

vLLM (0.32 and later) answers at `/inference/v1/generate` with the version of the weights of each token. SGLang answers
at `/generate` with one version for a response.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import torch.distributed as dist

from fsdp2x.base.failures import problems_of_all
from fsdp2x.rl.rollout.client import RolloutError
from fsdp2x.rl.rollout.sampling import Completion, Sampling, Version
from fsdp2x.rl.sync.targets.base import EngineTarget
from fsdp2x.rl.sync.targets.sglang import Sglang
from fsdp2x.rl.sync.targets.vllm import Vllm

# Name of a pushed adapter in requests.
ADAPTER = "fsdp2x"
MOST_REQUESTS = 64
_SEEDS = 1 << 31


class HttpEngine:
    """Requests to a server, with the methods of `fsdp2x.rollout.RolloutClient`. Every rank has one."""

    def __init__(
        self, kind: Literal["vllm", "sglang"], url: str, *, adapter: str | None = None, timeout_s: float
    ) -> None:
        """`adapter`: name of the pushed adapter to sample with. None: full weights are pushed."""
        self._adapter = adapter
        self._kind, self._url, self._timeout_s = kind, url.rstrip("/"), timeout_s
        self._pool = ThreadPoolExecutor(MOST_REQUESTS, thread_name_prefix="fsdp2x-http")
        self._asked: list[Future] | None = None
        #: Target for `fsdp2x.sync.connect` with `names="hf"`.
        self.target: EngineTarget = Vllm(self._url) if kind == "vllm" else Sglang(self._url)

    def ask(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Returns at once. Threads send requests, so the server never waits for a trainer that pushes to it."""
        if self._asked is not None:
            raise RuntimeError("HttpEngine.ask: collect() the answer to the last request first")
        draw = self._draw_vllm if self._kind == "vllm" else self._draw_sglang
        self._asked = [self._pool.submit(draw, index, list(prompt), sampling) for index, prompt in enumerate(prompts)]

    def collect(self) -> list[Completion]:
        """Returns the answers, in the order of the prompts. Collective.

        Raises:
            RolloutError: on every rank if the server rejected a request of one of them, or is gone.
        """
        if self._asked is None:
            raise RuntimeError("HttpEngine.collect: ask(...) first")
        asked, self._asked = self._asked, None
        found, problem = [], None
        for future in asked:
            try:
                found += future.result()
            except Exception as error:
                problem = problem or f"{type(error).__name__}: {error}"
        said = problem or ""
        if dist.is_initialized():
            said = problems_of_all(problem, None, "rollout (sample)")
        if said:
            raise RolloutError(f"{self._kind} at {self._url} failed: {said}")
        return found

    def close(self) -> None:
        """Returns without waiting for answers. The owner of the server ends it."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _draw_vllm(self, index: int, prompt: list[int], sampling: Sampling) -> list[Completion]:
        words = {
            **_common(sampling),
            "max_tokens": sampling.max_tokens,
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
            "seed": (sampling.seed * 4099 + index) % _SEEDS,
        }
        answer = self._post(
            "/inference/v1/generate",
            {"model": self._adapter or "policy", "token_ids": prompt, "sampling_params": words},
        )
        found = []
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
            spans: list[tuple[Version, int]] = [
                (int(span["version"]), span["end"] - span["start"]) for span in choice["weight_versions"]
            ]
            log_probs = [content["logprob"] for content in choice["logprobs"]["content"]]
            found.append(Completion(index, choice["token_ids"], log_probs, spans, spans[0][0]))
        return found

    def _draw_sglang(self, index: int, prompt: list[int], sampling: Sampling) -> list[Completion]:
        words = {
            **_common(sampling),
            "max_new_tokens": sampling.max_tokens,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "sampling_seed": (sampling.seed * 4099 + index) % _SEEDS,
        }
        body = {"input_ids": prompt, "sampling_params": words, "return_logprob": True}
        answer: Any = self._post("/generate", body | ({"lora_path": self._adapter} if self._adapter else {}))
        found = []
        for choice in answer if isinstance(answer, list) else [answer]:
            meta = choice["meta_info"]
            drawn = meta["output_token_logprobs"]
            version = int(meta["weight_version"])
            tokens, log_probs = [int(entry[1]) for entry in drawn], [float(entry[0]) for entry in drawn]
            found.append(Completion(index, tokens, log_probs, [(version, len(tokens))], version))
        return found

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with opener.open(request, timeout=self._timeout_s) as response:
                return json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{error}: {error.read().decode(errors='replace')[:400]}") from None


def _common(sampling: Sampling) -> dict[str, Any]:
    words: dict[str, Any] = {
        "n": sampling.num_samples,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.stop_ids or ()),
    }
    if sampling.top_p < 1:
        words["top_p"] = sampling.top_p
    if sampling.top_k:
        words["top_k"] = sampling.top_k
    return words
