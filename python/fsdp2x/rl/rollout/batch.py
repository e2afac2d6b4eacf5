"""``sample``: draws responses of a causal language model, for many prompts in one batch.

Rows of finished responses leave the batch and waiting ones join it between two tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsdp2x.rl.rollout.cache import RowCache
from fsdp2x.rl.rollout.draw import draw, uniforms
from fsdp2x.rl.rollout.sampling import Completion, Sampling, check_prompts

# Tokens of one forward over prompts, with padding. More take memory and save no time.
_FILL_TOKENS = 4096


def sample(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_batch_rows: int = 256,
    max_batch_tokens: int = 65536,
) -> list[Completion]:
    """Draws ``num_samples`` responses for each of ``prompts``, those of one prompt in sequence.

        completions = rollout.sample(model, [[1, 2, 3], [4, 5]], rollout.Sampling(max_tokens=64, num_samples=8))

    It runs ``model`` as it is, on one device. Call ``model.eval()`` first. A sharded model samples inside
    ``fsdp2x.unsharded``, where each rank may have another number of prompts.

    Args:
        model: a transformers model with a language-model head, whose layers keep keys and values.
        prompts: token ids of each prompt.
        sampling: sampling settings.
        max_batch_rows: number of responses that are drawn together. Others wait.
        max_batch_tokens: limit of these responses times their longest prompt and ``max_tokens``. It bounds the memory
            of keys and values, plus up to a quarter of spare columns.

    Returns:
        A completion for each response.

    Raises:
        TypeError: a prompt has something else than token ids.
        ValueError: a prompt cannot be continued, does not fit into ``max_batch_tokens``, or a limit is below 1.
        NotImplementedError: layers keep other state, such as linear attention.
        FloatingPointError: logits are NaN or infinite.
    """
    if max_batch_rows < 1 or max_batch_tokens < 1:
        raise ValueError(
            f"fsdp2x.rollout.sample: max_batch_rows and max_batch_tokens must be at least 1, got {max_batch_rows}, "
            f"{max_batch_tokens}"
        )
    check_prompts(model, prompts, sampling)
    rows = [
        _Row(index, prompt, number, sampling)
        for index, prompt in enumerate(prompts)
        for number in range(sampling.num_samples)
    ]
    longest = max((row.limit for row in rows), default=0)
    if longest > max_batch_tokens:
        raise ValueError(
            f"fsdp2x.rollout.sample: a prompt and max_tokens={sampling.max_tokens} need {longest} positions, but "
            f"max_batch_tokens={max_batch_tokens}. Raise it, or lower max_tokens."
        )
    batch = _Batch(model, rows, sampling, max_batch_rows, max_batch_tokens)
    while not batch.is_empty:
        batch.step()
    return [Completion(row.prompt, row.tokens[row.num_prompt :], row.log_probs) for row in rows]


class _Row:
    """A prompt and one response to it."""

    def __init__(self, index: int, prompt: Sequence[int], number: int, sampling: Sampling) -> None:
        self.prompt, self.tokens, self.num_prompt = index, list(prompt), len(prompt)
        self.limit = len(prompt) + sampling.max_tokens
        self.log_probs: list[float] = []
        is_drawn = sampling.temperature > 0
        self.noise = uniforms(sampling.seed, index, number, sampling.max_tokens) if is_drawn else None


class _Batch:
    """Rows that run in ``model``, and rows that wait for a place. ``step`` draws a token of each running row."""

    def __init__(
        self, model: nn.Module, rows: Sequence[_Row], sampling: Sampling, max_rows: int, max_tokens: int
    ) -> None:
        self._model, self._sampling, self._stops = model, sampling, frozenset(sampling.stop_ids)
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._rows: list[_Row] = []  # in the order of the cache
        self._waiting = deque(rows)
        self._cache = RowCache(model)

    @property
    def is_empty(self) -> bool:
        return not self._rows and not self._waiting

    @torch.no_grad()
    def step(self) -> None:
        tokens, log_probs = self._draw(torch.cat(list(self._logits())).float())
        ended = []
        for row, token, log_prob in zip(self._rows, tokens, log_probs, strict=True):
            row.tokens.append(token)
            row.log_probs.append(log_prob)
            if token in self._stops or len(row.tokens) == row.limit:
                ended.append(row)
        self._remove(ended)

    def _draw(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        noise = [row.noise[len(row.log_probs)] for row in self._rows if row.noise is not None]
        tokens, log_probs = draw(logits, self._sampling, noise)
        return tokens.tolist(), log_probs.tolist()

    def _logits(self) -> Iterator[torch.Tensor]:
        """Lets waiting rows join. Yields the logits of the next tokens, [rows, vocabulary], in the order of rows."""
        joining = self._admitted()
        if self._rows:
            lengths = [len(row.tokens) for row in self._rows]
            yield self._forward([row.tokens[-1:] for row in self._rows], lengths, self._cache)
        for group in _groups(joining):
            prompts = [rows[0].tokens for rows in group]
            filled = RowCache(self._model)
            logits = self._forward(prompts, [len(prompt) for prompt in prompts], filled)
            index = torch.tensor([place for place, rows in enumerate(group) for _ in rows], device=logits.device)
            self._cache.join(filled, index)
            self._rows += [row for rows in group for row in rows]
            yield logits[index]

    def _admitted(self) -> list[_Row]:
        """Returns the waiting rows that join the batch now."""
        found: list[_Row] = []
        longest = max((row.limit for row in self._rows), default=0)
        while self._waiting and len(self._rows) + len(found) < self._max_rows:
            longest = max(longest, self._waiting[0].limit)
            if (len(self._rows) + len(found) + 1) * longest > self._max_tokens:
                break
            found.append(self._waiting.popleft())
        return found

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

    def _remove(self, ended: Sequence[_Row]) -> None:
        """Removes rows. Rows at the end move to their places."""
        gone = {id(row) for row in ended}
        num_kept = len(self._rows) - len(gone)
        if not num_kept:
            self._rows, self._cache = [], RowCache(self._model)
        elif gone:
            holes = [place for place in range(num_kept) if id(self._rows[place]) in gone]
            movers = [place for place in range(num_kept, len(self._rows)) if id(self._rows[place]) not in gone]
            for hole, mover in zip(holes, movers, strict=True):
                self._rows[hole] = self._rows[mover]
            del self._rows[num_kept:]
            self._cache.keep(holes, movers, num_kept, max(len(row.tokens) for row in self._rows) - 1)


def _groups(rows: Sequence[_Row]) -> Iterator[list[list[_Row]]]:
    """Yields forwards over prompts of similar lengths, each with the rows that share it."""
    shared: dict[int, list[_Row]] = {}
    for row in rows:
        shared.setdefault(row.prompt, []).append(row)
    group: list[list[_Row]] = []
    for alike in sorted(shared.values(), key=lambda alike: alike[0].num_prompt):
        length = alike[0].num_prompt
        # With prompts of twice the length, padding would take more time than another forward.
        if group and ((len(group) + 1) * length > _FILL_TOKENS or length > 2 * group[0][0].num_prompt + 16):
            yield group
            group = []
        group.append(alike)
    if group:
        yield group


@functools.cache
def _arguments(kind: type[nn.Module]) -> frozenset[str]:
    """Returns the argument names of a model's forward. transformers 5.24 renamed ``past_key_values`` to ``cache``."""
    return frozenset(inspect.signature(kind.forward).parameters)
