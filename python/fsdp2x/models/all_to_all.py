"""``all_to_all``: rows of the ranks of a group for each other, with gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def all_to_all(
    rows: torch.Tensor,
    group: dist.ProcessGroup | None,
    sends: Sequence[int] | None = None,
    receives: Sequence[int] | None = None,
) -> torch.Tensor:
    """Sends parts of dim 0 to the ranks in order, and returns the parts that the ranks sent to this one. Collective.

    Gradients go the opposite way, and have gradients themselves.

    Args:
        rows: (sum of ``sends``, ...).
        group: the ranks. None: all.
        sends, receives: numbers of rows to and from each rank. Both None: equal parts.
    """
    return _AllToAll.apply(rows, group, sends, receives)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group, sends, receives):
        ctx.way_back = group, receives, sends
        rows = rows.contiguous()
        out = rows.new_empty(rows.shape[0] if receives is None else sum(receives), *rows.shape[1:])
        dist.all_to_all_single(out.view(torch.uint8), rows.view(torch.uint8), receives, sends, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, *ctx.way_back), None, None, None
