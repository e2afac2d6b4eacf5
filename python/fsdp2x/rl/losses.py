"""Computes policy losses over the label tokens of packed rows, with correct means over ranks and micro-batches.

For each token, l is the log-probability under the policy, o under the policy that sampled, and f under the reference.
A is the advantage, r = exp(l - o), and sg() stops gradients:

    clip        -min(r A, clip(r, 1 - low, 1 + high) A); with dual_clip c, for A < 0, at most -c A
                    GRPO arXiv 2402.03300, DAPO 2503.14476 (token mean, high 0.28), Dr. GRPO 2503.20783 (constant),
                    dual clip 1912.09729
    sequence    r = exp(mean of l - o over the sample), whose gradient goes to each token alike: GSPO 2507.18071
    cispo       -sg(clip(r)) A l: MiniMax-M1 2506.13585
    reinforce   -A l
    KL          d = l - f:  k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d (joschu.net/blog/kl-approx.html);
                    k3+ has k3's value and k2's gradient, which is that of the KL on the policy's own samples; that
                    of k1 is zero in the mean, and that of k3 another KL's (2506.09477)

and the loss is the sum over all tokens times

    tokens      1 / label tokens of the step
    samples     1 / label tokens of the token's sample / samples of the step
    constant    1 / max_tokens / samples of the step

times the number of ranks, which cancels the mean over ranks that ``fully_shard`` makes of the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import exchange
from fsdp2x.rl.rows import RowTokens, StepCount
from fsdp2x.rl.score import Scores


@checked
@dataclass(frozen=True)
class PolicySettings:
    """Choice of a loss. ``dataclasses.replace(rl.GRPO, kl="k3+", kl_weight=1e-3)`` changes one.

    Attributes:
        kind: ``"clip"``, ``"cispo"`` or ``"reinforce"``.
        ratio: level of the probability ratio: ``"token"`` or ``"sequence"``.
        clip: distances that the ratio may fall below and rise above 1. A fall of 1 is no bound.
        dual_clip: c > 1, the bound of the loss of tokens with a negative advantage. None: no bound.
        mean: ``"tokens"``, ``"samples"`` or ``"constant"``.
        max_tokens: longest response, for the constant mean. 1 gives the mean over samples of sums.
        kl: ``"k1"``, ``"k2"``, ``"k3"``, ``"k3+"`` or None.
        kl_weight: factor of the KL.
        entropy_weight: factor of the entropy, which is subtracted.
    """

    kind: Literal["clip", "cispo", "reinforce"] = "clip"
    ratio: Literal["token", "sequence"] = "token"
    clip: tuple[float, float] = (0.2, 0.2)
    dual_clip: float | None = None
    mean: Literal["tokens", "samples", "constant"] = "tokens"
    max_tokens: int | None = None
    kl: Literal["k1", "k2", "k3", "k3+"] | None = None
    kl_weight: float = 0.0
    entropy_weight: float = 0.0

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            ValueError: a number is outside of its range.
        """
        low, high = self.clip
        if not (0 <= low <= 1 and high >= 0):
            raise ValueError(f"PolicySettings: clip must be (0 to 1, at least 0), got {self.clip}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"PolicySettings: dual_clip must be above 1, got {self.dual_clip}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"PolicySettings: max_tokens must be at least 1, got {self.max_tokens}")
        if (self.kl is None) != (self.kl_weight == 0.0):
            raise ValueError(
                f"PolicySettings: kl and kl_weight belong together, got kl={self.kl!r} with kl_weight={self.kl_weight}"
            )


GRPO = PolicySettings(mean="samples")
DAPO = PolicySettings(clip=(0.2, 0.28))
DR_GRPO = PolicySettings(mean="constant")
GSPO = PolicySettings(ratio="sequence", clip=(3e-4, 4e-4), mean="samples")
CISPO = PolicySettings(kind="cispo", clip=(1.0, 4.0))
REINFORCE = PolicySettings(kind="reinforce")


class PolicyLoss(NamedTuple):
    """Shares of this rank and row. ``mean_over_ranks`` of their sums over the rows gives the values of the step.

    Attributes:
        loss: scalar for ``backward``.
        clipped: fraction of the label tokens whose policy loss has no gradient because of a clip. Detached, like the
            next ones.
        policy_kl: k3 between the policy and the one that sampled, mean over label tokens.
        reference_kl: the settings' estimate, mean over label tokens. None without a reference.
        entropy: mean over label tokens. None if the scores have none.
    """

    loss: torch.Tensor
    clipped: torch.Tensor
    policy_kl: torch.Tensor
    reference_kl: torch.Tensor | None
    entropy: torch.Tensor | None


def policy_loss(
    scores: Scores,
    row: RowTokens,
    advantages: torch.Tensor,
    count: StepCount,
    settings: PolicySettings = GRPO,
    *,
    old: torch.Tensor | None = None,
    reference: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> PolicyLoss:
    """Computes this rank's share of a step's loss, for gradients averaged over ranks and added over rows.

        count = rl.count_step(rows)
        for i, row in enumerate(rows):
            with fsdp2x.accumulate(model, last=i == len(rows) - 1):
                scores = rl.score(model, packed[i].inputs, packed[i].next_labels, entropy=True)
                rl.policy_loss(scores, row, advantages, count, rl.DAPO, old=old[i]).loss.backward()

    This module's docstring has the formulas. Gradients do not depend on how samples are distributed over ranks and
    rows. A row without labels has a loss of zero that reaches every parameter. With Ulysses the sequence ratio is
    collective over the sequence-parallel ranks, in forward only.

    Args:
        scores: result of ``score`` for this row, with entropies if they are weighted.
        row: tokens of the row.
        advantages: one for each packed sample of the rank, [samples].
        count: result of ``count_step`` for the step.
        settings: the loss: ``rl.GRPO``, ``DAPO``, ``DR_GRPO`` (needs ``max_tokens``), ``GSPO``, ``CISPO``,
            ``REINFORCE``, or your own.
        old: log-probabilities under the policy that sampled, [1, positions]. None: the policy itself, r = 1.
        reference: log-probabilities under the reference model, for a KL, [1, positions].
        weights: factors of each token's policy loss (``importance_weights``), [1, positions]. They do not scale the KL.

    Raises:
        ValueError: shapes do not match the row, or a KL, an entropy weight, or a constant mean lacks its reference,
            entropies, or ``max_tokens``.
    """
    logp = scores.log_probs
    for name, values in (("scores", logp), ("old", old), ("reference", reference), ("weights", weights)):
        if values is not None:
            row.check(values, f"policy_loss: {name}")
    advantages = row.spread(advantages).detach().to(logp)
    difference = logp - (logp.detach() if old is None else old.detach().to(logp))
    difference = difference.where(row.has_label, 0.0)
    of_token, clipped = _surrogate(settings, row, logp, difference, advantages)
    if weights is not None:
        of_token = of_token * weights.detach().to(logp).where(row.has_label, 0.0)
    kl = None
    if settings.kl is not None:
        if reference is None:
            raise ValueError(
                f"policy_loss: kl={settings.kl!r} needs the reference model's log-probabilities. Pass reference=."
            )
        kl = _kl(settings.kl, (logp - reference.detach().to(logp)).where(row.has_label, 0.0))
        of_token = of_token + settings.kl_weight * kl
    if settings.entropy_weight:
        if scores.entropy is None:
            raise ValueError("policy_loss: an entropy_weight needs entropies. Call score(..., entropy=True).")
        of_token = of_token - settings.entropy_weight * scores.entropy
    by_token = _mean_factors("tokens", None, row, count, logp.dtype)
    loss = (of_token * _mean_factors(settings.mean, settings.max_tokens, row, count, logp.dtype)).sum()
    with torch.no_grad():
        k3 = _kl("k3", -difference)
        means = [(values * by_token).sum() for values in (clipped, k3)]
        others = [None if values is None else (values * by_token).sum() for values in (kl, scores.entropy)]
    return PolicyLoss(loss, *means, *others)


def _surrogate(
    settings: PolicySettings,
    row: RowTokens,
    logp: torch.Tensor,
    difference: torch.Tensor,
    advantages: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the policy loss of each token, and which tokens are clipped."""
    if settings.kind == "reinforce":
        return -advantages * logp, torch.zeros_like(row.has_label)
    if settings.ratio == "sequence":
        difference = row.means_on_tokens(difference) + (logp - logp.detach())
    ratio = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    low, high = settings.clip
    inside = ratio.clamp(1 - low, 1 + high)
    if settings.kind == "cispo":
        return -inside.detach() * advantages * logp, torch.zeros_like(row.has_label)
    found = -torch.minimum(ratio * advantages, inside * advantages)
    clipped = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
    if settings.dual_clip is not None:
        is_bound = (advantages < 0) & (ratio > settings.dual_clip)
        found = torch.where(is_bound, -settings.dual_clip * advantages, found)
        clipped |= is_bound
    return found, clipped


def _kl(kind: str, difference: torch.Tensor) -> torch.Tensor:
    """Estimates the KL of each token from ``difference``, the policy's log-probability minus the other's."""
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    k3 = torch.expm1((-difference).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)) + difference
    if kind == "k3":
        return k3
    k2 = difference.square() / 2
    return k3.detach() + (k2 - k2.detach())


def _mean_factors(
    mean: str, max_tokens: int | None, row: RowTokens, count: StepCount, dtype: torch.dtype
) -> torch.Tensor:
    """Returns each token's factor before the sum, [1, positions] of ``dtype``. Zero without a label.

    Raises:
        ValueError: a constant mean lacks ``max_tokens``.
    """
    labels = row.has_label.to(dtype)
    if mean == "tokens":
        return labels * (count.ranks / count.tokens).to(labels)
    by_sample = (count.ranks / count.samples).to(labels)
    if mean == "samples":
        return row.shares().to(dtype) * by_sample
    if max_tokens is None:
        raise ValueError(
            'mean="constant" needs max_tokens, the same in all steps. Pass dataclasses.replace(settings, '
            "max_tokens=...)."
        )
    return labels * (by_sample / max_tokens)


# ---- between the engine that sampled and the trainer

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
    """Returns detached importance weights for each token's loss, [1, positions]. Zero without a label.

    Use them because an engine samples with other numbers than the trainer computes (kernels, dtypes, older weights).
    With o the trainer's log-probabilities before the update and b the engine's, the ratio is

        token       exp(o - b)
        sequence    exp(sum of o - b over the sample)
        geometric   exp(mean of o - b over the sample)

    ``truncate``: min(ratio, high), truncated importance sampling (TIS). ``mask``: the ratio inside [low, high], else 0
    (IcePop by tokens; masked importance sampling by sequences).

        weights = rl.importance_weights(old, row.align(engine_log_probs), row, level="token", high=2.0)

    Multiply two results to combine them, such as weights by tokens and masks by sequences. With Ulysses it is
    collective over the sequence-parallel ranks, unless by tokens.

    Args:
        old: the trainer's log-probabilities of the policy that sampled, [1, positions].
        behaviour: the engine's, [1, positions]. A token with NaN (not reported) has the ratio 1.
        row: tokens of this row.
        level: ``"token"``, ``"sequence"`` or ``"geometric"``.
        kind: ``"truncate"`` or ``"mask"``.
        low, high: bounds of the ratio. None: no bound.

    Raises:
        ValueError: ``level`` or ``kind`` is unknown, the bounds are not ``0 <= low < high``, or shapes do not match.
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


# ---- advantages: statistics over all ranks, however samples are distributed


@checked(own=("rewards", "group_ids"))
def group_advantages(
    rewards: torch.Tensor | Sequence[float],
    group_ids: torch.Tensor | Sequence[int],
    *,
    scale: Literal["std", "batch", "none"] = "std",
    epsilon: float = 1e-4,
    is_whole: bool = False,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Returns how much better each sample is than its group: ``(R - mean) / (standard deviation + epsilon)``.

    The result is fp32 of the rewards' shape, on their device. A group of equal rewards, or of one sample, has
    advantages of exactly zero. Statistics use fp64. Formulas: GRPO, arXiv 2402.03300, section 4.1.2; without a scale
    Dr. GRPO, arXiv 2503.20783. Collective, unless ``is_whole``.

    Args:
        rewards: [samples of this rank]. A rank may have none.
        group_ids: int64, [samples of this rank], the group (prompt) of each sample on any rank.
        scale: ``"std"`` for the unbiased deviation of the group, ``"batch"`` for that of all rewards, ``"none"`` for 1.
        epsilon: number added to the deviation.
        is_whole: True if ``rewards`` has those of all ranks. Nothing is communicated then.
        group: ranks with different samples, with Ulysses the data-parallel ones (``mesh.data``). Default: all.

    Raises:
        ValueError: on every rank if lengths differ, a reward is not finite, or ``scale`` is unknown.
    """
    rewards = torch.as_tensor(rewards)
    ids = torch.as_tensor(group_ids, dtype=torch.int64)
    problem = _find_problem(rewards, ids)
    mine = problem, rewards.detach().double().cpu(), ids.cpu()
    first, everyone = 0, [mine]
    if not is_whole and dist.is_initialized():
        everyone = exchange(mine, group, "group_advantages")
        first = sum(len(others) for _, others, _ in everyone[: dist.get_rank(group)])
        told = zip(dist.get_process_group_ranks(group), everyone, strict=True)
        problem = "; ".join(f"rank {rank}: {said}" for rank, (said, _, _) in told if said is not None)
    if problem:
        raise ValueError(f"group_advantages: {problem}")
    _, all_rewards, all_ids = zip(*everyone, strict=True)
    made = _advantages(torch.cat(all_rewards), torch.cat(all_ids), scale, epsilon)
    return made[first : first + rewards.shape[0]].to(rewards.device, torch.float32)


def _find_problem(rewards: torch.Tensor, ids: torch.Tensor) -> str | None:
    if rewards.ndim != 1 or rewards.shape != ids.shape:
        return (
            f"expected one reward and one group id for every sample, got shapes {list(rewards.shape)} and "
            f"{list(ids.shape)}"
        )
    wrong = (~rewards.isfinite()).nonzero().flatten().tolist()
    return f"the reward of sample {wrong[0]} is {float(rewards[wrong[0]])}" if wrong else None


def _advantages(rewards: torch.Tensor, ids: torch.Tensor, scale: str, epsilon: float) -> torch.Tensor:
    _, places = ids.unique(return_inverse=True)
    num_groups = int(places.max()) + 1 if places.numel() else 0
    sizes = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, places, torch.ones_like(rewards))
    means = torch.zeros_like(sizes).index_add_(0, places, rewards) / sizes
    centred = rewards - means[places]
    # The computed mean of equal numbers may differ from that number.
    lowest, highest = (
        torch.zeros_like(sizes).scatter_reduce(0, places, rewards, how, include_self=False) for how in ("amin", "amax")
    )
    centred = centred.where((lowest != highest)[places], 0.0)
    if scale == "none" or rewards.numel() < 2:
        return centred
    if scale == "batch":
        return centred / (rewards.std() + epsilon)
    squares = torch.zeros_like(sizes).index_add_(0, places, centred.square())
    return centred / ((squares / (sizes - 1).clamp(min=1)).sqrt() + epsilon)[places]
