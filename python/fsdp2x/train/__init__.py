"""Trains HuggingFace causal language models: typed config, data, trainer."""

from fsdp2x.train.config import ConfigError, TrainConfig, TrainingError
from fsdp2x.train.load_config import load_config
from fsdp2x.train.parse import parse_config
from fsdp2x.train.trainer import Trainer, train

__all__ = ["ConfigError", "TrainConfig", "Trainer", "TrainingError", "load_config", "parse_config", "train"]
