"""``Batch`` and ``sample``: draw responses of a causal language model, for many requests in one batch.

Rows of finished responses leave the batch and waiting ones join it between two tokens. Weights may also change there.
The cache holds keys and values of the weights that made it, so a change computes it again. Every token's
log-probability belongs to one version of the weights, given all tokens before it:

    tokens    p0 p1 p2 | a0 a1 | a2 a3 a4
    version              7  7    8  8  8       spans [(7, 2), (8, 3)]
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fsdp2x.rl.rollout.cache import RowCache
from fsdp2x.rl.rollout.draw import draw, uniforms
from fsdp2x.rl.rollout.sampling import Completion, Sampling, Version, check_prompts
from fsdp2x.rl.rollout.text import Prompt, prompt_ids, response_text

MAX_BATCH_ROWS = 256
MAX_BATCH_TOKENS = 65536
# Tokens of one forward over prompts, with padding. More take memory and save no time.
_FILL_TOKENS = 4096


def _unchanging() -> AbstractContextManager[Version]:
    return contextlib.nullcontext(None)


class Request:
    """Prompts with their settings, and the responses so far."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, admitted: Version, numbers: Sequence[int]
    ) -> None:
        self.sampling, self.admitted, self.stops = sampling, admitted, frozenset(sampling.stop_ids or ())
        self.rows = [
            Row(self, index, list(prompt), number, sample)
            for index, (prompt, number) in enumerate(zip(prompts, numbers, strict=True))
            for sample in range(sampling.num_samples)
        ]
        self.num_open = len(self.rows)

    def completions(self, tokenizer: Any | None = None) -> list[Completion]:
        """Returns the completions, those of one prompt in sequence."""
        found = []
        for row in self.rows:
            prompt, tokens = row.tokens[: row.num_prompt], row.tokens[row.num_prompt :]
            text = response_text(tokenizer, tokens)
            found.append(Completion(row.prompt, tokens, row.log_probs, row.spans, self.admitted, prompt, text))
        return found


class Row:
    """A prompt and one response to it."""

    def __init__(self, request: Request, prompt: int, tokens: list[int], number: int, sample: int) -> None:
        settings = request.sampling
        self.request, self.prompt, self.tokens, self.num_prompt = request, prompt, tokens, len(tokens)
        self.log_probs: list[float] = []
        self.spans: list[tuple[Version, int]] = []
        self.limit = len(tokens) + settings.max_tokens
        is_drawn = settings.temperature > 0
        self.noise = uniforms(settings.seed, number, sample, settings.max_tokens) if is_drawn else None

    def append(self, token: int, log_prob: float, version: Version) -> bool:
        """Appends a token. Returns whether the response ends with it."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + 1)
        else:
            self.spans.append((version, 1))
        return token in self.request.stops or len(self.tokens) == self.limit


class Batch:
    """Rows that run in ``model``, and rows that wait for a place. ``step`` draws a token of each running row."""

    def __init__(
        self,
        model: nn.Module,
        weights: Callable[[], AbstractContextManager[Version]] = _unchanging,
        *,
        max_rows: int = MAX_BATCH_ROWS,
        max_tokens: int = MAX_BATCH_TOKENS,
    ) -> None:
        """Makes an empty batch.

        Args:
            model: see ``sample``.
            weights: see ``sample``.
            max_rows: number of rows that run together.
            max_tokens: limit of running rows times their longest prompt and ``max_tokens``. It bounds the memory of
                keys and values, plus up to a quarter of spare columns.

        Raises:
            ValueError: a limit is below 1.
        """
        if max_rows < 1 or max_tokens < 1:
            raise ValueError(
                f"fsdp2x.rollout: max_batch_rows and max_batch_tokens must be at least 1, got {max_rows}, {max_tokens}"
            )
        self._model, self._weights, self._max_rows, self._max_tokens = model, weights, max_rows, max_tokens
        self._rows: list[Row] = []  # those with a place; the first ones are in the cache, in this order
        self._waiting: deque[Row] = deque()
        self._cache: RowCache | None = None
        self._num_cached = 0
        self._version: Version = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to draw."""
        return not self._rows and not self._waiting

    def add(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, numbers: Sequence[int] | None = None
    ) -> Request:
        """Adds a request. One without prompts is complete at once, and ``step`` does not return it.

        Args:
            prompts: token ids.
            sampling: sampling settings.
            numbers: index of each prompt for its random numbers. None: 0, 1, and so on.

        Raises:
            ValueError: a prompt cannot be continued, or does not fit into ``max_tokens``.
        """
        check_prompts(self._model, prompts, sampling)
        with self._weights() as admitted:
            request = Request(prompts, sampling, admitted, range(len(prompts)) if numbers is None else numbers)
        longest = max((row.limit for row in request.rows), default=0)
        if longest > self._max_tokens:
            raise ValueError(
                f"a prompt and max_tokens={sampling.max_tokens} need {longest} positions, but the engine has "
                f"max_batch_tokens={self._max_tokens}. Raise it, or lower max_tokens."
            )
        self._waiting.extend(request.rows)
        return request

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Draws one token of each running row. Returns the requests that it completes."""
        with self._weights() as version:
            if version != self._version:
                self.forget_cache()
                self._version = version
            self._admit()
            logits = torch.cat(list(self._logits())).float()
        self._num_cached = len(self._rows)
        noise = [0.0 if row.noise is None else row.noise[len(row.log_probs)] for row in self._rows]
        drawn = draw(logits, [row.request.sampling for row in self._rows], noise)
        tokens, log_probs = (values.tolist() for values in drawn)
        ended = []
        for row, token, log_prob in zip(self._rows, tokens, log_probs, strict=True):
            if row.append(token, log_prob, version):
                row.request.num_open -= 1
                ended.append(row)
        self._remove(ended)
        return [request for request in dict.fromkeys(row.request for row in ended) if not request.num_open]

    def forget_cache(self) -> None:
        """Computes keys and values again before the next token, because the weights have changed."""
        self._cache, self._num_cached = None, 0

    def drop(self, request: Request) -> None:
        """Drops a request whose trainer no longer waits."""
        self._waiting = deque(row for row in self._waiting if row.request is not request)
        self._remove([row for row in self._rows if row.request is request])

    def clear(self) -> None:
        """Drops all requests."""
        self._rows, self._waiting = [], deque()
        self.forget_cache()

    def _admit(self) -> None:
        longest = max((row.limit for row in self._rows), default=0)
        while self._waiting and len(self._rows) < self._max_rows:
            longest = max(longest, self._waiting[0].limit)
            if (len(self._rows) + 1) * longest > self._max_tokens:
                return
            self._rows.append(self._waiting.popleft())

    def _logits(self) -> Iterator[torch.Tensor]:
        """Yields the logits of the next tokens, [rows, vocabulary], in the order of ``_rows``, then all cached."""
        cached, fresh = self._rows[: self._num_cached], self._rows[self._num_cached :]
        if self._cache is None:
            self._cache = RowCache(self._model)
        if cached:
            yield self._forward([row.tokens[-1:] for row in cached], [len(row.tokens) for row in cached], self._cache)
        self._rows = cached
        for group in _groups(fresh):
            sequences = [rows[0].tokens for rows in group]
            filled = RowCache(self._model)
            logits = self._forward(sequences, [len(tokens) for tokens in sequences], filled)
            index = torch.tensor([place for place, rows in enumerate(group) for _ in rows], device=logits.device)
            self._cache.join(filled, index)
            self._rows = [*self._rows, *(row for rows in group for row in rows)]
            yield logits[index]

    def _forward(self, tokens: list[list[int]], lengths: list[int], cache: RowCache) -> torch.Tensor:
        """Returns logits of the last tokens, [rows, vocabulary]. ``lengths`` are those of the cache and ``tokens``."""
        device = next(self._model.parameters()).device
        width = max(len(new) for new in tokens)
        columns = max(lengths)
        ids = torch.tensor([[0] * (width - len(new)) + new for new in tokens], device=device)
        first = columns - torch.tensor(lengths, device=device)[:, None]  # column of each row's first token
        places = torch.arange(columns, device=device)
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1}
        takes = _arguments(type(self._model))
        inputs["cache" if "cache" in takes else "past_key_values"] = cache.for_model
        if "position_ids" in takes:
            inputs["position_ids"] = (places[columns - width :] - first).clamp(min=0)
        if min(lengths) < columns:
            inputs["attention_mask"] = (places >= first).long()
        return self._model(**inputs).logits[:, -1]

    def _remove(self, rows: Sequence[Row]) -> None:
        """Removes rows. Rows at the end move to their places, so that rows in the cache stay together."""
        gone = {id(row) for row in rows}
        if not gone:
            return
        old = self._rows
        cached = [place for place in range(self._num_cached) if id(old[place]) not in gone]
        holes = [place for place in range(len(cached)) if id(old[place]) in gone]
        movers = [place for place in cached if place >= len(cached)]
        kept = old[: len(cached)]
        for hole, mover in zip(holes, movers, strict=True):
            kept[hole] = old[mover]
        self._rows = kept + [row for row in old[self._num_cached :] if id(row) not in gone]
        self._num_cached = len(cached)
        if not cached:
            self.forget_cache()
        elif self._cache is not None:
            self._cache.keep(holes, movers, len(cached), max(len(row.tokens) for row in kept) - 1)


def _groups(rows: Sequence[Row]) -> Iterator[list[list[Row]]]:
    """Yields forwards over full rows: sequences of similar lengths, each with the rows that share it."""
    shared: dict[Any, list[Row]] = {}
    for row in rows:
        # Responses to one prompt are equal only until their first token.
        shared.setdefault(id(row) if row.log_probs else (id(row.request), row.prompt), []).append(row)
    group: list[list[Row]] = []
    for alike in sorted(shared.values(), key=lambda alike: len(alike[0].tokens)):
        length = len(alike[0].tokens)
        if group and (len(group) + 1) * length > max(_FILL_TOKENS, length) or group and length > _similar(group):
            yield group
            group = []
        group.append(alike)
    if group:
        yield group


def _similar(group: list[list[Row]]) -> int:
    """Returns the longest sequence for a group, so that padding takes no more time than another forward."""
    return 2 * len(group[0][0].tokens) + 16


@functools.cache
def _arguments(kind: type[nn.Module]) -> frozenset[str]:
    """Returns the argument names of a model's forward. transformers 5.24 renamed ``past_key_values`` to ``cache``."""
    return frozenset(inspect.signature(kind.forward).parameters)


def sample(
    model: nn.Module,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    weights: Callable[[], AbstractContextManager[Version]] = _unchanging,
    max_batch_rows: int = MAX_BATCH_ROWS,
    max_batch_tokens: int = MAX_BATCH_TOKENS,
    tokenizer: Any | None = None,
) -> list[Completion]:
    """Draws ``num_samples`` responses for each of ``prompts``, those of one prompt in sequence.

    It runs ``model`` as it is: in evaluation mode, unsharded, on one device.

    Args:
        model: a transformers model with a language-model head, whose layers keep keys and values.
        prompts: token ids, or with ``tokenizer`` also text, or conversations as lists of messages.
        sampling: sampling settings.
        weights: a context manager around each forward that yields the version of the weights. They may change between
            two forwards.
        max_batch_rows: number of responses that are drawn together. Others wait.
        max_batch_tokens: limit of these responses times their longest prompt and ``max_tokens``, for memory.
        tokenizer: a transformers tokenizer, for prompts and answers as text.

    Returns:
        A completion for each response.

    Raises:
        ValueError: a prompt cannot be continued, or text lacks a tokenizer or chat template.
        NotImplementedError: layers keep other state, such as linear attention.
        FloatingPointError: logits are NaN or infinite.
    """
    batch = Batch(model, weights, max_rows=max_batch_rows, max_tokens=max_batch_tokens)
    request = batch.add(prompt_ids(tokenizer, prompts), sampling)
    while not batch.is_idle:
        batch.step()
    return request.completions(tokenizer)
