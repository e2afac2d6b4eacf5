"""Loads a run's config from its YAML file: fsdp2x's own sections, or the keys of another trainer (`dialects.py`).

It warns of keys without an effect, because a run without a warning would look as if they counted.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fsdp2x.base.arguments import checked
from fsdp2x.train.config import ConfigError, TrainConfig
from fsdp2x.train.dialects import DIALECTS, no_role
from fsdp2x.train.parse import (
    Config,
    apply_overrides,
    check_sections,
    first_leaf,
    key_lines,
    known_keys,
    parse_config,
    read_config_text,
    read_overrides,
    read_yaml,
    refuse_unknown,
    sections_of,
    type_name,
)
from fsdp2x.train.translate import Dialect, KeyResult, Translation

logger = logging.getLogger(__name__)

Dialects = tuple[Dialect, ...]
OWN = "sections"


@checked
def load_config(path: str | Path, overrides: Iterable[str] = (), *, resume_from: str | None = None) -> TrainConfig:
    """Reads a YAML file of any dialect and applies overrides such as `optimizer.lr=1e-3`. Raises `ConfigError`.

    `resume_from` replaces checkpoint.resume_from. Warnings name keys without an effect.
    """
    return load(path, overrides, resume_from=resume_from, kind=TrainConfig, dialects=DIALECTS)


def load(
    path: str | Path, overrides: Iterable[str], *, resume_from: str | None, kind: type[Config], dialects: Dialects
) -> Config:
    """Does the same as `load_config` for a class `kind`, in its sections or in one of `dialects`."""
    return config_of(translate_file(path, overrides, kind, dialects), kind, resume_from=resume_from)


def config_of(translation: Translation, kind: type[Config], *, resume_from: str | None = None) -> Config:
    """Returns the config of a translated file. Raises `ConfigError` as `load_config` does."""
    path = translation.path
    if translation.needs:
        raise ConfigError(f"{path} lacks settings. To run it needs {'; '.join(translation.needs)}.")
    with translation.told():
        config = parse_config(translation.settings, kind)
    if os.environ.get("RANK", "0") == "0":
        for sentence in [*translation.without_effect(), *idle_settings(config, translation.settings)]:
            logger.warning("%s: %s", path, translation.reword(sentence).removeprefix(f"{path}:"))
    if resume_from is None:
        return config
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume_from=resume_from))


def translate_file(
    path: str | Path,
    overrides: Iterable[str] = (),
    kind: type[TrainConfig] = TrainConfig,
    dialects: Dialects = DIALECTS,
    flags: Mapping[str, Any] | None = None,
) -> Translation:
    """Reads a YAML file of any dialect. `overrides` are `key=value` in the file's dialect, or in fsdp2x's sections.

    `flags` are more top-level keys, which replace the file's. An empty `path` reads no file.
    """
    overrides = list(overrides)
    if not (path or overrides or flags):
        raise ConfigError("expected CONFIG.yaml, or settings such as train.steps=100")
    text = read_config_text(path) if path else ""
    replaced = {flag.replace("-", "_") for flag in flags or ()}
    settings = {key: one for key, one in read_yaml(path, text).items() if str(key).replace("-", "_") not in replaced}
    settings |= flags or {}
    given = {key for key, _ in read_overrides(overrides)} | set(flags or ())
    source = Translation("", path=str(path or "the command line"), lines=key_lines(text), overridden=given)
    with source.told():
        found = translate(settings, overrides, kind, dialects)
    return dataclasses.replace(found, path=source.path, lines=source.lines, overridden=source.overridden)


# Keys of other trainers, and words without a section, that name the checkpoint to resume from.
_RESUMES = ("resume_from", "resume-from", "resume_from_checkpoint")
# Top-level keys of the file that `accelerate config` writes.
_ACCELERATE = {"compute_environment", "fsdp_config", "num_processes", "num_machines", "deepspeed_config"}


def translate(
    settings: Mapping[str, Any],
    overrides: Iterable[str] = (),
    kind: type[TrainConfig] = TrainConfig,
    dialects: Dialects = DIALECTS,
) -> Translation:
    """Returns the settings of `kind` from a mapping of any dialect.

    Raises:
        ConfigError: one mapping has keys of two dialects, a key is unknown (the message names the nearest), a value has
            the wrong type, or a value is not supported.
    """
    ours, theirs, role = [], [], None
    for text in overrides:
        ((key, value),) = read_overrides([text])
        if key in _RESUMES:
            key, text = "checkpoint.resume_from", f"checkpoint.resume_from={text.partition('=')[2]}"
        if key == "role":
            role = str(value)
        else:
            is_ours = key.partition(".")[0] in sections_of(kind) and not any(key in one.rows for one in dialects)
            (ours if is_ours else theirs).append(text)
    settings = apply_overrides(settings, theirs)
    dialect = detect(settings, kind, dialects)
    if dialect is None:
        found = Translation(OWN, settings)
        no_role(role, found.title)
    else:
        found = dialect.translate(settings, role, apply_overrides({}, ours))
        found.results += [KeyResult({}, "of the command line", True, key, value) for key, value in read_overrides(ours)]
    found.settings = apply_overrides(found.settings, ours)
    check_sections(found.settings, kind)
    model = found.settings.get("model") or {}
    if isinstance(model, Mapping) and not (model.get("config") or model.get("path")):
        found.needs.append("model.path=FOLDER or model.config={model_type: ...}: the model")
    for path, need in kind.NEEDS.items():
        section, _, name = path.partition(".")
        values = found.settings.get(section) or {}
        if isinstance(values, Mapping) and not values.get(name):
            found.needs.append(need)
    return found


def detect(
    settings: Mapping[str, Any], kind: type[TrainConfig] = TrainConfig, dialects: Dialects = DIALECTS
) -> Dialect | None:
    """Returns the dialect that owns the top-level keys, or None for fsdp2x's. Shared keys alone decide nothing."""
    own = sections_of(kind)
    titles = {OWN: Translation.title, **{dialect.name: dialect.title for dialect in dialects}}

    def owners_of(key: str, value: Any) -> list[str]:
        others = [dialect.name for dialect in dialects if dialect.owns(key, value)]
        inner = {f"{key}.{name}" for name in value} if isinstance(value, Mapping) else set()
        return [OWN] * (key in own and (not others or bool(inner & known_keys(kind).keys()))) + others

    owners = {key: owners_of(str(key), value) for key, value in settings.items()}
    sure = {names[0]: key for key, names in reversed(owners.items()) if len(names) == 1}
    if len(sure) > 1:
        mixed = " and ".join(f"{key} of {titles[name]}" for name, key in reversed(sure.items()))
        raise ConfigError(f"the file mixes {mixed}. Write it in one of them; the rest can go on the command line.")
    name = next(iter(sure), None) or next((names[0] for names in owners.values() if names), None)
    if name is None and settings:
        if len(_ACCELERATE & settings.keys()) > 1:
            raise ConfigError(
                "this is a config of accelerate, not of a training run. Start a script with it: "
                "accelerate launch --config_file FILE -m fsdp2x.run script.py"
            )
        unknown = {path: path for path in (first_leaf(str(key), value) for key, value in settings.items())}
        refuse_unknown(unknown, [*known_keys(kind), *own, *(key for dialect in dialects for key in dialect.rows)])
    return next((dialect for dialect in dialects if dialect.name == name), None)


def list_keys(
    dialect: str = OWN, kind: type[TrainConfig] = TrainConfig, dialects: Dialects = DIALECTS
) -> dict[str, dict[str, Any]]:
    """Returns keys of one dialect by name, of fsdp2x's sections ("sections"), or of everything ("all").

    Each has its ``type`` and ``help``, and the sections' keys also have their ``default``.
    """
    rows: dict[str, dict[str, Any]] = {}
    if dialect in (OWN, "all"):
        for key, known in known_keys(kind).items():
            rows[key] = {"type": type_name(known.kind), "default": known.default, "help": known.help}
    for other in dialects:
        if dialect in (other.name, "all"):
            rows |= {key: {"type": type_name(row.kind), "help": row.help} for key, row in other.rows.items()}
    return rows


# ---- settings that have no effect together with others: keys, or whole sections -> (when, why)

IDLE: dict[tuple[str, ...], tuple[Callable[[TrainConfig], bool], str]] = {
    ("lora.alpha", "lora.dropout", "lora.target_modules"): (lambda c: c.lora.rank == 0, "lora.rank is 0"),
    ("data.max_tokens",): (lambda c: not c.data.packing, "data.packing is false"),
    ("data.held_out",): (lambda c: bool(c.data.validation_files), "data.validation_files replace it"),
    ("optimizer.betas", "optimizer.eps"): (lambda c: c.optimizer.name == "sgd", "optimizer.name is sgd"),
    ("optimizer.eps",): (lambda c: c.optimizer.name == "lion", "optimizer.name is lion"),
    ("optimizer.muon_lr_scale", "optimizer.muon_split", "optimizer.muon_ns_method", "optimizer.muon_ns_dtype"): (
        lambda c: c.optimizer.name != "muon",
        "optimizer.name is not muon",
    ),
    ("schedule.warmup_ratio",): (lambda c: c.schedule.warmup_steps > 0, "schedule.warmup_steps comes before it"),
    ("schedule.warmup_start_ratio",): (
        lambda c: c.schedule.warmup_steps == 0 and c.schedule.warmup_ratio == 0,
        "there is no warm-up",
    ),
    ("schedule.min_lr_ratio",): (lambda c: c.schedule.min_lr is not None, "schedule.min_lr comes before it"),
    ("schedule.min_lr", "schedule.min_lr_ratio", "schedule.decay_steps"): (
        lambda c: c.schedule.kind == "constant",
        "schedule.kind is constant",
    ),
    ("schedule.wsd_decay", "schedule.wsd_decay_steps"): (
        lambda c: c.schedule.kind != "wsd",
        "schedule.kind is not wsd",
    ),
    ("parallel.expert_fsdp_size",): (lambda c: c.parallel.expert_parallel == 1, "parallel.expert_parallel is 1"),
    ("scaler.init_scale", "scaler.growth_factor", "scaler.backoff_factor", "scaler.growth_interval"): (
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


def idle_settings(config: TrainConfig, settings: Mapping[str, Any]) -> list[str]:
    """Returns a sentence for each of ``settings``, a mapping of fsdp2x's sections, without effect on ``config``.

    It ignores default values.
    """
    given = {
        f"{section}.{name}": value
        for section, values in settings.items()
        for name, value in (values or {}).items()
        if known_keys(type(config))[f"{section}.{name}"].default != getattr(getattr(config, section), name)
    }
    return [
        f"{key}={value} has no effect: {why}"
        for key, value in given.items()
        for keys, (is_idle, why) in IDLE.items()
        if (key in keys or key.partition(".")[0] in keys) and is_idle(config)
    ]
