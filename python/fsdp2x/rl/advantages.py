"""Advantages of samples within their groups: statistics over all ranks, whichever rank has which sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import exchange


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
    made = _advantages(*(torch.cat(parts) for parts in list(zip(*everyone, strict=True))[1:]), scale, epsilon)
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
