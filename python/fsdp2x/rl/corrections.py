"""Importance weights between the policy that was trained from and the one that sampled: truncated or masked.

An engine samples from other numbers than the trainer computes (kernels, dtypes, an older version of the weights). With
``o`` the trainer's log-probabilities before the update and ``b`` the engine's, per token:

    token       exp(o - b)
    sequence    exp(sum of o - b over the sample)
    geometric   exp(mean of o - b over the sample)

``truncate``: min(ratio, high), truncated importance sampling (TIS). ``mask``: the ratio inside [low, high], else 0
(IcePop by tokens; masked importance sampling by sequences).
"""

from __future__ import annotations

from typing import Literal

import torch

from fsdp2x.arguments import checked
from fsdp2x.rl.rows import RowTokens

# exp(20) is far outside of any bounds, and finite.
LARGEST_LOG_RATIO = 20.0


@checked
@torch.no_grad()
def importance_weights(
    old: torch.Tensor,
    behaviour: torch.Tensor,
    row: RowTokens,
    *,
    level: Literal["token", "sequence", "geometric"] = "token",
    kind: Literal["truncate", "mask"] = "truncate",
    low: float | None = None,
    high: float | None = 2.0,
) -> torch.Tensor:
    """What each token's loss is multiplied by, [1, positions], detached; 0 where there is no label.

        weights = rl.importance_weights(old, row.align(engine_log_probs), row, level="token", high=2.0)

    Products of two make the combinations in use: weights by tokens, masks by sequences. Under Ulysses collective over
    the sequence-parallel ranks, unless by tokens.

    Args:
        old: the trainer's log-probabilities, of the policy that sampled. behaviour: the engine's. Both [1, positions];
            a token whose engine's is NaN (not reported) has the ratio 1.
        row: the tokens of this row.
        level: ``"token"``, ``"sequence"`` or ``"geometric"``, see this module.
        kind: ``"truncate"`` or ``"mask"``.
        low, high: bounds of the ratio; None: none on this side.

    Raises:
        ValueError: unknown level or kind, bounds that are not ``0 <= low < high``, or other shapes.
    """
    if not (0.0 if low is None else low) < (float("inf") if high is None else high) or (low is not None and low < 0):
        raise ValueError(f"importance_weights: bounds must be 0 <= low < high, got low={low}, high={high}")
    for name, values in (("old", old), ("behaviour", behaviour)):
        row.check(values, f"importance_weights: {name}")
    difference = (old - behaviour.to(old)).where(row.has_label & ~behaviour.isnan(), 0.0)
    if level == "sequence":
        difference = row.sums_on_tokens(difference)
    elif level == "geometric":
        difference = row.means_on_tokens(difference)
    ratio = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    if kind == "truncate":
        ratio = ratio.clamp(low, high) if low is not None or high is not None else ratio
    else:
        kept = torch.ones_like(row.has_label)
        if low is not None:
            kept &= ratio >= low
        if high is not None:
            kept &= ratio <= high
        ratio = ratio.where(kept, 0.0)
    return ratio.where(row.has_label, 0.0)
