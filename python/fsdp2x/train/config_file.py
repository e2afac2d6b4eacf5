"""Reads the YAML file of a run with overrides, and says where a mistake is in it.

It warns of keys without an effect, because a run without a warning would look as if they counted.
"""

from __future__ import annotations

import difflib
import functools
import logging
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import ConfigError, reworded
from fsdp2x.train.config import SECTIONS, TrainConfig, known_keys
from fsdp2x.train.parse import (
    apply_overrides,
    describe,
    first_leaf,
    read_lines,
    read_overrides,
    say_unknown,
    set_path,
)
from fsdp2x.train.translate import describe_format, find_format, own_sections

logger = logging.getLogger(__name__)


@checked
def load_config(path: str | Path, overrides: Iterable[str] = (), *, resume_from: str | None = None) -> TrainConfig:
    """Reads a YAML file and applies overrides such as `optimizer.lr=1e-3`. Raises `ConfigError`.

    `resume_from` replaces checkpoint.resume_from. Warnings name keys without an effect.
    """
    return ConfigFile.read(path, overrides).parse(resume_from=resume_from)


@checked(own=("settings",))
def parse_config(settings: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration of a nested mapping, which may lack what only a run needs.

    Raises:
        ConfigError: keys or values are wrong. It has a line for each of them.
    """
    try:
        return TrainConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentences(error, settings))) from None


def _sentences(error: ValidationError, settings: Any) -> list[str]:
    """Returns a sentence for each wrong setting: pydantic has several errors for a value of several types."""
    known, said = known_keys(), {}
    for one in error.errors(include_url=False):
        place = one["loc"][:2]
        key = ".".join(map(str, place))
        if one["type"] in ("extra_forbidden", "invalid_key"):
            path = first_leaf(key, one["input"])
            said[path] = say_unknown(path, path, [*known, *SECTIONS])
        elif one["type"] == "value_error":
            said[key] = str(one["ctx"]["error"])
        else:
            got = functools.reduce(operator.getitem, place, settings)
            expected = known[key].type if key in known else "a mapping"
            words = re.findall("'(.*?)'", one.get("ctx", {}).get("expected", ""))
            near = difflib.get_close_matches(str(got), words, n=1)
            if near or key not in said:
                hint = f"; did you mean {near[0]}?" if near else ""
                said[key] = f"{key or 'config'}: got {describe(got)}, expected {expected}{hint}"
    return [*said.values()]


@dataclass(frozen=True)
class ConfigFile:
    """A file's settings with those of the command line, which are `overridden`, and the `lines` of its keys."""

    path: str
    settings: dict
    lines: Mapping[str, int]
    overridden: Collection[str]

    @classmethod
    def read(cls, path: str | Path, overrides: Iterable[str] = ()) -> ConfigFile:
        """Reads a file in fsdp2x's sections.

        Raises:
            ConfigError: it is the file of another trainer.
        """
        if not str(path):
            raise ConfigError("expected the path of a config, got an empty one")
        file = cls.read_any(path, overrides)
        form = None if own_sections(file.settings) else find_format(file.settings)
        if form is not None:
            raise ConfigError(describe_format(form, file.settings, str(path)))
        return file

    @classmethod
    def read_any(cls, path: str | Path, overrides: Iterable[str]) -> ConfigFile:
        """Reads a file of any keys. An empty path reads no file."""
        overrides = list(overrides)
        settings, lines = read_lines(path) if path else ({}, {})
        return cls(
            str(path), apply_overrides(settings, overrides), lines, [key for key, _ in read_overrides(overrides)]
        )

    def line_of(self, key: str) -> str:
        """Returns `FILE:LINE: ` for a key of the file, else an empty string."""
        line = None if key in self.overridden else self.lines.get(key)
        return "" if line is None else f"{self.path}:{line}: "

    def located(self) -> AbstractContextManager[None]:
        """Adds its line to a `ConfigError` of the block about a key of the file."""
        return reworded(ConfigError, lambda error: self.locate(str(error)), ConfigError)

    def locate(self, message: str) -> str:
        return "\n".join(map(self._locate, message.split("\n")))

    def _locate(self, sentence: str) -> str:
        found = re.match(r"(?:unknown key )?([^\s:]+?)(?:=\S*)?[.:,]? ", sentence)
        return (self.line_of(found[1]) if found else "") + sentence

    def parse(self, *, resume_from: str | None = None) -> TrainConfig:
        """Returns the config of a run. Raises `ConfigError` also if what only a run needs is missing."""
        if resume_from is not None:
            set_path(self.settings, ["checkpoint", "resume_from"], resume_from, "")
        with self.located():
            config = parse_config(self.settings)
        if config.missing:
            raise ConfigError(f"{self.path} lacks settings. To run it needs {'; '.join(config.missing)}.")
        if os.environ.get("RANK", "0") == "0":
            for sentence in idle_settings(config):
                logger.warning("%s: %s", self.path, self.locate(sentence).removeprefix(f"{self.path}:"))
        return config


# ---- settings that have no effect together with others: keys, or whole sections -> (when, why)

IDLE: dict[tuple[str, ...], tuple[Callable[[TrainConfig], bool], str]] = {
    ("lora.alpha", "lora.dropout", "lora.target_modules"): (lambda c: c.lora.rank == 0, "lora.rank is 0"),
    ("data.max_tokens",): (lambda c: not c.data.packing, "data.packing is false"),
    ("data.held_out",): (lambda c: bool(c.data.validation_files), "data.validation_files replace it"),
    ("optimizer.betas", "optimizer.eps"): (lambda c: c.optimizer.name == "sgd", "optimizer.name is sgd"),
    ("optimizer.muon_split", "optimizer.muon_ns_method", "optimizer.muon_ns_dtype"): (
        lambda c: c.optimizer.name != "muon",
        "optimizer.name is not muon",
    ),
    ("optimizer.name", "optimizer.momentum", "optimizer.muon_split", "optimizer.muon_ns_method",
     "optimizer.muon_ns_dtype"): (
        lambda c: c.optimizer.name == "muon" and c.lora.rank > 0,
        "AdamW steps the matrices of adapters",
    ),
    ("model.config.router_aux_loss_coef", "model.config.aux_loss_coef"): (
        lambda c: not (c.model.config or {}).get("output_router_logits"),
        "model.config.output_router_logits is false, so the loss has no part of the router",
    ),
    ("schedule.warmup_ratio",): (lambda c: c.schedule.warmup_steps > 0, "schedule.warmup_steps comes before it"),
    ("schedule.min_lr_ratio",): (lambda c: c.schedule.min_lr is not None, "schedule.min_lr comes before it"),
    ("schedule.min_lr", "schedule.min_lr_ratio", "schedule.decay_steps"): (
        lambda c: c.schedule.kind == "constant",
        "schedule.kind is constant",
    ),
    ("schedule.wsd_decay_steps",): (
        lambda c: c.schedule.kind != "wsd",
        "schedule.kind is not wsd",
    ),
    ("parallel.expert_fsdp_size",): (lambda c: c.parallel.expert_parallel == 1, "parallel.expert_parallel is 1"),
    ("scaler.init_scale", "scaler.growth_interval"): (
        lambda c: c.scaler.enabled is False,
        "scaler.enabled is false",
    ),
    ("train.compile_backend",): (lambda c: not c.train.compile, "train.compile is false"),
    ("train.eval_blocks", "train.eval_batch_size", "train.global_eval_batch_size"): (
        lambda c: c.train.mode == "train" and c.train.eval_every == 0,
        "train.eval_every is 0",
    ),
    ("logging.wandb_options",): (lambda c: not c.logging.wandb, "logging.wandb is false"),
    ("optimizer", "schedule", "scaler", "train.clip", "train.steps", "train.epochs", "train.eval_every",
     "train.activation_checkpointing", "parallel.accumulate", "parallel.offload", "parallel.wire_gradients"): (
        lambda c: c.train.mode == "evaluate",
        "train.mode is evaluate",
    ),
}  # fmt: skip


def idle_settings(config: TrainConfig) -> list[str]:
    """Returns a sentence for each given setting without effect. It ignores default values."""
    given = {
        f"{section}.{name}": getattr(values, name)
        for section, values in config
        for name in SECTIONS[section].model_fields
        if name in values.model_fields_set
    }
    given = {key: value for key, value in given.items() if value != known_keys()[key].default}
    given |= {f"model.config.{name}": value for name, value in (config.model.config or {}).items()}
    return [
        f"{key}={value} has no effect: {why}"
        for key, value in given.items()
        for keys, (is_idle, why) in IDLE.items()
        if (key in keys or key.partition(".")[0] in keys) and is_idle(config)
    ]
