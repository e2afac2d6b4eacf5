"""``draw``: draws the next token of each row from its logits, with random numbers that belong to the response."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from fsdp2x.rl.rollout.sampling import Sampling

# Number of log-probabilities that are sorted first for top_p. Sorting a vocabulary takes longer than a small model.
_NUM_SORTED = 1024


def uniforms(seed: int, prompt: int, sample: int, count: int) -> list[float]:
    """Returns ``count`` numbers in [0, 1), one for each token of a response.

    The counter-based generator Philox (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3") makes them
    from the seed and the indices, whatever other responses are drawn.
    """
    words = np.random.Philox(key=seed % 2**128, counter=[0, sample, prompt, 0]).random_raw(count)
    return ((words >> np.uint64(11)) * 2.0**-53).tolist()


def draw(
    logits: torch.Tensor, settings: Sequence[Sampling], noise: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws the next token of each row, and returns it with its log-probability.

    A token is the first whose cumulative probability exceeds the row's random number, in the order of the vocabulary.

    Args:
        logits: float32, [rows, vocabulary].
        settings: sampling settings of each row.
        noise: random number in [0, 1) of each row.

    Returns:
        int64 [rows], and float32 [rows]: the log-probabilities at the temperature, before any truncation.

    Raises:
        FloatingPointError: logits are NaN or infinite.
    """
    temperatures = [one.temperature or 1.0 for one in settings]
    if set(temperatures) != {1.0}:
        logits = logits / logits.new_tensor(temperatures)[:, None]
    log_probs = logits.log_softmax(-1)
    drawn = [row for row, one in enumerate(settings) if one.temperature > 0]
    if len(drawn) < len(settings):
        chosen = log_probs.argmax(-1)
    else:
        chosen = torch.empty(len(settings), dtype=torch.int64, device=logits.device)
    if drawn:
        of_drawn = log_probs[drawn] if len(drawn) < len(settings) else log_probs
        probs = of_drawn.exp()
        lowest = _lowest_log_probs(of_drawn, [settings[row] for row in drawn])
        if lowest is not None:
            probs = probs.masked_fill(of_drawn < lowest[:, None], 0.0)
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1]
        target = cumulative.new_tensor([noise[row] for row in drawn]) * total
        target = torch.minimum(target, total.nextafter(torch.zeros_like(total)))  # the product may round up
        found = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
        chosen[drawn] = found.clamp(max=logits.shape[-1] - 1)  # it is beyond this only for NaN
    of_chosen = log_probs.gather(-1, chosen[:, None])[:, 0]
    if not of_chosen.isfinite().all():
        raise FloatingPointError("the model's logits are not finite. Check the weights and the engine's dtype.")
    return chosen, of_chosen


def _lowest_log_probs(log_probs: torch.Tensor, settings: Sequence[Sampling]) -> torch.Tensor | None:
    """Returns the lowest log-probability that each row may draw, [rows]. None: all tokens."""
    if not any(one.truncates for one in settings):
        return None
    num_rows, vocab_size = log_probs.shape
    lowest = log_probs.new_tensor([math.log(one.min_p) if one.min_p > 0 else -math.inf for one in settings])
    lowest += log_probs.amax(-1)
    width = max(one.top_k or (_NUM_SORTED if one.top_p < 1 else 0) for one in settings)
    if width == 0:
        return lowest
    top_p = log_probs.new_tensor([one.top_p for one in settings])
    has_k = torch.tensor([one.top_k > 0 for one in settings], device=log_probs.device)
    largest = log_probs.topk(min(width, vocab_size)).values
    if ((largest.exp().sum(-1) < top_p) & ~has_k & (top_p < 1)).any():
        largest = log_probs.sort(-1, descending=True).values
    limits = torch.tensor([one.top_k or vocab_size for one in settings], device=log_probs.device)
    is_kept = torch.arange(largest.shape[1], device=log_probs.device) < limits[:, None]
    probs = largest.exp() * is_kept
    probs = torch.where(has_k[:, None], probs / probs.sum(-1, keepdim=True), probs)
    is_kept &= (probs.cumsum(-1) - probs < top_p[:, None]) | (top_p == 1)[:, None]
    last = largest.gather(-1, is_kept.sum(-1, keepdim=True) - 1)[:, 0]
    return torch.where(has_k | (top_p < 1), torch.maximum(lowest, last), lowest)
