"""Counts bytes of optimizer state on one rank: existing ones, those of the first step, and where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fsdp2x.base.native import _C
from fsdp2x.optim.adamw import AdamW
from fsdp2x.optim.host_moments import buffer_bytes
from fsdp2x.optim.local import local_tensor
from fsdp2x.optim.moments import INT8, moment_bytes, moments_dtype_of
from fsdp2x.optim.muon import Muon, named_matrices
from fsdp2x.plan.facts import GroupFacts, ModelFacts

# A float32 scalar that counts the steps, one for each parameter.
_STEP_BYTES = 4
_TORCH_MUON = (torch.optim.Muon,) if hasattr(torch.optim, "Muon") else ()


@dataclass(frozen=True)
class _Kept:
    """State that an optimizer keeps for a parameter that it trains."""

    num_moments: int = 0
    counts_steps: bool = False
    moments_dtype: torch.dtype | str | None = None  # None: the parameter's
    on_host: bool = False  # whether its moments may be in CPU memory for a model on an accelerator

    def moments(self, numel: int, dtype: torch.dtype) -> list[int]:
        """Returns the bytes of all moments' tensors for ``numel`` elements."""
        return moment_bytes(numel, moments_dtype_of(dtype, self.moments_dtype)) * self.num_moments

    def total(self, numel: int, dtype: torch.dtype) -> int:
        return sum(self.moments(numel, dtype)) + _STEP_BYTES * self.counts_steps


_MATRIX = _Kept(1)  # for matrices that Muon steps, in their own dtype
_WITH_MOMENTS_DTYPE = {"": None, "_float32": torch.float32, "_bfloat16": torch.bfloat16, "_int8": INT8}
# The optimizers that can be planned. For Muon: parameters that are not matrices.
PLANNED = {
    **{f"adamw{end}": _Kept(2, True, dtype, AdamW.keeps_host_state) for end, dtype in _WITH_MOMENTS_DTYPE.items()},
    **{f"muon{end}": _Kept(2, True, dtype) for end, dtype in _WITH_MOMENTS_DTYPE.items()},
    "sgd": _Kept(),
    "sgd_momentum": _Kept(1),
    "none": _Kept(),
}


def may_be_on_host(name: str) -> bool:
    """Returns whether one of ``PLANNED`` supports ``HostOffloadPolicy(mode="optimizer")`` or keeps no state."""
    return PLANNED[name].on_host or not PLANNED[name].num_moments


@dataclass(frozen=True)
class StateBytes:
    """An optimizer's state on one rank."""

    total: int
    on_host: int = 0  # bytes of it in CPU memory, while its model is on an accelerator
    step: int = 0  # device memory that a step takes for state in CPU memory


def planned_bytes(name: str, facts: ModelFacts) -> StateBytes:
    """Returns the state that one of ``PLANNED`` keeps on this rank.

    Raises:
        ValueError: Muon, for a model that does not say which module is its output head.
    """
    planned = PLANNED[name]
    groups = [group for unit in facts.units for group in unit.groups]
    matrices = {found for found, _ in named_matrices(facts.model)} if name.startswith("muon") else frozenset()

    def trained(group: GroupFacts) -> Iterator[tuple[_Kept, int, torch.dtype]]:
        """Yields for each parameter its state, its elements on this rank and its dtype."""
        names = [param.fqn for param, trains in zip(group.params, group.trains, strict=True) if trains]
        for found, (numel, dtype) in zip(names, group.trained, strict=True):
            yield _MATRIX if found in matrices else planned, numel, dtype

    def total(of: list[GroupFacts]) -> int:
        return sum(kept.total(numel, dtype) for group in of for kept, numel, dtype in trained(group))

    def block(group: GroupFacts) -> int:
        return sum(_C.align_up(size) for kept, numel, dtype in trained(group) for size in kept.moments(numel, dtype))

    return StateBytes(
        total(groups),
        total([group for group in groups if group.offloads or group.keeps_host_state]),
        buffer_bytes([block(group) for group in groups if group.keeps_host_state and group.is_trainable]),
    )


def optimizer_bytes(
    optimizer: torch.optim.Optimizer, is_on_host: Callable[[torch.Tensor], bool] = lambda param: False
) -> StateBytes:
    """Returns the bytes of this rank's state. Parameters without state count what the first step makes.

    ``is_on_host`` says whether a parameter's state is in CPU memory while its model is on an accelerator.

    Raises:
        ValueError: the state before the first step cannot be predicted, because the optimizer is not Adam, AdamW, Muon,
            or SGD.
    """
    total = on_host = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param)
            kept = 0
            if state:
                kept = sum(local_tensor(value).nbytes for value in state.values() if isinstance(value, torch.Tensor))
            elif param.requires_grad:
                kept = _kept_by(optimizer, group).total(local_tensor(param).numel(), param.dtype)
            total += kept
            on_host += kept if is_on_host(param) else 0
    return StateBytes(total, on_host, getattr(optimizer, "host_step_bytes", 0))


def _kept_by(optimizer: torch.optim.Optimizer, group: dict) -> _Kept:
    if isinstance(optimizer, (Muon, *_TORCH_MUON)) and group.get("use_muon", True):
        return _Kept(1)
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, Muon)):
        return _Kept(3 if group["amsgrad"] else 2, True, getattr(optimizer, "moments_dtype", None))
    if isinstance(optimizer, torch.optim.SGD):
        return _Kept(1 if group["momentum"] else 0)
    raise ValueError(
        f"fsdp2x.memory_report: {type(optimizer).__name__} has no state yet, and its size cannot be predicted. Take "
        "one step first, or omit the optimizer."
    )
