"""Configs of models: what is read is looked at before transformers follows it, what is written goes with weights."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch

from fsdp2x.errors import CheckpointError
from fsdp2x.hf.names import unsharded_class
from fsdp2x.reading.json_file import read_json

# Of what is made one by one, more than any model has.
_COUNTED = re.compile(r"(?:^|_)(layers?|depths?|blocks?|experts|heads|labels|codebooks)(?:_|$)")
_MOST = 100_000
_MOST_LAYERS = 10_000


def read_config(file: Path) -> dict[str, Any]:
    """The mapping in a config.json; transformers may be given the file then.

    Raises:
        CheckpointError: the file cannot be opened, is no JSON, or counts layers and the like of which no model has so
            many: transformers would make one after the other.
    """
    settings = read_json(file, unique=False)
    _check_counts(settings, str(file))
    return settings


def _check_counts(settings: dict[str, Any], where: str) -> None:
    for key, value in settings.items():
        if isinstance(value, dict):
            _check_counts(value, f"{where}: {key}")
        elif found := _COUNTED.search(key):
            most = _MOST_LAYERS if found[1].startswith(("layer", "depth", "block")) else _MOST
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int | float) and not number <= most:
                    raise CheckpointError(f"{where}: {key} is {number:g}, expected at most {most}")


def plain_config(model: torch.nn.Module) -> Any:
    """A copy of the model's config that names the unsharded class and the dtype, as `save_pretrained` does."""
    config = copy.deepcopy(model.config)
    config.architectures = [unsharded_class(model).__name__]
    config.dtype = next(p.dtype for p in model.parameters())
    return config
