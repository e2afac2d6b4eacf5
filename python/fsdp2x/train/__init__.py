"""Training of HuggingFace causal language models: typed config, data, trainer."""

from .config import ConfigError, TrainConfig, TrainingError
from .load_config import load_config
from .parse import parse_config
from .trainer import Trainer, train

__all__ = ["ConfigError", "TrainConfig", "Trainer", "TrainingError", "load_config", "parse_config", "train"]
