"""The only importer of private torch names; a test fails when one of them vanishes.

Owns no state. Each name says why the public surface does not do.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import contract  # fully_shard.state(module) and the "only once" error
from torch.distributed._composable.contract import (  # to undo a registration whose sharding failed
    REGISTRY_KEY,
    STATE_KEY,
    _get_registry,
)
from torch.distributed._composable_state import _State  # what contract() requires of a state
from torch.distributed.utils import _get_root_modules  # which modules of a list are not below another one

__all__ = [
    "accelerator_type",
    "contract",
    "forget_contract",
    "group_timeout",
    "is_replicated",
    "root_modules",
    "set_local_tensor",
    "State",
]

State = _State
root_modules = _get_root_modules


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's composable ``replicate`` manages this module."""
    registry = _get_registry(module)
    return registry is not None and "replicate" in registry


def forget_contract(modules: list[nn.Module], function) -> None:
    """Undoes what ``contract`` recorded for ``function`` on ``modules``."""
    for module in modules:
        module.__dict__.get(STATE_KEY, {}).pop(function, None)
        module.__dict__.get(REGISTRY_KEY, {}).pop(function.__name__, None)


def set_local_tensor(param: torch.Tensor, local: torch.Tensor) -> None:
    """Re-points a DTensor at another local tensor of the same shape and dtype, keeping the object."""
    param._local_tensor = local


def accelerator_type() -> str:
    """Device type of the default mesh: the machine's accelerator, else ``cpu``."""
    return torch._C._get_accelerator().type


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout a process group was made with; 30 minutes where its backend does not tell."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return timedelta(minutes=30)
