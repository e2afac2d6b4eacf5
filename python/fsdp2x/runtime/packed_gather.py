"""Several all-gathers of one process group in one collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fsdp2x.runtime.collectives import wait
from fsdp2x.runtime.memory_file import aligned_starts

# What every backend transports by name; inputs of several dtypes, and of any other (float8, int16), travel as bytes.
_TRANSPORTED = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
)

Gather = Callable[[torch.Tensor, torch.Tensor], Any]


def gather_packed(gather: Gather, world: int, rank: int, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Starts ``gather(output, source)`` for all (output, source) at once; returns the work to ``wait`` for, or None.

    Args:
        gather: the collective, asynchronous or not.
        pairs: contiguous tensors; an output holds ``world`` sources one after the other and has their dtype.
    """
    dtypes = {source.dtype for _, source in pairs}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    if dtype not in _TRANSPORTED:
        dtype = torch.uint8
    columns = [(output.reshape(-1).view(dtype), source.reshape(-1).view(dtype)) for output, source in pairs]
    if len(columns) == 1:
        return gather(*columns[0])
    starts, width = aligned_starts(source.numel() for _, source in columns)
    staging = torch.empty(world, width, dtype=dtype, device=columns[0][0].device)
    for start, (_, source) in zip(starts, columns, strict=True):
        staging[rank, start : start + source.numel()].copy_(source)
    work = gather(staging.view(-1), staging[rank])
    return _Unpack(work, staging, starts, columns)


class _Unpack:
    """A work whose end distributes what was gathered."""

    def __init__(self, work: Any, staging: torch.Tensor, starts: list[int], columns: list) -> None:
        self._work, self._staging, self._starts, self._columns = work, staging, starts, columns

    def wait(self) -> bool:
        if self._columns:
            wait(self._work)
            for start, (output, source) in zip(self._starts, self._columns, strict=True):
                rows = self._staging[:, start : start + source.numel()]
                output.view(self._staging.shape[0], source.numel()).copy_(rows)
            self._columns = []
        return True
