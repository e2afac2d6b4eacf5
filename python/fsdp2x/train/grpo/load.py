"""Loads a run's `GrpoConfig` from its YAML file: fsdp2x's own sections, or the keys of another policy trainer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fsdp2x.base.arguments import checked
from fsdp2x.train.grpo.config import GrpoConfig
from fsdp2x.train.grpo.dialects import DIALECTS
from fsdp2x.train.load_config import load


@checked
def load_grpo_config(path: str | Path, overrides: Iterable[str] = (), *, resume_from: str | None = None) -> GrpoConfig:
    """Reads a YAML file and applies overrides such as `rollout.group_size=16`.

    `resume_from` replaces checkpoint.resume_from. Warnings name keys without an effect.

    Raises:
        ConfigError: a key is unknown (the message names the nearest), a value has the wrong type, or settings conflict.
    """
    return load(path, overrides, resume_from=resume_from, kind=GrpoConfig, dialects=DIALECTS)
