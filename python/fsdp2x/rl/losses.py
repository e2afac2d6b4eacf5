"""Computes policy losses over the label tokens of packed rows, with correct means over ranks and micro-batches.

For each token, l is the log-probability under the policy, o under the policy that sampled, and f under the reference.
A is the advantage and r = exp(l - o):

    policy      -min(r A, clip(r, 1 - low, 1 + high) A): GRPO arXiv 2402.03300, DAPO 2503.14476 (token mean, high 0.28)
    KL          exp(f - l) - 1 + l - f (k3 of joschu.net/blog/kl-approx.html)

and the loss is the sum over all tokens times

    tokens      1 / label tokens of the step
    samples     1 / label tokens of the token's sample / samples of the step

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
    """Settings of :func:`policy_loss`. ``dataclasses.replace(rl.GRPO, kl_weight=1e-3)`` changes one.

    Attributes:
        clip: (low, high). The ratio is clipped to [1 - low, 1 + high]. A ``low`` of 1 sets no lower bound.
        mean: ``"tokens"``, over all label tokens of the step, or ``"samples"``, over the samples' means.
        kl_weight: factor of the KL to the reference model. 0: none.
    """

    clip: tuple[float, float] = (0.2, 0.2)
    mean: Literal["tokens", "samples"] = "tokens"
    kl_weight: float = 0.0

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            ValueError: a number is outside of its range.
        """
        low, high = self.clip
        if not (0 <= low <= 1 and high >= 0):
            raise ValueError(f"PolicySettings: clip must be (0 to 1, at least 0), got {self.clip}")


GRPO = PolicySettings(mean="samples")
DAPO = PolicySettings(clip=(0.2, 0.28))


class PolicyLoss(NamedTuple):
    """Result of :func:`policy_loss`: what this row adds to the values of a step on this rank, as scalars.

    To get the values of the step, add them over the rows and call ``mean_over_ranks``.

    Attributes:
        loss: scalar for ``backward``.
        clipped: fraction of the label tokens whose policy loss has no gradient because of a clip. Detached, like the
            next ones.
        policy_kl: k3 between the policy and the one that sampled, mean over label tokens.
        reference_kl: k3 between the policy and the reference, mean over label tokens. None without a ``kl_weight``.
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
    rows. A row without labels has a loss of zero that reaches every parameter.

    Args:
        scores: result of ``score`` for this row.
        row: tokens of the row.
        advantages: one for each packed sample of the rank, [samples].
        count: result of ``count_step`` for the step.
        settings: the loss: ``rl.GRPO``, ``rl.DAPO``, or your own.
        old: log-probabilities under the policy that sampled, [1, positions]. None: the policy itself, r = 1.
        reference: log-probabilities under the reference model, for a KL, [1, positions].
        weights: factors of each token's policy loss (``importance_weights``), [1, positions]. They do not scale the KL.

    Raises:
        ValueError: shapes do not match the row, or a KL lacks its reference.
    """
    logp = scores.log_probs
    for name, values in (("scores", logp), ("old", old), ("reference", reference), ("weights", weights)):
        if values is not None:
            row.check(values, f"policy_loss: {name}")
    advantages = row.spread(advantages).detach().to(logp)
    difference = logp - (logp.detach() if old is None else old.detach().to(logp))
    difference = difference.where(row.has_label, 0.0)
    low, high = settings.clip
    ratio = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    of_token = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    clipped = ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
    if weights is not None:
        of_token = of_token * weights.detach().to(logp).where(row.has_label, 0.0)
    kl = None
    if settings.kl_weight:
        if reference is None:
            raise ValueError(
                f"policy_loss: kl_weight={settings.kl_weight} needs the reference model's log-probabilities. Pass "
                "reference=."
            )
        kl = _k3((logp - reference.detach().to(logp)).where(row.has_label, 0.0))
        of_token = of_token + settings.kl_weight * kl
    by_token = row.has_label.to(logp) * (count.ranks / count.tokens).to(logp)
    by_sample = row.shares().to(logp) * (count.ranks / count.samples).to(logp)
    loss = (of_token * (by_token if settings.mean == "tokens" else by_sample)).sum()
    with torch.no_grad():
        means = [(values * by_token).sum() for values in (clipped, _k3(-difference))]
        others = [None if values is None else (values * by_token).sum() for values in (kl, scores.entropy)]
    return PolicyLoss(loss, *means, *others)


def _k3(difference: torch.Tensor) -> torch.Tensor:
    """Estimates the KL of each token from ``difference``, the policy's log-probability minus the other's."""
    return torch.expm1((-difference).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)) + difference


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
    high: float = 2.0,
) -> torch.Tensor:
    """Returns ``min(exp(o - b), high)`` for each token, detached, [1, positions]. Zero without a label.

    Use these weights because an engine samples with other numbers than the trainer computes (kernels, dtypes, older
    weights). o is the trainer's log-probability before the update and b the engine's (truncated importance sampling).

        weights = rl.importance_weights(old, row.align(engine_log_probs), row, high=2.0)

    Args:
        old: the trainer's log-probabilities of the policy that sampled, [1, positions].
        behaviour: the engine's, [1, positions]. A token with NaN (not reported) has the ratio 1.
        row: tokens of this row.
        high: bound of the ratio.

    Raises:
        ValueError: ``high`` is not positive, or shapes do not match.
    """
    if not high > 0:
        raise ValueError(f"importance_weights: high must be positive, got {high}")
    for name, values in (("old", old), ("behaviour", behaviour)):
        row.check(values, f"importance_weights: {name}")
    difference = (old - behaviour.to(old)).where(row.has_label & ~behaviour.isnan(), 0.0)
    ratio = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp().clamp(max=high)
    return ratio.where(row.has_label, 0.0)


# ---- advantages: statistics over all ranks, however samples are distributed


@checked(own=("rewards", "group_ids"))
def group_advantages(
    rewards: torch.Tensor | Sequence[float],
    group_ids: torch.Tensor | Sequence[int],
    *,
    epsilon: float = 1e-4,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Returns how much better each sample is than its group: ``(R - mean) / (standard deviation + epsilon)``.

    The result is fp32 of the rewards' shape, on their device. A group of equal rewards, or of one sample, has
    advantages of exactly zero. Statistics use fp64, and the deviation is the unbiased one. Formula: GRPO, arXiv
    2402.03300, section 4.1.2. Collective.

    Args:
        rewards: [samples of this rank]. A rank may have none.
        group_ids: int64, [samples of this rank], the group (prompt) of each sample on any rank.
        epsilon: number added to the deviation.
        group: ranks with different samples, with Ulysses the data-parallel ones (``mesh.data``). Default: all.

    Raises:
        ValueError: on every rank if lengths differ or a reward is not finite.
    """
    rewards = rewards if isinstance(rewards, torch.Tensor) else torch.as_tensor(rewards, device="cpu")
    ids = torch.as_tensor(group_ids, dtype=torch.int64, device="cpu")
    problem = _find_problem(rewards, ids)
    mine = problem, rewards.detach().double().cpu(), ids.cpu()
    first, everyone = 0, [mine]
    if dist.is_initialized():
        everyone = exchange(mine, group, "group_advantages")
        first = sum(len(others) for _, others, _ in everyone[: dist.get_rank(group)])
        told = zip(dist.get_process_group_ranks(group), everyone, strict=True)
        problem = "; ".join(f"rank {rank}: {said}" for rank, (said, _, _) in told if said is not None)
    if problem:
        raise ValueError(f"group_advantages: {problem}")
    _, all_rewards, all_ids = zip(*everyone, strict=True)
    made = _advantages(torch.cat(all_rewards), torch.cat(all_ids), epsilon)
    return made[first : first + rewards.shape[0]].to(rewards.device, torch.float32)


def _find_problem(rewards: torch.Tensor, ids: torch.Tensor) -> str | None:
    if rewards.ndim != 1 or rewards.shape != ids.shape:
        return (
            f"expected one reward and one group id for every sample, got shapes {list(rewards.shape)} and "
            f"{list(ids.shape)}"
        )
    wrong = (~rewards.isfinite()).nonzero().flatten().tolist()
    return f"the reward of sample {wrong[0]} is {float(rewards[wrong[0]])}" if wrong else None


def _advantages(rewards: torch.Tensor, ids: torch.Tensor, epsilon: float) -> torch.Tensor:
    _, places = ids.unique(return_inverse=True)
    num_groups = int(places.max()) + 1 if places.numel() else 0
    sizes = torch.zeros(num_groups, dtype=torch.float64, device="cpu").index_add_(0, places, torch.ones_like(rewards))
    means = torch.zeros_like(sizes).index_add_(0, places, rewards) / sizes
    centred = rewards - means[places]
    # The computed mean of equal numbers may differ from that number.
    lowest, highest = (
        torch.zeros_like(sizes).scatter_reduce(0, places, rewards, how, include_self=False) for how in ("amin", "amax")
    )
    centred = centred.where((lowest != highest)[places], 0.0)
    squares = torch.zeros_like(sizes).index_add_(0, places, centred.square())
    return centred / ((squares / (sizes - 1).clamp(min=1)).sqrt() + epsilon)[places]
