"""Bytes of optimizer state on one rank: what is there, and what the first step will add; where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fsdp2x.memory.facts import GroupFacts, ModelFacts
from fsdp2x.optim.host_moments import buffer_bytes
from fsdp2x.optim.lion import Lion
from fsdp2x.optim.local import local_tensor
from fsdp2x.optim.moments import INT8, moment_bytes, moments_dtype_of
from fsdp2x.optim.muon import Muon
from fsdp2x.optim.muon_groups import muon_param_groups
from fsdp2x.runtime.native import _C

# A float32 scalar that counts the steps, one for each parameter.
_STEP_BYTES = 4
_TORCH_MUON = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()


@dataclass(frozen=True)
class _Kept:
    """What an optimizer keeps of a parameter that it trains."""

    num_moments: int = 0
    num_counters: int = 0  # of steps
    moments_dtype: torch.dtype | str | None = None  # None: that of the parameter
    steps_matrices: bool = False  # as Muon: one moment of each in its own dtype; the numbers are those of the others


# The optimizers that can be planned for.
PLANNED = {
    "adamw": _Kept(2, 1),
    "adamw_float32": _Kept(2, 1, torch.float32),
    "adamw_bfloat16": _Kept(2, 1, torch.bfloat16),
    "adamw_int8": _Kept(2, 1, INT8),
    "lion": _Kept(1),
    "muon": _Kept(2, 1, steps_matrices=True),
    "muon_float32": _Kept(2, 1, torch.float32, steps_matrices=True),
    "muon_bfloat16": _Kept(2, 1, torch.bfloat16, steps_matrices=True),
    "muon_int8": _Kept(2, 1, INT8, steps_matrices=True),
    "sgd": _Kept(),
    "sgd_momentum": _Kept(1),
    "none": _Kept(),
}


@dataclass(frozen=True)
class StateBytes:
    """An optimizer's state on one rank."""

    total: int
    on_host: int = 0  # of it, while its model is on an accelerator
    step: int = 0  # device memory that a step takes for what is on the host


def planned_bytes(name: str, facts: ModelFacts) -> StateBytes:
    """What one of ``PLANNED`` keeps on this rank.

    Raises:
        ValueError: Muon for a model that does not say which module is its output head.
    """
    planned = PLANNED[name]
    groups = [group for unit in facts.units for group in unit.groups]
    matrices = _matrices(facts.model) if planned.steps_matrices else frozenset()

    def moments(group: GroupFacts) -> Iterator[list[int]]:
        """Bytes of the tensors of all moments of each parameter."""
        for name, (numel, dtype) in zip(_trained(group), group.trained, strict=True):
            if name in matrices:
                yield [numel * dtype.itemsize]
            else:
                yield moment_bytes(numel, moments_dtype_of(dtype, planned.moments_dtype)) * planned.num_moments

    def kept(of: list[GroupFacts]) -> int:
        num_counted = sum(name not in matrices for group in of for name in _trained(group))
        counters = planned.num_counters * _STEP_BYTES * num_counted
        return counters + sum(sum(sizes) for group in of for sizes in moments(group))

    brought = [group for group in groups if group.keeps_host_state and group.is_trainable]
    return StateBytes(
        kept(groups),
        kept([group for group in groups if group.offloads or group.keeps_host_state]),
        buffer_bytes([sum(_C.align_up(size) for sizes in moments(group) for size in sizes) for group in brought]),
    )


def _trained(group: GroupFacts) -> list[str]:
    """Names of what ``group.trained`` has."""
    return [param.fqn for param, trains in zip(group.params, group.trains, strict=True) if trains]


def _matrices(model: nn.Module) -> frozenset[str]:
    """Names of what Muon steps."""
    groups = muon_param_groups(model)
    return frozenset(name for group in groups if group["use_muon"] for name, _ in group["params"])


def optimizer_bytes(
    optimizer: torch.optim.Optimizer, is_on_host: Callable[[torch.Tensor], bool] = lambda param: False
) -> StateBytes:
    """Bytes of this rank's state: of parameters that have one, its tensors; of others, those the first step makes.

    ``is_on_host``: whether the state of a parameter is in host memory while its model is on an accelerator.

    Raises:
        ValueError: before its first step, an optimizer whose state cannot be foretold (not Adam(W), Lion, Muon or SGD).
    """
    total = on_host = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param)
            kept = 0
            if state:
                kept = sum(_local_bytes(value) for value in state.values() if isinstance(value, torch.Tensor))
            elif param.requires_grad:
                kept = _first_state_bytes(optimizer, group, param)
            total += kept
            on_host += kept if is_on_host(param) else 0
    return StateBytes(total, on_host, getattr(optimizer, "host_step_bytes", 0))


def _local_bytes(tensor: torch.Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.itemsize


def _first_state_bytes(optimizer: torch.optim.Optimizer, group: dict, param: torch.Tensor) -> int:
    local = local_tensor(param)
    if isinstance(optimizer, Lion) or isinstance(optimizer, (Muon, *_TORCH_MUON)) and group.get("use_muon", True):
        return local.numel() * local.itemsize
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, Muon)):
        dtype = moments_dtype_of(param.dtype, getattr(optimizer, "moments_dtype", None))
        return (3 if group["amsgrad"] else 2) * sum(moment_bytes(local.numel(), dtype)) + _STEP_BYTES
    if isinstance(optimizer, torch.optim.SGD):
        return local.numel() * local.itemsize if group["momentum"] else 0
    raise ValueError(
        f"fsdp2x.memory_report: {type(optimizer).__name__} has no state yet, and what it will keep is unknown; take "
        "one step first, or leave the optimizer out"
    )
