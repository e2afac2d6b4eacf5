"""Bytes of optimizer state on one rank: what is there, and what the first step will add."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from fsdp2x.memory.facts import ModelFacts
from fsdp2x.runtime import torch_private

# A float32 scalar that counts the steps, one for each parameter.
_STEP_BYTES = 4


# Moments, and counters of steps, of the optimizers that can be planned for.
PLANNED = {"adamw": (2, 1), "sgd": (0, 0), "sgd_momentum": (1, 0), "none": (0, 0)}


def planned_bytes(name: str, facts: ModelFacts) -> int:
    """What one of ``PLANNED`` keeps on this rank, with moments in the dtype of the parameters."""
    num_moments, num_counters = PLANNED[name]
    groups = [group for unit in facts.units for group in unit.groups]
    counters = num_counters * _STEP_BYTES * sum(group.num_trained for group in groups)
    return counters + num_moments * sum(group.trained_bytes for group in groups)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's state: of parameters that have one, its tensors; of others, those the first step makes.

    Raises:
        ValueError: before its first step, an optimizer whose state cannot be foretold (not Adam, AdamW or SGD).
    """
    total = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param)
            if state:
                total += sum(_local_bytes(value) for value in state.values() if isinstance(value, torch.Tensor))
            elif param.requires_grad:
                total += _first_state_bytes(optimizer, group, param)
    return total


def _local_bytes(tensor: torch.Tensor) -> int:
    local = torch_private.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.itemsize


def _first_state_bytes(optimizer: torch.optim.Optimizer, group: dict, param: torch.Tensor) -> int:
    local = torch_private.local_tensor(param) if isinstance(param, DTensor) else param
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        dtype = param.dtype
        narrow = (torch.float32, torch.bfloat16, torch.float16)
        if getattr(optimizer, "moments_dtype", None) is not None and dtype in narrow:
            dtype = optimizer.moments_dtype
        return (3 if group["amsgrad"] else 2) * local.numel() * dtype.itemsize + _STEP_BYTES
    if isinstance(optimizer, torch.optim.SGD):
        return local.numel() * local.itemsize if group["momentum"] else 0
    raise ValueError(
        f"fsdp2x.memory_report: {type(optimizer).__name__} has no state yet, and what it will keep is unknown; take "
        "one step first, or leave the optimizer out"
    )
