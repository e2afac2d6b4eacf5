"""``Sampling`` and ``Completion``: what is asked of an engine, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from torch import nn

from fsdp2x.base.arguments import checked

Version = int | str | None


@checked
@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    Each response has a stream of random numbers, which ``seed``, the index of the prompt and the number of the sample
    determine. So it does not depend on what else the engine samples, except where rounding decides between two tokens.
    The order is ``temperature``, ``top_k``, ``top_p`` of what is left, and ``min_p``.

    Attributes:
        max_tokens: of a response, at least 1.
        num_samples: responses for each prompt.
        temperature: logits are divided by it. 0 takes the likeliest token.
        stop_ids: tokens that end a response; the last token of it. None: those of the engine, by default none.
        seed: the same seed, prompts and weights give the same responses. Ranks that sample the same prompts need
            different ones.
        top_p: draws from the smallest set of likeliest tokens whose probabilities add up to this. 1: from all.
        top_k: draws from so many of the likeliest tokens, and those as likely as the last of them. 0: from all.
        min_p: draws from tokens with at least this share of the likeliest one's probability. 0: from all.

    Log-probabilities are those of the distribution at the temperature, before ``top_k``, ``top_p`` and ``min_p``: what
    ``fsdp2x.rl.score`` computes with the same temperature, and importance ratios need. At temperature 0 they are those
    of temperature 1.
    """

    max_tokens: int
    num_samples: int = 1
    temperature: float = 1.0
    stop_ids: tuple[int, ...] | None = None
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Refuses what cannot be drawn.

        Raises:
            ValueError: names the value.
        """
        for name, least in (("max_tokens", 1), ("num_samples", 1), ("seed", 0), ("top_k", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"Sampling: {name} must be at least {least}, got {value}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"Sampling: temperature must be finite and at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Sampling: top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"Sampling: min_p must be from 0 to 1, got {self.min_p}")

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


FIELDS = tuple(one.name for one in fields(Sampling))


@dataclass(frozen=True)
class Completion:
    """One response to a prompt.

    Attributes:
        prompt: index of its prompt among those that were given.
        tokens: of the response.
        log_probs: of each of them when it was drawn.
        spans: (version of the weights, number of tokens that it drew), in order.
        admitted: the version when the request was taken up.
        prompt_tokens: of the prompt, also where it was text.
        text: of the response without special tokens, where the engine has a tokenizer.
    """

    prompt: int
    tokens: list[int]
    log_probs: list[float]
    spans: list[tuple[Version, int]]
    admitted: Version
    prompt_tokens: list[int] = field(default_factory=list)
    text: str | None = None

    @property
    def versions(self) -> list[Version]:
        """Of each token."""
        return [version for version, count in self.spans for _ in range(count)]


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
