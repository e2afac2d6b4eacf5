"""A run's config from its YAML file, in any dialect, with overrides; keys without an effect are warned of."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from ..arguments import checked
from .config import ConfigError, TrainConfig
from .dialects import translate_file
from .idle import idle_settings
from .parse import build

logger = logging.getLogger(__name__)


@checked
def load_config(path: str | Path, overrides: Iterable[str] = (), *, resume_from: str | None = None) -> TrainConfig:
    """Reads a YAML file of any dialect and applies overrides such as `optimizer.lr=1e-3`; raises `ConfigError`.

    `resume_from` replaces checkpoint.resume_from when it is given. Keys without an effect are warned of by name.
    """
    translation = translate_file(path, overrides)
    if translation.needs:
        raise ConfigError(f"{path} says not enough to run; it needs {'; '.join(translation.needs)}")
    config = build(TrainConfig, translation.settings)
    if os.environ.get("RANK", "0") == "0":
        for sentence in [*translation.without_effect(), *idle_settings(config, translation.settings)]:
            logger.warning("%s: %s", path, sentence)
    if resume_from is None:
        return config
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume_from=resume_from))
