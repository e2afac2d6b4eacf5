"""The config that goes with written weights."""

from __future__ import annotations

import copy
from typing import Any

import torch

from fsdp2x.hf.names import unsharded_class


def plain_config(model: torch.nn.Module) -> Any:
    """A copy of the model's config that names the unsharded class and the dtype, as `save_pretrained` does."""
    config = copy.deepcopy(model.config)
    config.architectures = [unsharded_class(model).__name__]
    config.dtype = next(p.dtype for p in model.parameters())
    return config
