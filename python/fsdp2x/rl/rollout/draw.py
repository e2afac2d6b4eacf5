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


def draw(logits: torch.Tensor, sampling: Sampling, noise: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws the next token of each row, and returns it with its log-probability.

    A token is the first whose cumulative probability exceeds the row's random number, in the order of the vocabulary.

    Args:
        logits: float32, [rows, vocabulary].
        sampling: sampling settings.
        noise: random number in [0, 1) of each row. Not read at temperature 0.

    Returns:
        int64 [rows], and float32 [rows]: the log-probabilities at the temperature, before any truncation.

    Raises:
        FloatingPointError: logits are NaN or infinite.
    """
    log_probs = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
    if sampling.temperature == 0:
        chosen = log_probs.argmax(-1)
    else:
        probs = log_probs.exp()
        lowest = _lowest_log_probs(log_probs, sampling)
        if lowest is not None:
            probs = probs.masked_fill(log_probs < lowest[:, None], 0.0)
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1]
        target = cumulative.new_tensor(noise) * total
        target = torch.minimum(target, total.nextafter(torch.zeros_like(total)))  # the product may round up
        found = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
        chosen = found.clamp(max=logits.shape[-1] - 1)  # it is beyond this only for NaN
    of_chosen = log_probs.gather(-1, chosen[:, None])[:, 0]
    if not of_chosen.isfinite().all():
        raise FloatingPointError("the model's logits are not finite. Check its weights and dtype.")
    return chosen, of_chosen


def _lowest_log_probs(log_probs: torch.Tensor, sampling: Sampling) -> torch.Tensor | None:
    """Returns the lowest log-probability that each row may draw, [rows]. None: all tokens."""
    if not sampling.truncates:
        return None
    lowest = log_probs.amax(-1) + (math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf)
    if not sampling.top_k and sampling.top_p == 1:
        return lowest
    largest = log_probs.topk(min(sampling.top_k or _NUM_SORTED, log_probs.shape[1])).values
    if not sampling.top_k and (largest.exp().sum(-1) < sampling.top_p).any():
        largest = log_probs.sort(-1, descending=True).values
    if sampling.top_p == 1:
        return torch.maximum(lowest, largest[:, -1])
    probs = largest.exp()
    if sampling.top_k:
        probs = probs / probs.sum(-1, keepdim=True)
    num_kept = (probs.cumsum(-1) - probs < sampling.top_p).sum(-1, keepdim=True)
    return torch.maximum(lowest, largest.gather(-1, num_kept - 1)[:, 0])
