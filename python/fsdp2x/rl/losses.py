"""Policy losses over the label tokens of packed rows, with means that are right over ranks and micro-batches.

Per token, with l the policy's log-probability, o that of the policy that was sampled from, f the reference's, A the
advantage, r = exp(l - o), sg() without gradient:

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

times the number of ranks, which the mean over ranks that ``fully_shard`` makes of the gradients cancels.
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
    """Which loss; ``dataclasses.replace(rl.GRPO, kl="k3+", kl_weight=1e-3)`` changes one.

    Attributes:
        kind: ``"clip"``, ``"cispo"`` or ``"reinforce"``.
        ratio: of which probabilities: ``"token"`` or ``"sequence"``.
        clip: how far the ratio may fall below and rise above 1. A fall of 1 is no bound.
        dual_clip: c > 1, bounds the loss of tokens with a negative advantage; None: no bound.
        mean: ``"tokens"``, ``"samples"`` or ``"constant"``.
        max_tokens: for the constant mean: how long a response may be; 1 gives the mean over samples of sums.
        kl: ``"k1"``, ``"k2"``, ``"k3"``, ``"k3+"`` or None. kl_weight: what it is multiplied by.
        entropy_weight: what the entropy is multiplied by, before it is subtracted.
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
        """Refuses settings that mean nothing.

        Raises:
            ValueError: a number outside of its range.
        """
        low, high = self.clip
        if not (0 <= low <= 1 and high >= 0):
            raise ValueError(f"PolicySettings: clip must be (0 to 1, at least 0), got {self.clip}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"PolicySettings: dual_clip must be above 1, got {self.dual_clip}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"PolicySettings: max_tokens must be at least 1, got {self.max_tokens}")
        if (self.kl is None) != (self.kl_weight == 0.0):
            raise ValueError(f"PolicySettings: kl={self.kl!r} with kl_weight={self.kl_weight}; give both or neither")


GRPO = PolicySettings(mean="samples")
DAPO = PolicySettings(clip=(0.2, 0.28))
DR_GRPO = PolicySettings(mean="constant")
GSPO = PolicySettings(ratio="sequence", clip=(3e-4, 4e-4), mean="samples")
CISPO = PolicySettings(kind="cispo", clip=(1.0, 4.0))
REINFORCE = PolicySettings(kind="reinforce")


class PolicyLoss(NamedTuple):
    """Shares of this rank and row: ``mean_over_ranks`` of their sums over the rows of a step is the value of the step.

    Attributes:
        loss: to call ``backward`` on.
        clipped: part of the label tokens whose policy loss has no gradient because of a clip. Detached, as the others.
        policy_kl: k3 between the policy and the one that was sampled from, mean over label tokens.
        reference_kl: the settings' estimate, mean over label tokens; None without a reference.
        entropy: mean over label tokens; None when the scores have none.
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
    """This rank's share of the loss of a step, for gradients that are averaged over ranks and added over rows.

        count = rl.count_step(rows)
        for i, row in enumerate(rows):
            with fsdp2x.accumulate(model, last=i == len(rows) - 1):
                scores = rl.score(model, packed[i].inputs, packed[i].next_labels, entropy=True)
                rl.policy_loss(scores, row, advantages, count, rl.DAPO, old=old[i]).loss.backward()

    The formulas are in this module's head. Neither the cut over ranks nor that into rows changes the gradients. A row
    without labels has a loss of zero that reaches every parameter. Under Ulysses the sequence ratio is collective over
    the sequence-parallel ranks, in forward only.

    Args:
        scores: of this row, by ``score``; with entropies if they are weighted.
        row: its tokens.
        advantages: one for each packed sample of the rank, [samples], or one for each token, [1, positions].
        count: of the step, by ``count_step``.
        settings: which loss: ``rl.GRPO``, ``DAPO``, ``DR_GRPO`` (needs ``max_tokens``), ``GSPO``, ``CISPO``,
            ``REINFORCE``, or one's own.
        old: log-probabilities under the policy that was sampled from, [1, positions]; None: the policy itself, r = 1.
        reference: those under the reference model, for a KL.
        weights: what the policy loss of each token is multiplied by (``importance_weights``); not the KL.

    Raises:
        ValueError: shapes that do not belong to the row; a KL without reference, an entropy weight without entropies,
            a constant mean without ``max_tokens``.
    """
    logp = scores.log_probs
    for name, values in (("scores", logp), ("old", old), ("reference", reference), ("weights", weights)):
        if values is not None:
            row.check(values, f"policy_loss: {name}")
    if advantages.ndim == 1:
        advantages = row.spread(advantages)
    row.check(advantages, "policy_loss: advantages")
    advantages = advantages.detach().to(logp).where(row.has_label, 0.0)
    difference = logp - (logp.detach() if old is None else old.detach().to(logp))
    difference = difference.where(row.has_label, 0.0)
    of_token, clipped = _surrogate(settings, row, logp, difference, advantages)
    if weights is not None:
        of_token = of_token * weights.detach().to(logp).where(row.has_label, 0.0)
    kl = None
    if settings.kl is not None:
        if reference is None:
            raise ValueError(
                f"policy_loss: kl={settings.kl!r} needs the reference model's log-probabilities: reference="
            )
        kl = _kl(settings.kl, (logp - reference.detach().to(logp)).where(row.has_label, 0.0))
        of_token = of_token + settings.kl_weight * kl
    if settings.entropy_weight:
        if scores.entropy is None:
            raise ValueError("policy_loss: an entropy_weight needs entropies: score(..., entropy=True)")
        of_token = of_token - settings.entropy_weight * scores.entropy
    by_token = mean_factors("tokens", None, row, count, logp.dtype)
    loss = (of_token * mean_factors(settings.mean, settings.max_tokens, row, count, logp.dtype)).sum()
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
    """The policy loss of each token, and which tokens are clipped."""
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
    """An estimate of the KL of each token from ``difference``, the policy's log-probability less the other's."""
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    k3 = torch.expm1((-difference).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)) + difference
    if kind == "k3":
        return k3
    k2 = difference.square() / 2
    return k3.detach() + (k2 - k2.detach())


def mean_factors(
    mean: str, max_tokens: int | None, row: RowTokens, count: StepCount, dtype: torch.dtype
) -> torch.Tensor:
    """What each token's loss is multiplied by before the sum, [1, positions] of ``dtype``; 0 where there is no label.

    Raises:
        ValueError: a constant mean without ``max_tokens``.
    """
    labels = row.has_label.to(dtype)
    if mean == "tokens":
        return labels * (count.ranks / count.tokens).to(labels)
    by_sample = (count.ranks / count.samples).to(labels)
    if mean == "samples":
        return row.shares().to(dtype) * by_sample
    if max_tokens is None:
        raise ValueError(
            'mean="constant" needs max_tokens, the same in all steps: policies by dataclasses.replace(settings, '
            "max_tokens=...), critics by value_loss(..., max_tokens=...)"
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
    """Importance weights that each token's loss is multiplied by, [1, positions], detached; 0 where there is no label.

    An engine samples from other numbers than the trainer computes (kernels, dtypes, an older version of the weights).
    With o the trainer's log-probabilities before the update and b the engine's, the ratio is

        token       exp(o - b)
        sequence    exp(sum of o - b over the sample)
        geometric   exp(mean of o - b over the sample)

    ``truncate``: min(ratio, high), truncated importance sampling (TIS). ``mask``: the ratio inside [low, high], else 0
    (IcePop by tokens; masked importance sampling by sequences).

        weights = rl.importance_weights(old, row.align(engine_log_probs), row, level="token", high=2.0)

    Products of two make the combinations in use: weights by tokens, masks by sequences. Under Ulysses collective over
    the sequence-parallel ranks, unless by tokens.

    Args:
        old: the trainer's log-probabilities, of the policy that sampled. behaviour: the engine's. Both [1, positions];
            a token whose engine's is NaN (not reported) has the ratio 1.
        row: the tokens of this row.
        level: ``"token"``, ``"sequence"`` or ``"geometric"``.
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


# ---- advantages: statistics over all ranks, whichever rank has which sample


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
    """How much better each sample is than its group: ``(R - mean of the group) / (standard deviation + epsilon)``.

    fp32 of the rewards' shape, on their device. A group whose rewards are all equal, or of one sample, has advantages
    of exactly zero. Statistics are made in fp64. GRPO: arXiv 2402.03300, section 4.1.2; without a scale: Dr. GRPO,
    arXiv 2503.20783. Collective, unless ``is_whole``.

    Args:
        rewards: [samples of this rank]; a rank may have none.
        group_ids: int64, the group (prompt) of each; equal ids are one group, on whichever ranks they are.
        scale: ``"std"``: the unbiased deviation of the group; ``"batch"``: that of all rewards; ``"none"``: 1.
        epsilon: added to the deviation.
        is_whole: the rewards are those of all ranks already: nothing is communicated.
        group: ranks whose samples differ, default all; under Ulysses the data-parallel ones (``mesh.data``).

    Raises:
        ValueError: on every rank, whichever had it: rewards and ids of different lengths, or not finite rewards; an
            unknown ``scale``.
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
            f"rewards of shape {list(rewards.shape)} and group_ids of shape {list(ids.shape)}; expected one of each "
            "for every sample"
        )
    wrong = (~rewards.isfinite()).nonzero().flatten().tolist()
    return f"the reward of sample {wrong[0]} is {float(rewards[wrong[0]])}" if wrong else None


def _advantages(rewards: torch.Tensor, ids: torch.Tensor, scale: str, epsilon: float) -> torch.Tensor:
    _, places = ids.unique(return_inverse=True)
    num_groups = int(places.max()) + 1 if places.numel() else 0
    sizes = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, places, torch.ones_like(rewards))
    means = torch.zeros_like(sizes).index_add_(0, places, rewards) / sizes
    centred = rewards - means[places]
    # The mean of equal numbers need not be that number.
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
