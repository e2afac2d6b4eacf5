"""The weights of a model that files can fill: parameters and persistent buffers, under the names that files use.

A target knows which box of the whole tensor this rank keeps, and the local tensor that the box goes into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2x.base import torch_private
from fsdp2x.base.errors import CheckpointError
from fsdp2x.io.formats.tensors import Source
from fsdp2x.io.hf.sources import differ
from fsdp2x.io.names import hf_base
from fsdp2x.lifecycle.tree import unit_states
from fsdp2x.sharding.mesh import ShardGroup
from fsdp2x.sharding.sharded_param import ShardedParam


@dataclass
class Target:
    """One tensor of the model, with every place where it is registered; tied weights have several names."""

    names: list[str]
    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owners: list[tuple[nn.Module, str]]
    is_buffer: bool
    record: ShardedParam | None = None
    ranks: ShardGroup | None = field(default=None, repr=False)

    @property
    def tensor(self) -> torch.Tensor:
        """The sharded parameter, the plain one, or the buffer."""
        if self.record is not None:
            return self.record.param
        module, name = self.owners[0]
        found = (module._buffers if self.is_buffer else module._parameters)[name]
        assert found is not None, f"{self.fqn} has lost its tensor"
        return found

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def local(self) -> torch.Tensor:
        """The memory that a rank fills."""
        tensor = self.tensor.detach()
        return torch_private.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor

    def box(self) -> tuple[list[int], list[int]] | None:
        """Start and shape of this rank's part; None where it is no box (tensor parallel, or several axes)."""
        tensor = self.tensor
        if not isinstance(tensor, DTensor):
            return [0] * len(self.shape), list(self.shape)
        if self.record is not None and self.record.spec.unsharded is None and not self.record.is_wrapper:
            return self.ranks.rows(self.shape, self.record.spec.shard_dim)
        return None

    def fill_from_whole(self, whole: torch.Tensor) -> None:
        """Keeps this rank's part of the whole tensor. Local: no communication."""
        tensor, local = self.tensor, self.local
        if not isinstance(tensor, DTensor):
            local.copy_(whole)
            return
        box = self.box()
        if box is not None:
            for dim, (start, size) in enumerate(zip(*box, strict=True)):
                whole = whole.narrow(dim, start, size) if size != whole.shape[dim] else whole
        elif self.record is not None and self.record.spec.unsharded is not None:
            inner = self.record.spec.unsharded
            whole = whole.to(local.device)
            whole = distribute_tensor(whole, inner.mesh, inner.placements, src_data_rank=None).to_local()
            dim = self.record.spec.shard_dim
            start, sizes = self.ranks.rows(whole.shape, dim)
            whole = whole.narrow(dim, start[dim], sizes[dim])
        elif all(type(placement) is Shard or placement.is_replicate() for placement in tensor.placements):
            whole = distribute_tensor(
                whole.to(local.device), tensor.device_mesh, tensor.placements, src_data_rank=None
            ).to_local()
        else:
            raise NotImplementedError(
                f"fsdp2x.load_hf: parameter {self.fqn!r} has placements {tensor.placements}, which cannot be filled"
            )
        local.copy_(whole)


def find_targets(model: nn.Module) -> list[Target]:
    """The targets of ``model`` in the order of its parameters and buffers, ties once."""
    _, to_source = hf_base(model)
    records = {
        (id(module), name): (record, group.ranks)
        for state in unit_states(model)
        for group in state.groups
        for record in group.params
        for module, name in record.owners
    }
    by_id: dict[int, Target] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for is_buffer, tensors in ((False, module._parameters), (True, module._buffers)):
            for name, tensor in tensors.items():
                if tensor is None or is_buffer and name in module._non_persistent_buffers_set:
                    continue
                fqn = f"{prefix}.{name}" if prefix else name
                record, ranks = records.get((id(module), name), (None, None))
                tensor = tensor if record is None else record.param
                target = by_id.get(id(tensor))
                if target is None:
                    target = Target([], fqn, tuple(tensor.shape), tensor.dtype, [], is_buffer, record, ranks)
                    by_id[id(tensor)] = target
                target.names.append(to_source(fqn))
                target.owners.append((module, name))
    return list(by_id.values())


def materialize(model: nn.Module, targets: list[Target]) -> None:
    """Gives everything that is still on the meta device memory; values are undefined."""
    for state in unit_states(model):
        state.reshard()
        for group in state.groups:
            group.materialize()
    device = next((state.ranks.device for state in unit_states(model)), torch.device("cpu"))
    for target in targets:
        if target.record is None and target.tensor.is_meta:
            old = target.tensor
            fresh = torch.empty(target.shape, dtype=target.dtype, device=device)
            if not target.is_buffer:
                fresh = nn.Parameter(fresh, requires_grad=old.requires_grad)
            for module, name in target.owners:
                (module._buffers if target.is_buffer else module._parameters)[name] = fresh


def check_ties(target: Target, sources: list[Source], start: Sequence[int], shape: Sequence[int]) -> None:
    """Raises when a tied weight is stored under several names with different values."""
    for other in sources[1:]:
        if differ(sources[0], other, start, shape):
            raise CheckpointError(
                f"{' and '.join(target.names)} are tied in the model, but differ in the files; build the model with "
                "tie_word_embeddings=False in its config to keep both"
            )
