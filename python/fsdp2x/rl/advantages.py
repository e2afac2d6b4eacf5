"""Advantages of samples within their groups: statistics over all ranks, whichever rank has which sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp2x.runtime.sharing import problems_of_all

_SCALES = ("std", "batch", "none")


def group_advantages(
    rewards: torch.Tensor | Sequence[float],
    group_ids: torch.Tensor | Sequence[int],
    *,
    scale: str = "std",
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
    if scale not in _SCALES:
        raise ValueError(f"group_advantages: scale must be one of {', '.join(_SCALES)}, got {scale!r}")
    rewards = torch.as_tensor(rewards)
    ids = torch.as_tensor(group_ids, dtype=torch.int64)
    problem = _find_problem(rewards, ids)
    if is_whole or not dist.is_initialized():
        if problem is not None:
            raise ValueError(f"group_advantages: {problem}")
        first, all_rewards, all_ids = 0, rewards.double().cpu(), ids.cpu()
    else:
        first, all_rewards, all_ids = _gather(rewards, ids, problem, group)
    made = _advantages(all_rewards, all_ids, scale, epsilon)
    return made[first : first + rewards.shape[0]].to(rewards.device, torch.float32)


def _find_problem(rewards: torch.Tensor, ids: torch.Tensor) -> str | None:
    if rewards.ndim != 1 or rewards.shape != ids.shape:
        return (
            f"rewards of shape {list(rewards.shape)} and group_ids of shape {list(ids.shape)}; expected one of each "
            "for every sample"
        )
    wrong = (~rewards.isfinite()).nonzero().flatten().tolist()
    return f"the reward of sample {wrong[0]} is {float(rewards[wrong[0]])}" if wrong else None


def _gather(
    rewards: torch.Tensor, ids: torch.Tensor, problem: str | None, group: dist.ProcessGroup | None
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Rewards (fp64) and ids of all ranks in their order, and where this rank's begin; a problem is every rank's."""
    on_cpu = "cpu" in dist.get_backend_config(group)
    device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    own = torch.tensor([-1 if problem is not None else rewards.shape[0]], device=device)
    found = torch.empty(len(ranks), dtype=own.dtype, device=device)
    dist.all_gather_into_tensor(found, own, group=group)
    lengths = found.tolist()
    if min(lengths) < 0:
        raise ValueError(f"group_advantages: {problems_of_all(group, problem)}")
    padded = torch.zeros(2, max(lengths), dtype=torch.int64, device=device)
    padded[0, : rewards.shape[0]] = rewards.double().view(torch.int64)  # bits, so that one collective carries both
    padded[1, : rewards.shape[0]] = ids
    everyone = padded.new_empty(len(ranks) * padded.numel())
    dist.all_gather_into_tensor(everyone, padded.view(-1), group=group)
    by_rank = everyone.view(len(ranks), *padded.shape).cpu()
    parts = [rows[:, :length] for rows, length in zip(by_rank, lengths, strict=True)]
    joined = torch.cat(parts, dim=1)
    return sum(lengths[: dist.get_rank(group)]), joined[0].view(torch.float64), joined[1]


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
