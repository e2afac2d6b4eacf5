"""Finds the weights of a model that files can fill, by the files' names, and initializes weights that no file holds.

A target knows which box of the full tensor this rank keeps, and the local tensor of that box. transformers'
``_init_weights`` gives missing weights their values. It runs once over the model, with full plain tensors in place of
the missing weights and everything else marked as initialized. Ranks draw from one seed and keep their parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2x.base import torch_private
from fsdp2x.base.failures import CheckpointError, exchange, rank_and_size
from fsdp2x.io.conversions import is_transformers, original_classes
from fsdp2x.io.formats.tensors import Source, differ
from fsdp2x.io.names import ForeignModel, hf_base
from fsdp2x.lifecycle.replicas import checksum
from fsdp2x.lifecycle.tree import unit_states
from fsdp2x.sharding.mesh import ShardGroup
from fsdp2x.sharding.sharded_param import ShardedParam


@dataclass
class Target:
    """One tensor of the model with every place that registers it. Tied weights have several names."""

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
        """Start and shape of this rank's part. None if it is not a box (tensor parallelism, or several axes)."""
        tensor = self.tensor
        if not isinstance(tensor, DTensor):
            return [0] * len(self.shape), list(self.shape)
        record, ranks = self.record, self.ranks
        if record is not None and ranks is not None and record.spec.unsharded is None and not record.is_wrapper:
            return ranks.rows(self.shape, record.spec.shard_dim)
        return None

    def fill_from_whole(self, whole: torch.Tensor) -> None:
        """Keeps this rank's part of the full tensor. Not collective."""
        tensor, local = self.tensor, self.local
        if not isinstance(tensor, DTensor):
            local.copy_(whole)
            return
        box = self.box()
        if box is not None:
            for dim, (start, size) in enumerate(zip(*box, strict=True)):
                whole = whole.narrow(dim, start, size) if size != whole.shape[dim] else whole
        elif self.record is not None and self.ranks is not None and (inner := self.record.spec.unsharded) is not None:
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
    """Returns the targets of ``model`` in the order of its parameters and buffers, ties once."""
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
    """Allocates memory with undefined values for everything that is still on the meta device."""
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
                registry: dict[str, Any] = module._buffers if target.is_buffer else module._parameters
                registry[name] = fresh


def check_ties(target: Target, sources: list[Source], start: Sequence[int], shape: Sequence[int]) -> None:
    """Raises if a tied weight is stored under several names with different values."""
    for other in sources[1:]:
        if differ(sources[0], other, start, shape):
            raise CheckpointError(
                f"{' and '.join(target.names)} are tied in the model, but differ in the files. Build the model with "
                "tie_word_embeddings=False in its config to keep both."
            )


_MARK = "_is_hf_initialized"


@torch.no_grad()
def initial_values(model: nn.Module, targets: list[Target], missing: list[Target], seed: int) -> Callable[[], None]:
    """Makes values for ``missing`` and all buffers on the meta device. The returned call puts them in place."""
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    if not missing and not buffers:
        return lambda: None
    device = next((t.local.device for t in targets if not t.local.is_meta), torch.device("cpu"))
    wholes = [(target, _undefined(target.shape, target.dtype)) for target in missing]
    made = [(module, name, _undefined(buffer.shape, buffer.dtype)) for module, name, buffer in buffers]
    placed = {id(value) for *_, value in made}
    with contextlib.ExitStack() as stack:
        for target, whole in wholes:
            value = whole if target.is_buffer else nn.Parameter(whole, requires_grad=False)
            placed.add(id(value))
            for module, name in target.owners:
                stack.enter_context(_replaced(module._buffers if target.is_buffer else module._parameters, name, value))
        for module, name, value in made:
            stack.enter_context(_replaced(module._buffers, name, value))
        stack.enter_context(_marked(model, placed))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(seed)
        _run(model)
    unset = [target.fqn for target, whole in wholes if _is_undefined(whole)]
    paths = {module: path for path, module in model.named_modules()}
    unset += [f"{paths[module]}.{name}".lstrip(".") for module, name, value in made if _is_undefined(value)]
    if unset:
        raise CheckpointError(
            f"no file holds {', '.join(unset)}, and {type(model).__name__} does not initialize them. Give them values "
            "before loading (a model whose buffers are not on the meta device keeps them)."
        )

    @torch.no_grad()
    def place() -> None:
        for target, whole in wholes:
            target.fill_from_whole(whole)
        for module, name, value in made:
            module._buffers[name] = value.to(device)

    return place


def _run(model: ForeignModel) -> None:
    base, _ = hf_base(model)
    inside: set[nn.Module] = set()  # of transformers models, which may be only a part of the model
    for module in base.modules():
        own = list(module._parameters.values())
        if module in inside:
            continue
        if is_transformers(module) and hasattr(module, "initialize_weights"):
            inside.update(module.modules())
            with original_classes(module):
                module.initialize_weights()
        elif own and hasattr(module, "reset_parameters") and not any(getattr(param, _MARK, False) for param in own):
            module.reset_parameters()
    for module in model.modules():
        if hasattr(module, "reset_lora_parameters") and hasattr(module, "active_adapters"):
            for adapter in module.r:
                parts = [layers[adapter] for layers in (module.lora_A, module.lora_B) if adapter in layers]
                params = [param for part in parts for param in part.parameters()]
                if params and not any(getattr(param, _MARK, False) for param in params):
                    module.reset_lora_parameters(adapter, model.peft_config[adapter].init_lora_weights)


def _undefined(shape, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of a value that no initialization leaves everywhere: NaN, or the smallest integer."""
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    return tensor.fill_(_sentinel(dtype))


def _sentinel(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _is_undefined(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0 or tensor.dtype in (torch.bool, torch.uint8):
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().all())
    return bool((tensor == _sentinel(tensor.dtype)).all())


@contextlib.contextmanager
def _replaced(registry: dict, name: str, value: torch.Tensor) -> Iterator[None]:
    before = registry[name]
    registry[name] = value
    try:
        yield
    finally:
        registry[name] = before


@contextlib.contextmanager
def _marked(model: nn.Module, unmarked: set[int]) -> Iterator[None]:
    """Marks everything except the tensors with these ids as initialized, but no module."""
    marked: list[torch.Tensor] = []
    for module in model.modules():
        module.__dict__.pop(_MARK, None)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in unmarked and not getattr(tensor, _MARK, False):
                setattr(tensor, _MARK, True)
                marked.append(tensor)
    try:
        yield
    finally:
        for tensor in marked:
            delattr(tensor, _MARK)


def check_buffers(model: nn.Module) -> None:
    """Raises on every rank if a buffer differs between ranks. Collective."""
    if rank_and_size()[1] == 1:
        return  # no other ranks to compare with
    mine = {name: checksum(buffer.detach()) for name, buffer in model.named_buffers() if not buffer.is_meta}
    everyone = exchange(mine)
    wrong = {
        name: [rank for rank, other in enumerate(everyone) if other.get(name) != digest]
        for name, digest in everyone[0].items()
    }
    told = [f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in wrong.items() if ranks]
    if told:
        raise CheckpointError(f"buffers differ from rank 0's: {'; '.join(told)}")
