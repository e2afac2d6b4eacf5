"""``rollout_func``: draws the samples of TRL's ``GRPOTrainer``, with fsdp2x's sampler or a vLLM or SGLang server."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import torch

from fsdp2x.api import unit_states, unsharded
from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import problems_of_all
from fsdp2x.rl.rollout.batch import sample
from fsdp2x.rl.rollout.sampling import Sampling
from fsdp2x.rl.sync.session import Session, connect
from fsdp2x.rl.sync.targets.routes import Routes, server_addresses
from fsdp2x.rl.sync.targets.sglang import Sglang
from fsdp2x.rl.sync.targets.vllm import Vllm

_CALLER = "fsdp2x.rl.rollout_func"
_ADAPTER = "fsdp2x"  # name of a pushed adapter in requests
_MOST_REQUESTS = 64
_SEEDS = 2**31


class Drawn(NamedTuple):
    """A response: its tokens, their log-probabilities, and the largest ones at its first token."""

    tokens: list[int]
    log_probs: list[float]
    largest: list[float]


@checked
def rollout_func(
    address: str | Sequence[str] | None = None,
    *,
    engine: Literal["vllm", "sglang"] = "vllm",
    group: Literal["gloo", "nccl"] | None = None,
    weights: Literal["all", "adapter"] = "all",
    dtype: torch.dtype | None = None,
    timeout_s: float = 300.0,
) -> Callable[[list, Any], dict[str, list]]:
    """Returns a ``rollout_func`` for TRL's ``GRPOTrainer``.

        GRPOTrainer(..., rollout_func=fsdp2x.rl.rollout_func())                         in the trainer's processes
        GRPOTrainer(..., rollout_func=fsdp2x.rl.rollout_func("http://127.0.0.1:8000"))  with a vLLM server

    Without ``address``, each rank draws its samples with fsdp2x's sampler, inside ``fsdp2x.unsharded``. With a server,
    it pushes the weights through ``fsdp2x.sync`` whenever they have changed, then sends one request for each sample.

    It follows the config's ``max_completion_length``, ``temperature``, ``top_p``, ``top_k``, and ``min_p``, and the
    trainer's end tokens, which are those of tokenizer and generation config. Each sample has its own random numbers,
    which the config's ``seed``, the step, the rank, and the sample's place in the batch determine.

    Args:
        address: one server or several, the same on every rank. See ``fsdp2x.sync.Vllm`` and ``Sglang`` for how to start
            them. None: no server.
        engine: kind of the servers.
        group: see ``fsdp2x.sync.Vllm`` and ``Sglang``.
        weights: ``"all"`` pushes all weights, with LoRA adapters merged. ``"adapter"`` pushes only the LoRA adapter.
        dtype: see ``fsdp2x.sync.connect``.
        timeout_s: seconds to wait for a server's answer.

    Returns:
        A function of TRL's prompts and trainer. It returns ``prompt_ids``, ``completion_ids``, and ``logprobs``, which
        are log-probabilities at the temperature, before ``top_p``, ``top_k``, and ``min_p``. It raises on every rank:
        ValueError if the config has a setting that it does not support, or if the server returns other
        log-probabilities, and RuntimeError if sampling fails.
    """
    if address is None:
        return _Rollout(_Colocated())
    return _Rollout(_Servers(server_addresses(_CALLER, address, 8000), engine, group, weights, dtype, timeout_s))


class _Rollout:
    def __init__(self, sampler: _Colocated | _Servers) -> None:
        self._sampler = sampler
        self._place: tuple = ()
        self._num_calls = 0

    def __call__(self, prompts: list, trainer: Any) -> dict[str, list]:
        sampling = _sampling_of(trainer)
        place = (trainer.args.seed, trainer.model.training, trainer.state.global_step)
        self._num_calls = self._num_calls + 1 if place == self._place else 0
        self._place = place
        seed = int.from_bytes(hashlib.blake2b(repr((*place, self._num_calls)).encode(), digest_size=8).digest())
        self._sampler.prepare(trainer)
        prompt_ids, drawn, caught = [], [], None
        try:
            prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
            if images is not None:
                raise NotImplementedError("prompts with images are not supported")
            drawn = self._sampler.draw(trainer, prompt_ids, sampling, seed)
        except Exception as error:
            caught = error
        said = problems_of_all(None if caught is None else f"{type(caught).__name__}: {caught}", None, _CALLER)
        if said:
            raise (ValueError if isinstance(caught, ValueError) else RuntimeError)(f"{_CALLER}: {said}") from caught
        completions, log_probs = [one.tokens for one in drawn], [one.log_probs for one in drawn]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": log_probs}


def _sampling_of(trainer: Any) -> dict[str, Any]:
    """Returns the arguments of ``Sampling``, or raises ``ValueError`` for a setting that is not supported."""
    unsupported = {
        "use_vllm": trainer.use_vllm,
        "use_transformers_continuous_batching": trainer.use_transformers_continuous_batching,
        "repetition_penalty": trainer.repetition_penalty != 1.0 and trainer.repetition_penalty,
        "generation_kwargs": trainer.args.generation_kwargs,
        "cache_implementation": trainer.args.cache_implementation,
        "tools": trainer.tools,
        "environment_factory": trainer.environment_factories,
    }
    for name, value in unsupported.items():
        if value:
            raise ValueError(f"{_CALLER} does not support {name}={value}. Leave it out.")
    return {
        "max_tokens": trainer.max_completion_length,
        "temperature": trainer.temperature,
        "stop_ids": tuple(trainer.eos_token_ids),
        "top_p": trainer.top_p,
        "top_k": trainer.top_k or 0,
        "min_p": trainer.min_p or 0.0,
    }


class _Colocated:
    """Draws with the trainer's model."""

    def prepare(self, trainer: Any) -> None:
        """Does nothing: the model has its weights."""

    def draw(self, trainer: Any, prompts: Sequence[list[int]], sampling: dict[str, Any], seed: int) -> Sequence[Drawn]:
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        # A group of equal prompts shares its keys and values, if all groups are of one size.
        groups = [(prompt, len(list(rows))) for prompt, rows in itertools.groupby(prompts)]
        if len({size for _, size in groups}) > 1:
            groups = [(prompt, 1) for prompt in prompts]
        rank = trainer.accelerator.process_index
        settings = Sampling(**sampling, num_samples=groups[0][1], seed=seed << 32 | rank)
        was_training = model.training
        with (
            unsharded(trainer.model_wrapped) if unit_states(trainer.model_wrapped) else contextlib.nullcontext(),
            trainer.accelerator.autocast(),
        ):
            model.eval()
            try:
                base = model.get_base_model() if hasattr(model, "get_base_model") else model
                found = sample(base, [prompt for prompt, _ in groups], settings)
            finally:
                model.train(was_training)
        return [Drawn(one.tokens, one.log_probs, []) for one in found]


class _Servers:
    """Pushes weights to servers and draws with them."""

    def __init__(self, addresses: Sequence[str], engine: str, group: Any, weights: Any, dtype: Any, timeout_s: float):
        kind: Any = Vllm if engine == "vllm" else Sglang
        self._target = kind(addresses, group=group)
        self._routes = [Routes(address, f"start {kind.__name__} with its HTTP server") for address in addresses]
        for routes in self._routes:
            routes.timeout_s = timeout_s
        self._ask = _ask_vllm if engine == "vllm" else _ask_sglang
        self._weights, self._dtype, self._timeout_s = weights, dtype, timeout_s
        self._session: Session | None = None
        self._pushed: int | None = None
        self._is_checked = False

    def prepare(self, trainer: Any) -> None:
        """Pushes weights that have changed. Collective."""
        step = trainer.state.global_step
        if self._session is None:
            is_adapter = self._weights == "adapter"
            options: dict[str, Any] = {"weights": "adapter", "adapter_name": _ADAPTER} if is_adapter else {}
            if not is_adapter and hasattr(trainer.accelerator.unwrap_model(trainer.model_wrapped), "peft_config"):
                options["merge_adapters"] = True
            model, self._pushed = trainer.model_wrapped, None
            self._session = connect(model, self._target, dtype=self._dtype, timeout_s=self._timeout_s, **options)
            trainer.add_callback(_closer(self))
        if self._pushed != step:
            self._session.push(version=step)
            self._pushed = step

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def draw(self, trainer: Any, prompts: Sequence[list[int]], sampling: dict[str, Any], seed: int) -> Sequence[Drawn]:
        rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
        routes = self._routes[rank % len(self._routes)]
        settings = Sampling(**sampling)
        name = _ADAPTER if self._weights == "adapter" else None
        if name is None and self._ask is _ask_vllm:
            name = routes.ask("GET", "/v1/models")["data"][0]["id"]
        if not self._is_checked:
            self._check(lambda settings: self._ask(routes, name, prompts[0], settings, 0), settings)
            self._is_checked = True

        def ask(index: int) -> Drawn:
            # A request for several samples would give them one seed.
            return self._ask(routes, name, prompts[index], settings, (seed + index * world + rank) % _SEEDS)

        with ThreadPoolExecutor(_MOST_REQUESTS, thread_name_prefix="fsdp2x-rollout") as pool:
            return list(pool.map(ask, range(len(prompts))))

    def _check(self, ask: Callable[[Sampling], Drawn], sampling: Sampling) -> None:
        """Raises ``ValueError`` if the server's log-probabilities are not those at the temperature."""
        plain, hot = (ask(Sampling(max_tokens=1, temperature=temperature)).largest for temperature in (1.0, 2.0))
        spread, hot_spread = max(plain) - min(plain), max(hot) - min(hot)
        follows_temperature = abs(hot_spread - spread / 2) <= abs(hot_spread - spread)
        if sampling.temperature != 1 and not follows_temperature:
            raise ValueError(
                f"temperature={sampling.temperature}: the server returns log-probabilities at temperature 1. Set that, "
                "or start vLLM with --logprobs-mode processed_logprobs."
            )
        if sampling.truncates:
            (cut,) = ask(Sampling(max_tokens=1, top_k=1)).log_probs
            if abs(cut) < abs(cut - max(plain)):
                raise ValueError(
                    "the server returns log-probabilities after top_p, top_k, and min_p. Leave these settings out, or "
                    "set temperature to 1 and start vLLM with --logprobs-mode raw_logprobs."
                )


def _closer(servers: _Servers) -> Any:
    from transformers import TrainerCallback

    class Closer(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            servers.close()

    return Closer()


def _ask_vllm(routes: Routes, name: str | None, prompt: list[int], sampling: Sampling, seed: int) -> Drawn:
    body = {
        **_common(sampling),
        "model": name,
        "prompt": prompt,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
        "logprobs": 5,
        "return_token_ids": True,
    }
    choice = routes.ask("POST", "/v1/completions", body=body)["choices"][0]
    found = choice["logprobs"]
    return Drawn(choice["token_ids"], found["token_logprobs"], list(found["top_logprobs"][0].values()))


def _ask_sglang(routes: Routes, name: str | None, prompt: list[int], sampling: Sampling, seed: int) -> Drawn:
    words = {**_common(sampling), "max_new_tokens": sampling.max_tokens, "sampling_seed": seed}
    body = {"input_ids": prompt, "sampling_params": words, "return_logprob": True, "top_logprobs_num": 5}
    meta = routes.ask("POST", "/generate", body=body | ({"lora_path": name} if name else {}))["meta_info"]
    drawn = meta["output_token_logprobs"]
    largest = [float(entry[0]) for entry in meta["output_top_logprobs"][0]]
    return Drawn([int(entry[1]) for entry in drawn], [float(entry[0]) for entry in drawn], largest)


def _common(sampling: Sampling) -> dict[str, Any]:
    words: dict[str, Any] = {"temperature": sampling.temperature, "stop_token_ids": list(sampling.stop_ids or ())}
    words |= {"ignore_eos": True, "skip_special_tokens": False}
    cuts = {"top_p": (sampling.top_p, 1.0), "top_k": (sampling.top_k, 0), "min_p": (sampling.min_p, 0.0)}
    return words | {name: value for name, (value, off) in cuts.items() if value != off}
