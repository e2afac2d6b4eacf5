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
from .rules import Draft, ForeignSetting, Rule, becomes, is_known, leaves, no_effect, only

NAME = "flat"
TITLE = "the flat training keys"
MODEL_KEYS = ("n_layer", "n_head", "n_embd")


def _dropout(draft: Draft, value: float) -> None:
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        draft.set(f"model.config.{name}", value)


def _block_size(draft: Draft, value: int) -> None:
    draft.set("data.block_size", value)
    draft.set("model.config.n_positions", value)


def _epochs(draft: Draft, value: int) -> None:
    draft.set("train.epochs", value)
    draft.remark("all steps of so many passes")


def _device(draft: Draft, value: str) -> None:
    draft.set("parallel.device", "cpu" if value == "cpu" else "auto")
    if value != "cpu":
        draft.remark("a GPU of this rank's number on its node, the CPU where there is none")


def _tensorboard(draft: Draft, value: str) -> None:
    draft.set("logging.tensorboard", True)
    draft.set("logging.tensorboard_dir", value)


def _checkpoint_root(draft: Draft, value: str) -> None:
    draft.set("checkpoint.folder", value)
    draft.set("logging.output", value)  # a folder of this run's, beside whose checkpoints its metrics lie


def _clip(draft: Draft, value: float) -> None:
    draft.set("train.clip", value or None)


def _train_percent(draft: Draft, value: float) -> None:
    if not 0 < value <= 1:
        raise ConfigError(f"train_percent: got {value}, expected a fraction in (0, 1]")
    draft.set("data.held_out", round(1 - value, 9))


def _fsdp(draft: Draft, value: bool) -> None:
    draft.set("parallel.strategy", draft.values.get("sharding_strategy", "FULL_SHARD") if value else "NO_SHARD")
    if not value:
        draft.remark("every rank keeps all parameters")


def _strategy(draft: Draft, value: str) -> None:
    if draft.values.get("fsdp") is False:
        draft.remark("fsdp is False: every rank keeps all parameters")
    else:
        draft.set("parallel.strategy", value)


def _eval_steps(draft: Draft, value: int) -> None:
    batch = draft.values.get("test_batch")
    if batch is None:
        draft.remark("it counts batches of test_batch, which is not given: all held-out text is taken")
    else:
        draft.set("train.eval_blocks", value * batch)


def _resume(draft: Draft, value: str | None) -> None:
    draft.set("checkpoint.resume_from", None if value in (None, "", "NULL") else value)


def _betas(draft: Draft, value: float) -> None:
    draft.set("optimizer.betas", [draft.values.get("beta1", 0.9), draft.values.get("beta2", 0.95)])


KEYS: dict[str, Rule] = {
    "data_path": becomes("data.files", list[str]),
    "train_percent": Rule(float, "-> data.held_out = 1 - train_percent", _train_percent),
    "block_size": Rule(int, "-> data.block_size, model.config.n_positions", _block_size),
    "vocab_size": becomes("model.config.vocab_size", int),
    "n_layer": becomes("model.config.n_layer", int),
    "n_head": becomes("model.config.n_head", int),
    "n_embd": becomes("model.config.n_embd", int),
    "dropout": Rule(float, "-> model.config: resid_pdrop, embd_pdrop, attn_pdrop", _dropout),
    "bias": only(
        bool,
        [True],
        "GPT-2's layers have biases",
        "GPT-2 of transformers always has them; set bias: True, or give another model with model.config.model_type",
    ),
    "compile": becomes("train.compile", bool),
    "max_epoch": Rule(int, "-> train.epochs", _epochs),
    "tensorboard_path": Rule(str, "-> logging.tensorboard, logging.tensorboard_dir", _tensorboard),
    "device": Rule(Literal["cuda", "cpu"], "-> parallel.device", _device),
    "eval_freq": becomes("train.eval_every", int),
    "eval_steps": Rule(int, "-> train.eval_blocks = eval_steps * test_batch", _eval_steps),
    "train_batch": becomes("train.global_batch_size", int),
    "test_batch": becomes("train.global_eval_batch_size", int),
    "grad_clip": Rule(float, "-> train.clip; 0 does not clip", _clip),
    "fsdp": Rule(bool, "-> parallel.strategy: NO_SHARD when False", _fsdp),
    "local_rank": no_effect("torchrun says it to each process", int),
    "world_size": becomes("parallel.world_size", int),
    "sharding_strategy": Rule(Strategy, "-> parallel.strategy", _strategy),
    "lr": becomes("optimizer.lr", float),
    "warmup_steps": becomes("schedule.warmup_steps", int),
    "decay_steps": becomes("schedule.decay_steps", int),
    "min_lr": becomes("schedule.min_lr", float),
    "weight_decay": becomes("optimizer.weight_decay", float),
    "beta1": Rule(float, "-> optimizer.betas[0]", _betas),
    "beta2": Rule(float, "-> optimizer.betas[1]", _betas),
    "checkpoint_root": Rule(str, "-> checkpoint.folder, logging.output", _checkpoint_root),
    "save_freq": becomes("checkpoint.save_every", int),
    "resume_from": Rule(str | None, "-> checkpoint.resume_from", _resume),
    "seed": becomes("train.seed", int),
}


def owns(key: str, value: Any) -> bool:
    return key in KEYS


def read(settings: Mapping, role: str | None) -> list[ForeignSetting]:
    if role is not None:
        raise ConfigError(f"role={role}: {TITLE} describe one model; leave role out")
    return [leaf for key, value in settings.items() for leaf in leaves(key, key, value, KEYS)]


def finish(draft: Draft) -> None:
    values = draft.values
    if any(key in values for key in MODEL_KEYS):
        draft.imply("(model)", "model.config.model_type", "gpt2", "a GPT with learned positions and tied embeddings")
        missing = [key for key in MODEL_KEYS if key not in values]
        if missing:
            draft.needs.append(f"{', '.join(missing)}: the model's size")
    elif "model" in draft.settings:
        # Single sizes of a model that is not there would hide that it is missing.
        draft.settings.pop("model")
    if values:
        if not (draft.ours.get("model") or {}).get("path"):
            draft.imply("(text)", "data.tokenizer", "characters", "the vocabulary is the text's characters")
        draft.imply(
            "(precision)",
            "parallel.param_dtype",
            "auto",
            "bfloat16 or float16 by the GPU, with float32 parameters and a scaler for float16",
        )
        draft.imply("(precision)", "parallel.reduce_dtype", "float32", "sums of gradients keep their precision")
        if is_known("checkpoint.form"):
            draft.imply("(checkpoints)", "checkpoint.form", "full", "one file, for any number of ranks")
        draft.imply("(sharding)", "parallel.strategy", "FULL_SHARD", "the default; units are the model's blocks")
