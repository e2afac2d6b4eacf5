"""Names and classes of modules without what wrappers, and ``fully_shard``, have added."""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.fsdp import FSDPModule

# Levels that activation checkpointing and torch.compile add to the path of what they wrap.
WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
_LEVELS = re.compile(rf"(?:{'|'.join(WRAPPERS)})\.")


def clean_name(name: str) -> str:
    """A FQN without the levels that wrappers add."""
    return _LEVELS.sub("", name)


def unsharded_class(module: nn.Module) -> type:
    """The module's class before ``fully_shard`` swapped in a subclass."""
    return next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule))
