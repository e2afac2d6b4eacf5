"""``sample``: responses of a causal language model with a KV cache, and the log-probability of every token.

Prompts of one length run together, without padding: a row's numbers are those of the row alone, up to rounding. Weights
may change between two tokens; the cache is of the weights that made it, so it is made again then, and every token's
log-probability is that of one version of the weights, given all tokens before it:

    tokens    p0 p1 p2 | a0 a1 | a2 a3 a4
    version              7  7    8  8  8       spans [(7, 2), (8, 3)]
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from fsdp2x.base.arguments import checked

Version = int | str | None


@checked
@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    Attributes:
        max_tokens: of a response, at least 1.
        num_samples: responses for each prompt.
        temperature: logits are divided by it, log-probabilities are of the result; 0 takes the likeliest token, with
            log-probabilities at temperature 1.
        stop_ids: tokens that end a response; the last token of it.
        seed: the same seed, prompts and weights give the same responses.
    """

    max_tokens: int
    num_samples: int = 1
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses what cannot be drawn.

        Raises:
            ValueError: names the value.
        """
        for name, least in (("max_tokens", 1), ("num_samples", 1), ("seed", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"Sampling: {name} must be at least {least}, got {value}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"Sampling: temperature must be finite and at least 0, got {self.temperature}")


FIELDS = tuple(field.name for field in fields(Sampling))


@dataclass(frozen=True)
class Completion:
    """One response to a prompt.

    Attributes:
        prompt: index of its prompt among those that were given.
        tokens: of the response.
        log_probs: of each of them when it was drawn.
        spans: (version of the weights, number of tokens that it drew), in order.
        admitted: the version when the request was taken up.
    """

    prompt: int
    tokens: list[int]
    log_probs: list[float]
    spans: list[tuple[Version, int]]
    admitted: Version

    @property
    def versions(self) -> list[Version]:
        """Of each token."""
        return [version for version, count in self.spans for _ in range(count)]


def _unchanging() -> AbstractContextManager[Version]:
    return contextlib.nullcontext(None)


def check_prompts(model: nn.Module, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """
    Raises:
        ValueError: a prompt is empty, has tokens outside of the vocabulary, or leaves no room for the response.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    limit = getattr(config, "max_position_embeddings", None)
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty; begin it with a token")
        if min(prompt) < 0 or max(prompt) >= config.vocab_size:
            raise ValueError(
                f"prompt {index} has the token {min(prompt) if min(prompt) < 0 else max(prompt)}; the vocabulary has "
                f"{config.vocab_size}"
            )
        if limit is not None and len(prompt) + sampling.max_tokens > limit:
            raise ValueError(
                f"prompt {index} of {len(prompt)} tokens and max_tokens={sampling.max_tokens} exceed the model's "
                f"{limit} positions"
            )


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    weights: Callable[[], AbstractContextManager[Version]] = _unchanging,
) -> list[Completion]:
    """Responses to ``prompts``, ``num_samples`` for each, those of one prompt behind each other.

    Runs ``model`` as it is: in evaluation mode, unsharded, on one device.

    Args:
        model: a transformers model with a language-model head.
        prompts: token ids.
        sampling: how to draw.
        weights: entered around each forward, gives the version of the weights meanwhile. Between two forwards they may
            become those of another version.

    Raises:
        ValueError: a prompt that cannot be continued.
    """
    check_prompts(model, prompts, sampling)
    with weights() as admitted:
        device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(sampling.seed)
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    found: list[list[Completion]] = [[] for _ in prompts]
    for members in by_length.values():
        rows = torch.tensor([list(prompts[index]) for index in members], device=device)
        drawn = _Rows(model, rows, sampling, generator)
        drawn.run(weights)
        for place, (tokens, log_probs, spans) in enumerate(drawn.results()):
            index = members[place // sampling.num_samples]
            found[index].append(Completion(index, tokens, log_probs, spans, admitted))
    return [completion for of_prompt in found for completion in of_prompt]


class _Rows:
    """Prompts of one length, and their responses as far as they have come."""

    def __init__(self, model: nn.Module, prompts: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> None:
        self._model, self._sampling, self._generator = model, sampling, generator
        self._prompts = prompts
        self._tokens = prompts.repeat_interleave(sampling.num_samples, 0)  # of the rows that go on
        num_rows = self._tokens.shape[0]
        self._running = torch.arange(num_rows, device=prompts.device)
        self._made = prompts.new_zeros(num_rows, sampling.max_tokens)
        self._log_probs = torch.zeros(num_rows, sampling.max_tokens, device=prompts.device)
        self._lengths = prompts.new_full((num_rows,), sampling.max_tokens)
        self._stops = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=prompts.device)
        self._versions: list[Version] = []
        self._cache: Any = None  # of transformers

    def run(self, weights: Callable[[], AbstractContextManager[Version]]) -> None:
        for step in range(self._sampling.max_tokens):
            with weights() as version:
                if self._versions and version != self._versions[-1]:
                    self._cache = None
                logits = self._next_logits(is_first=step == 0)
            self._versions.append(version)
            self._draw(step, logits.float())
            if not len(self._running):
                return

    def _next_logits(self, is_first: bool) -> torch.Tensor:
        """[rows that go on, vocabulary]; makes the cache where there is none."""
        if is_first:
            inputs = self._prompts  # a prompt is run once for all its responses
        else:
            inputs = self._tokens if self._cache is None else self._tokens[:, -1:]
        output = self._model(input_ids=inputs, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache, logits = output.past_key_values, output.logits[:, -1]
        if is_first and self._sampling.num_samples > 1:
            self._cache.batch_repeat_interleave(self._sampling.num_samples)
            logits = logits.repeat_interleave(self._sampling.num_samples, 0)
        return logits

    def _draw(self, step: int, logits: torch.Tensor) -> None:
        temperature = self._sampling.temperature
        log_probs = (logits / temperature if temperature > 0 else logits).log_softmax(-1)
        if temperature > 0:
            chosen = torch.multinomial(log_probs.exp(), 1, generator=self._generator)
        else:
            chosen = log_probs.argmax(-1, keepdim=True)
        self._made[self._running, step] = chosen[:, 0]
        self._log_probs[self._running, step] = log_probs.gather(-1, chosen)[:, 0]
        self._tokens = torch.cat((self._tokens, chosen), 1)
        if not len(self._stops):
            return
        ends = torch.isin(chosen[:, 0], self._stops)
        if ends.any():
            self._lengths[self._running[ends]] = step + 1
            going = (~ends).nonzero()[:, 0]
            self._running, self._tokens = self._running[going], self._tokens[going]
            if len(going):
                self._cache.batch_select_indices(going)

    def results(self) -> list[tuple[list[int], list[float], list[tuple[Version, int]]]]:
        """(tokens, log-probabilities, spans) of each row."""
        found = []
        for tokens, log_probs, length in zip(
            self._made.tolist(), self._log_probs.tolist(), self._lengths.tolist(), strict=True
        ):
            spans = [(version, len(list(run))) for version, run in itertools.groupby(self._versions[:length])]
            found.append((tokens[:length], log_probs[:length], spans))
        return found
