"""What one parameter contributes to a gather: which rows this rank has, over which process group they are cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2x.base import torch_private
from fsdp2x.base.memory_file import tensor_at
from fsdp2x.base.native import _C


@dataclass
class Entry:
    """A parameter of a bucket. ``group`` is None where it is not gathered with others."""

    name: str
    param: nn.Parameter
    dtype: torch.dtype
    group: dist.ProcessGroup | None
    shard_dim: int = 0

    @classmethod
    def of(cls, name: str, param: nn.Parameter, dtype: torch.dtype | None) -> Entry:
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
    def local(self) -> torch.Tensor:
        """What this rank has of it."""
        param = self.param
        # The detour by a detached DTensor costs more than a small copy.
        return (torch_private.local_tensor(param) if isinstance(param, DTensor) else param).detach()

    @property
    def version(self) -> int:
        """Changes with each in-place change of the values, by DTensor's operations or of the shard itself."""
        both = (
            (self.param, torch_private.local_tensor(self.param)) if isinstance(self.param, DTensor) else (self.param,)
        )
        return sum(tensor._version for tensor in both if not tensor.is_inference())

    @property
    def layout(self) -> tuple:
        """Equal for parameters that are gathered alike."""
        placements = self.param.placements if isinstance(self.param, DTensor) else None
        return self.param.shape, self.param.dtype, self.device, placements, self.dtype, self.group, self.shard_dim

    @property
    def wire_device(self) -> torch.device:
        """Where the group communicates: not where the parameter is when it is offloaded."""
        on_wire = self.device.type == self.param.device_mesh.device_type
        return self.device if on_wire else torch.device(self.param.device_mesh.device_type)

    @property
    def whole_bytes(self) -> int:
        return self.param.numel() * self.dtype.itemsize

    def rows(self, rank: int, world: int) -> tuple[int, int]:
        """First row and number of rows of ``rank``: chunks of ceil(d/W), the last short or empty."""
        begin, end = _C.shard_rows(self.param.shape[self.shard_dim], world, rank)
        return begin, end - begin

    def shape(self, num_rows: int) -> list[int]:
        return [num_rows if dim == self.shard_dim else size for dim, size in enumerate(self.param.shape)]

    def num_bytes(self, num_rows: int) -> int:
        return math.prod(self.shape(num_rows)) * self.dtype.itemsize

    def whole(self, buffer: torch.Tensor, start: int) -> torch.Tensor:
        """The whole tensor in a buffer of bytes."""
        return tensor_at(buffer, start, self.param.shape, self.dtype)

    def part(self, buffer: torch.Tensor, start: int, num_rows: int) -> torch.Tensor:
        """A shard of ``num_rows`` rows in a buffer of bytes."""
        return tensor_at(buffer, start, self.shape(num_rows), self.dtype)

    def alone(self) -> torch.Tensor:
        """The whole tensor in memory of its own; collective for a parameter that is sharded over several axes."""
        if not isinstance(self.param, DTensor):
            return self.param.detach().clone().to(self.dtype)
        whole = self.param.detach().full_tensor()
        replicated = all(placement == Replicate() for placement in self.param.placements)
        return (whole.clone() if replicated else whole).to(self.dtype)
