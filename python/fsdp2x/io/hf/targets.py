"""Finds the weights of a model that files can fill, by the files' names, and initializes weights that no file holds.

A target knows which box of the full tensor this rank keeps, and the local tensor of that box. transformers'
``_init_weights`` gives missing weights their values. It runs once over the model, with full plain tensors in place of
the missing weights and everything else marked as initialized. Ranks draw from one seed and keep their parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2x.base import torch_private
from fsdp2x.base.failures import CheckpointError, exchange, rank_and_size
from fsdp2x.io.conversions import is_transformers, original_classes
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
        found = self.registry(module)[name]
        assert found is not None, f"{self.fqn} has lost its tensor"
        return found

    def registry(self, module: nn.Module) -> dict[str, Any]:
        """Returns where ``module`` registers the tensor."""
        return module._buffers if self.is_buffer else module._parameters

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def local(self) -> torch.Tensor:
        """The memory that a rank fills."""
        tensor = self.tensor.detach()
        return torch_private.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor

    @property
    def is_box(self) -> bool:
        """Whether this rank's part is a box of the full tensor. False for tensor parallelism, or several axes."""
        if not isinstance(self.tensor, DTensor):
            return True
        return self.record is not None and self.record.spec.unsharded is None and not self.record.is_wrapper

    def box(self) -> tuple[list[int], list[int]]:
        """Start and shape of this rank's part, or of the full tensor if the part is not a box."""
        if self.is_box and isinstance(self.tensor, DTensor) and self.record is not None and self.ranks is not None:
            return self.ranks.rows(self.shape, self.record.spec.shard_dim)
        return [0] * len(self.shape), list(self.shape)

    def fill(self, values: torch.Tensor) -> None:
        """Takes the values of the box. Not collective."""
        tensor, local = self.tensor, self.local
        inner = None if self.record is None else self.record.spec.unsharded
        if self.is_box or not isinstance(tensor, DTensor):
            local.copy_(values)
        elif inner is not None and self.record is not None and self.ranks is not None:
            values = _distributed(values.to(local.device), inner)
            start, sizes = self.ranks.rows(values.shape, self.record.spec.shard_dim)
            local.copy_(values[_slices(start, sizes)])
        elif all(type(placement) is Shard or placement.is_replicate() for placement in tensor.placements):
            local.copy_(_distributed(values.to(local.device), torch_private.spec_of(tensor)))
        else:
            raise NotImplementedError(
                f"fsdp2x.load_hf: parameter {self.fqn!r} has placements {tensor.placements}, which cannot be filled"
            )


def _distributed(whole: torch.Tensor, spec: torch_private.DTensorSpec) -> torch.Tensor:
    return distribute_tensor(whole, spec.mesh, spec.placements, src_data_rank=None).to_local()


def _slices(start: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(start, sizes, strict=True))


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
                target.registry(module)[name] = fresh


_MARK = "_is_hf_initialized"


@torch.no_grad()
def initial_values(model: nn.Module, targets: list[Target], missing: list[Target], seed: int) -> Callable[[], None]:
    """Makes values for ``missing`` and all buffers on the meta device. The returned call puts them in place."""
    paths = {module: path for path, module in model.named_modules()}
    buffers = [
        (module, name, _undefined(buffer.shape, buffer.dtype))
        for module in paths
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    wholes = [(target, _undefined(target.shape, target.dtype)) for target in missing]
    if not buffers and not wholes:
        return lambda: None
    places: list[tuple[Any, str, torch.Tensor]] = [(module._buffers, name, value) for module, name, value in buffers]
    for target, whole in wholes:
        value = whole if target.is_buffer else nn.Parameter(whole, requires_grad=False)
        places += [(target.registry(module), name, value) for module, name in target.owners]
    fresh = {id(value) for *_, value in places}
    device = next((t.local.device for t in targets if not t.local.is_meta), torch.device("cpu"))
    with contextlib.ExitStack() as stack:
        for registry, name, value in places:
            stack.callback(registry.__setitem__, name, registry[name])
            registry[name] = value
        for module in paths:  # everything except fresh values counts as initialized, but no module
            module.__dict__.pop(_MARK, None)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) not in fresh and not getattr(tensor, _MARK, False):
                    setattr(tensor, _MARK, True)
                    stack.callback(delattr, tensor, _MARK)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(seed)
        _run(model)
    unset = [target.fqn for target, whole in wholes if _is_undefined(whole)]
    unset += [f"{paths[module]}.{name}".lstrip(".") for module, name, value in buffers if _is_undefined(value)]
    if unset:
        raise CheckpointError(
            f"no file holds {', '.join(unset)}, and {type(model).__name__} does not initialize them. Give them values "
            "before loading (a model whose buffers are not on the meta device keeps them)."
        )

    @torch.no_grad()
    def place() -> None:
        for target, whole in wholes:
            target.fill(whole[_slices(*target.box())])
        for module, name, value in buffers:
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


def _undefined(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of a value that no initialization leaves everywhere: NaN, or the smallest integer."""
    is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    sentinel = torch.iinfo(dtype).min if is_integer else False if dtype == torch.bool else torch.nan
    return torch.full(shape, sentinel, dtype=dtype, device="cpu")


def _is_undefined(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0 or tensor.dtype in (torch.bool, torch.uint8):
        return False
    is_set = (
        tensor == tensor
        if tensor.is_floating_point() or tensor.is_complex()
        else tensor != _undefined((), tensor.dtype)
    )
    return not is_set.any()


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
