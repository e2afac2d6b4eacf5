"""Checks at each bucket of a pass over weights that all ranks have the same one, and that no weight has changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp2x.runtime.calls import Call, calling, current_call
from fsdp2x.runtime.failures import exchange


class Meetings:
    """Synchronizes the ranks of one ring over a process group. ``token``: equal on all ranks, unique to the ring."""

    def __init__(self, group: dist.ProcessGroup, token: bytes) -> None:
        self.call: Call = current_call("export of weights")
        self._group, self._token = group, int.from_bytes(token[:7], "little")
        self.num = 0

    def meet(self, changed: str, device: torch.device) -> None:
        """Waits for all ranks at the next bucket.

        Args:
            changed: a parameter of this rank that has changed since the first bucket; empty: none.

        Raises:
            ValueError, RuntimeError: on every rank: see ``require``.
        """
        self.num += 1
        if device.type == "cpu":
            with calling(self.call):
                said = exchange((self._token, self.num, changed), self._group)
        else:
            mine = torch.tensor([self._token, self.num, bool(changed)], device=device)
            everyone = mine.new_empty(dist.get_world_size(self._group) * 3)
            dist.all_gather_into_tensor(everyone, mine, group=self._group)
            said = [(token, num, changed or is_changed) for token, num, is_changed in everyone.view(-1, 3).tolist()]
        self.require([(token, num) == (self._token, self.num) for token, num, _ in said], [one for *_, one in said])

    def require(self, arrived: Sequence[bool], changed: Sequence[str | bool]) -> None:
        """Checks what the ranks of the group have said.

        Raises:
            ValueError: one is not at this meeting.
            RuntimeError: the parameters of one have changed.
        """
        ranks = dist.get_process_group_ranks(self._group)
        for rank, is_here in zip(ranks, arrived, strict=True):
            if not is_here:
                raise ValueError(
                    f"{self.call}: rank {rank} is at another bucket, or in another pass over the weights. Take the "
                    "same buckets in the same order on every rank."
                )
        if any(changed):
            raise_changed(self.call, next((name for name in changed if isinstance(name, str) and name), True))


def raise_changed(call: Call, name: str | bool) -> None:
    """Raises RuntimeError for a parameter that changed between two buckets."""
    what = f"parameter {name!r}" if isinstance(name, str) else "a parameter of another rank"
    raise RuntimeError(
        f"{call}: {what} changed between two buckets, which would mix two versions. Run optimizer steps and loads "
        "before the first bucket or after the last one."
    )
