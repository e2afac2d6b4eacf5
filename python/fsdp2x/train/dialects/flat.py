"""Flat training keys: one level, a GPT over characters, `sharding_strategy` and `train_batch` for all ranks together.

fsdp: True
sharding_strategy: FULL_SHARD
n_layer: 12
train_batch: 48
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ..config import ConfigError, Strategy
from .draft import Draft
from .rules import Dialect, Fate, ForeignKey, Implied, Rule, becomes, leaves, no_effect, only, refuse_role

TITLE = "the flat training keys"
SIZES = ("n_layer", "n_head", "n_embd")


def _device(value: str, _: Mapping) -> Any:
    remark = "a GPU of this rank's number on its node, the CPU where there is none"
    return value if value == "cpu" else Fate({"parallel.device": "auto"}, remark)


def _tensorboard(value: str, _: Mapping) -> Fate:
    return Fate({"logging.tensorboard": True, "logging.tensorboard_dir": value})


def _held_out(value: float, _: Mapping) -> float:
    if not 0 < value <= 1:
        raise ConfigError(f"got {value}, expected a fraction in (0, 1]")
    return round(1 - value, 9)


def _fsdp(value: bool, given: Mapping) -> Any:
    if value:
        return given.get("sharding_strategy", "FULL_SHARD")
    return Fate({"parallel.strategy": "NO_SHARD"}, "every rank keeps all parameters")


def _strategy(value: str, given: Mapping) -> Any:
    return Fate(remark="fsdp is False: every rank keeps all parameters") if given.get("fsdp") is False else value


def _eval_blocks(value: int, given: Mapping) -> Any:
    if "test_batch" not in given:
        return Fate(remark="it counts batches of test_batch, which is not given: all held-out text is taken")
    return value * given["test_batch"]


def _betas(_: float, given: Mapping) -> list[float]:
    return [given.get("beta1", 0.9), given.get("beta2", 0.95)]


KEYS: dict[str, Rule] = {
    "data_path": becomes(list[str], "data.files"),
    "train_percent": becomes(float, "data.held_out", by=_held_out, note=" = 1 - train_percent"),
    "block_size": becomes(int, "data.block_size", "model.config.n_positions"),
    "vocab_size": becomes(int, "model.config.vocab_size"),
    "n_layer": becomes(int, "model.config.n_layer"),
    "n_head": becomes(int, "model.config.n_head"),
    "n_embd": becomes(int, "model.config.n_embd"),
    "dropout": becomes(float, *(f"model.config.{name}_pdrop" for name in ("resid", "embd", "attn"))),
    "bias": only(
        bool,
        True,
        "GPT-2's layers have biases",
        "GPT-2 of transformers always has them; set bias: True, or give another model with model.config.model_type",
    ),
    "compile": becomes(bool, "train.compile"),
    "max_epoch": becomes(int, "train.epochs", remark="all steps of so many passes"),
    "tensorboard_path": becomes(str, "logging.tensorboard", "logging.tensorboard_dir", by=_tensorboard),
    "device": becomes(Literal["cuda", "cpu"], "parallel.device", by=_device),
    "eval_freq": becomes(int, "train.eval_every"),
    "eval_steps": becomes(int, "train.eval_blocks", by=_eval_blocks, note=" = eval_steps * test_batch"),
    "train_batch": becomes(int, "train.global_batch_size"),
    "test_batch": becomes(int, "train.global_eval_batch_size"),
    "grad_clip": becomes(float, "train.clip", by={0: None}, note="; 0 does not clip"),
    "fsdp": becomes(bool, "parallel.strategy", by=_fsdp, note=": NO_SHARD when False"),
    "local_rank": no_effect("torchrun says it to each process", int),
    "world_size": becomes(int, "parallel.world_size"),
    "sharding_strategy": becomes(Strategy, "parallel.strategy", by=_strategy),
    "lr": becomes(float, "optimizer.lr"),
    "warmup_steps": becomes(int, "schedule.warmup_steps"),
    "decay_steps": becomes(int, "schedule.decay_steps"),
    "min_lr": becomes(float, "schedule.min_lr"),
    "weight_decay": becomes(float, "optimizer.weight_decay"),
    "beta1": becomes(float, "optimizer.betas", by=_betas, note="[0]"),
    "beta2": becomes(float, "optimizer.betas", by=_betas, note="[1]"),
    # A folder of this run's, beside whose checkpoints its metrics lie.
    "checkpoint_root": becomes(str, "checkpoint.folder", "logging.output"),
    "save_freq": becomes(int, "checkpoint.save_every"),
    "resume_from": becomes(str | None, "checkpoint.resume_from", by={"": None, "NULL": None}),
    "seed": becomes(int, "train.seed"),
}


def _is_new_model(draft: Draft) -> bool:
    return any(key in draft.given for key in SIZES)


def _has_no_path(draft: Draft) -> bool:
    model = draft.ours.get("model")
    return not (isinstance(model, Mapping) and model.get("path"))


IMPLIED = (
    Implied(
        "(model)", "model.config.model_type", "gpt2", "a GPT with learned positions and tied embeddings", _is_new_model
    ),
    Implied("(text)", "data.tokenizer", "characters", "the vocabulary is the text's characters", _has_no_path),
    Implied(
        "(precision)",
        "parallel.param_dtype",
        "auto",
        "bfloat16 or float16 by the GPU, with float32 parameters and a scaler for float16",
    ),
    Implied("(precision)", "parallel.reduce_dtype", "float32", "sums of gradients keep their precision"),
    Implied("(checkpoints)", "checkpoint.form", "full", "one file, for any number of ranks"),
    Implied("(sharding)", "parallel.strategy", "FULL_SHARD", "the default; units are the model's blocks"),
)


def _read(settings: Mapping, role: str | None) -> list[ForeignKey]:
    refuse_role(role, TITLE)
    return [leaf for key, value in settings.items() for leaf in leaves(key, key, value, KEYS)]


FLAT = Dialect("flat", TITLE, KEYS, lambda key, _: key in KEYS, _read, IMPLIED, SIZES)
