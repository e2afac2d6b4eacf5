"""Training of HuggingFace causal language models: typed config, data, trainer."""

from .config import ConfigError, TrainConfig
from .parse import load_config, parse_config
from .trainer import Trainer, train

__all__ = ["ConfigError", "TrainConfig", "Trainer", "load_config", "parse_config", "train"]
