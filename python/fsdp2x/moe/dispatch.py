"""Sends tokens to the ranks that own their experts and brings the results back: two all-to-alls each way of autograd.

    rank r    tokens x top-k choices, sorted by expert  | to rank 0 | to rank 1 | ...      (rows of the hidden width)
              --- all-to-all --->                       | from 0: my e0, my e1 | from 1: my e0, my e1 | ...
              my experts, one call
              <-- all-to-all ---                        the same rows in the same places; unsorted, weighted, summed

Rows travel as bytes, so every dtype works on every backend. Every rank of the group takes part in both, forward and
backward, also with no token to send or to receive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def dispatch(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
    experts: Experts,
) -> torch.Tensor:
    """The weighted sum over each token's chosen experts. Collective over ``group``.

    Args:
        hidden: (T, H) tokens of this rank.
        index: (T, K) numbers of the chosen experts, 0 to ``num_experts - 1``.
        weights: (T, K) of the choices.
        num_experts: of all ranks; rank r of the group owns the r-th part of them.
        experts: called with (N, H) rows and (N,) local expert numbers; returns (N, H') rows, also for N = 0, and its
            output depends on the rows.
    """
    world = dist.get_world_size(group)
    num_tokens, top_k = index.shape
    chosen = index.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    counts = torch.bincount(chosen, minlength=num_experts).view(world, num_experts // world)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    # One copy to the host for both directions.
    sends, receives = torch.stack([counts.sum(1), received.sum(1)]).tolist()
    rows = all_to_all(hidden[order // top_k], sends, receives, group)
    local = torch.arange(num_experts // world, device=hidden.device).repeat(world)
    out = experts(rows, torch.repeat_interleave(local, received.reshape(-1)))
    back = all_to_all(out, receives, sends, group)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    weighted = back[places].view(num_tokens, top_k, back.shape[1]) * weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden.dtype)


def all_to_all(rows: torch.Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """``rows`` (sum of sends, H) to (sum of receives, H), differentiable: gradients take the way back."""
    return _AllToAll.apply(rows, sends, receives, group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sends, receives, group):
        ctx.way_back = receives, sends, group
        return _exchange(rows, sends, receives, group)

    @staticmethod
    def backward(ctx, grad):
        return _exchange(grad, *ctx.way_back), None, None, None


def _exchange(rows: torch.Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    out = rows.new_empty(sum(receives), rows.shape[1])
    dist.all_to_all_single(out.view(torch.uint8), rows.contiguous().view(torch.uint8), receives, sends, group=group)
    return out
