"""``full_tensors``: the whole parameters of a sharded model, gathered a bucket at a time.

A bucket is one all-gather over one process group. Each rank sends its shards one after the other, the short ones padded
to ceil(d/W) rows, all in the dtype asked for:

    sent by rank r   | p0 rows of r |pad| p1 rows of r |pad| ...       bytes; every parameter starts 16-byte aligned
    received         | what rank 0 sent | what rank 1 sent | ...

Owns nothing between two yields but the bucket at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2x.lookup import named_params

_ALIGN_BYTES = 16


def full_tensors(
    model: nn.Module,
    *,
    params: Callable[[str, nn.Parameter], bool] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    bucket_bytes: int = 64 << 20,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (FQN, whole tensor) for every parameter, in the order of ``named_parameters()``, ties once.

    What is yielded is the value of the sharded parameter in its original dtype, as in a full state dict, in memory of
    its own; it works at any time between two steps and changes no unit. Parameters that are not sharded are copied.

    Collective: every rank must run the iterator to its end, with the same arguments. At most ``bucket_bytes`` of whole
    tensors (or one larger parameter) are gathered at a time; what the caller keeps comes on top.

    Args:
        model: a module that ``fully_shard`` was applied to, or a part of one.
        params: which parameters, by name and sharded parameter, for instance
            ``lambda name, param: "lora_" in name``; the same choice on every rank. Default all.
        dtype: convert floating-point parameters before they are gathered, which also saves traffic.
        device: where the yielded tensors are, such as ``"cpu"``; default where the parameters are.
        bucket_bytes: limit of a gather, in bytes of whole tensors.

    Raises:
        ValueError: ``bucket_bytes`` is not positive.
        RuntimeError: a parameter is on the meta device.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"fsdp2x.full_tensors: bucket_bytes must be positive, got {bucket_bytes}")
    chosen = [(name, p) for name, p, _ in named_params(model) if params is None or params(name, p)]
    meta = [name for name, param in chosen if param.is_meta]
    if meta:
        raise RuntimeError(f"fsdp2x.full_tensors: parameters on the meta device have no values yet: {meta}")
    return _in_buckets(chosen, dtype, device, bucket_bytes)


def _in_buckets(chosen, dtype, device, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    bucket: list[_Entry] = []
    filled_bytes = 0
    for name, param in chosen:
        entry = _Entry.of(name, param, dtype)
        size_bytes = param.numel() * entry.dtype.itemsize
        full = filled_bytes + size_bytes > bucket_bytes
        if bucket and (full or entry.group is not bucket[0].group or entry.device != bucket[0].device):
            yield from _gather(bucket, device)
            bucket, filled_bytes = [], 0
        bucket.append(entry)
        filled_bytes += size_bytes
    if bucket:
        yield from _gather(bucket, device)


@dataclass
class _Entry:
    """A parameter of a bucket. ``group`` is None where nothing needs to be gathered with others."""

    name: str
    param: nn.Parameter
    dtype: torch.dtype
    group: dist.ProcessGroup | None
    shard_dim: int = 0

    @classmethod
    def of(cls, name: str, param: nn.Parameter, dtype: torch.dtype | None) -> _Entry:
        target = dtype if dtype is not None and param.is_floating_point() else param.dtype
        if isinstance(param, DTensor):
            axes = [axis for axis, placement in enumerate(param.placements) if placement != Replicate()]
            # Exactly Shard: a strided or ragged shard, or one over two axes, is left to DTensor's own redistribution.
            if len(axes) == 1 and type(param.placements[axes[0]]) is Shard and type(param.to_local()) is torch.Tensor:
                group = param.device_mesh.get_group(axes[0])
                return cls(name, param, target, group, param.placements[axes[0]].dim)
        return cls(name, param, target, None)

    @property
    def device(self) -> torch.device:
        return self.param.device

    @property
    def wire_device(self) -> torch.device:
        """Where the group communicates: not where the parameter is when it is offloaded."""
        on_wire = self.device.type == self.param.device_mesh.device_type
        return self.device if on_wire else torch.device(self.param.device_mesh.device_type)

    def rows(self, rank: int, world: int) -> int:
        """Rows of ``rank`` along the shard dim: chunks of ceil(d/W), the last ones short or empty."""
        size = self.param.shape[self.shard_dim]
        chunk = -(-size // world)
        return max(0, min(size - rank * chunk, chunk))

    def shape(self, rows: int) -> list[int]:
        return [rows if dim == self.shard_dim else size for dim, size in enumerate(self.param.shape)]

    def num_bytes(self, rows: int) -> int:
        return math.prod(self.shape(rows)) * self.dtype.itemsize

    def alone(self) -> torch.Tensor:
        if not isinstance(self.param, DTensor):
            return self.param.detach().clone().to(self.dtype)
        whole = self.param.detach().full_tensor()
        replicated = all(placement == Replicate() for placement in self.param.placements)
        return (whole.clone() if replicated else whole).to(self.dtype)


@torch.no_grad()
def _gather(bucket: list[_Entry], device: torch.device | str | None) -> Iterator[tuple[str, torch.Tensor]]:
    group = bucket[0].group
    if group is None:
        for entry in bucket:
            yield entry.name, entry.alone().to(device or entry.device)
        return
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    starts, end = [], 0
    for entry in bucket:
        starts.append(end)
        end += -(-entry.num_bytes(entry.rows(0, world)) // _ALIGN_BYTES) * _ALIGN_BYTES
    mine = torch.zeros(end, dtype=torch.uint8, device=bucket[0].wire_device)
    for entry, start in zip(bucket, starts, strict=True):
        _part(mine, entry, start, entry.rows(rank, world)).copy_(entry.param.to_local())
    received = torch.empty(world * end, dtype=torch.uint8, device=mine.device)
    dist.all_gather_into_tensor(received, mine, group=group)
    del mine
    for entry, start in zip(bucket, starts, strict=True):
        parts = [_part(received, entry, r * end + start, entry.rows(r, world)) for r in range(world)]
        yield entry.name, torch.cat(parts, dim=entry.shard_dim).to(device or entry.device)


def _part(buffer: torch.Tensor, entry: _Entry, start: int, rows: int) -> torch.Tensor:
    """The place of a shard of ``rows`` rows in a bucket of bytes."""
    return buffer[start : start + entry.num_bytes(rows)].view(entry.dtype).view(entry.shape(rows))
