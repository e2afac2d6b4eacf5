"""Trains HuggingFace causal language models: typed config, data, trainer.

Modules are imported when their names are used, so that commands that train nothing need no package of the train extra.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp2x.train.config import ConfigError, TrainConfig, TrainingError
    from fsdp2x.train.config_file import load_config, parse_config
    from fsdp2x.train.trainer import Trainer, train

__all__ = ["ConfigError", "TrainConfig", "Trainer", "TrainingError", "load_config", "parse_config", "train"]
_HOMES = {"load_config": "config_file", "parse_config": "config_file", "Trainer": "trainer", "train": "trainer"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'config')}"), name)
