"""``Sampling`` and ``Completion``: settings of the sampler, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fsdp2x.base.arguments import checked


@checked
@dataclass(frozen=True)
class Sampling:
    """Settings of sampling.

    ``seed``, the index of the prompt and the number of the sample determine the random numbers of a response. So it
    does not depend on other responses, unless rounding decides between two tokens. The order is ``temperature``,
    ``top_k``, ``top_p`` of the rest, and ``min_p``.

    Attributes:
        max_tokens: most tokens of a response, at least 1.
        num_samples: number of responses for each prompt.
        temperature: divisor of the logits. 0 takes the most likely token.
        stop_ids: tokens that end a response, as its last token.
        seed: seed of the random numbers. Equal seeds, prompts and weights give equal responses, so ranks with the same
            prompts need different seeds.
        top_p: sum of probabilities of the smallest set of most likely tokens to draw from. 1: all.
        top_k: number of most likely tokens to draw from, plus those as likely as the last. 0: all.
        min_p: least probability of a token, as a fraction of the most likely one's. 0: all.

    Log-probabilities are those at the temperature, before ``top_k``, ``top_p``, and ``min_p``. ``fsdp2x.rl.score``
    computes the same, and importance ratios need them. At temperature 0 they are those of temperature 1.
    """

    max_tokens: int
    num_samples: int = 1
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            ValueError: a value is out of range. The message names it.
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


@dataclass(frozen=True)
class Completion:
    """One response to a prompt.

    Attributes:
        prompt: index of its prompt.
        tokens: token ids of the response.
        log_probs: log-probability of each token when it was drawn.
    """

    prompt: int
    tokens: list[int]
    log_probs: list[float]


def check_prompts(model: nn.Module, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Checks prompts against the model.

    Raises:
        TypeError: a prompt has something else than token ids.
        ValueError: a prompt is empty, has tokens outside of the vocabulary, or leaves no room for the response.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    limit = getattr(config, "max_position_embeddings", None)
    for index, prompt in enumerate(prompts):
        if not all(isinstance(token, int) for token in prompt):
            raise TypeError(f"prompt {index} must be a list of token ids, got {prompt!r:.80}. Use the tokenizer first.")
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty. Begin it with a token.")
        if min(prompt) < 0 or max(prompt) >= config.vocab_size:
            raise ValueError(
                f"prompt {index} has the token {min(prompt) if min(prompt) < 0 else max(prompt)}, but the vocabulary "
                f"has {config.vocab_size}"
            )
        if limit is not None and len(prompt) + sampling.max_tokens > limit:
            raise ValueError(
                f"prompt {index} of {len(prompt)} tokens and max_tokens={sampling.max_tokens} exceed the model's "
                f"{limit} positions"
            )
