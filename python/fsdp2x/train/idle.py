"""Settings that mean nothing beside the others, told by name: a run without a word would look as if they counted.

Only what is given counts, not what has its default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .config import TrainConfig
from .parse import known_keys

# Keys, or whole sections -> (when they mean nothing, why).
_IDLE: dict[tuple[str, ...], tuple[Callable[[TrainConfig], bool], str]] = {
    ("lora.alpha", "lora.dropout", "lora.target_modules"): (lambda c: c.lora.rank == 0, "lora.rank is 0"),
    ("data.max_tokens",): (lambda c: not c.data.packing, "data.packing is false"),
    ("optimizer.betas", "optimizer.eps"): (lambda c: c.optimizer.name == "sgd", "optimizer.name is sgd"),
    ("optimizer.eps",): (lambda c: c.optimizer.name == "lion", "optimizer.name is lion"),
    ("optimizer.muon_lr_scale",): (lambda c: c.optimizer.name != "muon", "optimizer.name is not muon"),
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
    """A sentence for each of ``settings``, a mapping of our sections, that has no part in the run of ``config``."""
    defaults = {key: setting.default for key, setting in known_keys().items()}
    given = [
        (f"{section}.{name}", value)
        for section, values in settings.items()
        if isinstance(values, Mapping)
        for name, value in values.items()
        if defaults.get(f"{section}.{name}", value) != getattr(getattr(config, section), name)
    ]
    return [
        f"{key}={value} has no effect: {why}"
        for key, value in given
        for keys, (is_idle, why) in _IDLE.items()
        if (key in keys or key.partition(".")[0] in keys) and is_idle(config)
    ]
