"""Blocks by role: `model_args`, `training_args` and `strategy_args` with `strategy_name: fsdp2_train | fsdp2_infer`.

    actor_train:
      model_args: {dtype: bf16}
      training_args: {learning_rate: 1.0e-6}
      strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 16}}
      device_mapping: list(range(0,16))

A file may hold several roles, one of which is trained (`role=NAME`), or the blocks without a role around them, or only
`strategy_config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from ..config import ConfigError
from .rules import DTYPE_NAMES, Draft, ForeignSetting, Rule, becomes, dtype_named, is_known, leaves, no_effect, only

NAME = "strategy"
TITLE = "model_args, training_args and strategy_args"
BLOCKS = ("model_args", "training_args", "strategy_args", "strategy_config", "device_mapping", "infer_batch_size")
ROLES = ("actor_train", "actor_infer", "reference", "critic", "reward", "student_train", "sft_train")
CONFIG = "strategy_args.strategy_config"

LR_SCHEDULES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosine_with_min_lr": "cosine", "inverse_sqrt": "inverse_sqrt", "warmup_stable_decay": "wsd",
}  # fmt: skip


def _mode(draft: Draft, value: str) -> None:
    draft.set("train.mode", "train" if value == "fsdp2_train" else "evaluate")


def _param_dtype(draft: Draft, value: str) -> None:
    dtype = dtype_named(draft.key, value)
    if draft.values.get("strategy_args.strategy_name") == "fsdp2_infer":
        draft.set("model.dtype", dtype)
        draft.remark("nothing is trained: parameters are kept in it as well")
    else:
        draft.set("parallel.param_dtype", dtype)
        if dtype != "float32":
            draft.remark("of computation; the optimizer updates float32 parameters")


def _dtype(draft: Draft, value: str) -> None:
    stronger = draft.values.get(f"{CONFIG}.param_dtype")
    if stronger is None:
        _param_dtype(draft, value)
    elif DTYPE_NAMES.get(stronger) == dtype_named(draft.key, value):
        draft.remark("the same as strategy_config.param_dtype", used=True)
    else:
        draft.remark(f"strategy_config.param_dtype={stronger} comes before it")


def _reduce_dtype(draft: Draft, value: str) -> None:
    draft.set("parallel.reduce_dtype", dtype_named(draft.key, value))


def _fsdp_size(draft: Draft, value: int) -> None:
    draft.set("parallel.fsdp_size", value)
    if value <= 1:
        draft.remark("at most 1 means all ranks")


def _wrap_own_unit(draft: Draft, value: bool) -> None:
    draft.remark("embedding and head are units of their own, or one unit when their weights are tied", used=value)


def _tiled(draft: Draft, value: bool) -> None:
    if value:
        draft.set("model.tiled_mlp", draft.values.get(f"{CONFIG}.tiled_num_shards", 4))
    else:
        draft.set("model.tiled_mlp", 0)


def _tiled_shards(draft: Draft, value: int) -> None:
    if draft.values.get(f"{CONFIG}.apply_tiled_mlp"):
        draft.set("model.tiled_mlp", value)
    else:
        draft.remark("apply_tiled_mlp is not on")


def _expert_units(draft: Draft, value: list[str]) -> None:
    draft.set("parallel.expert_units", value)


def _async(draft: Draft, value: bool) -> None:
    _if_known(draft, "checkpoint.async_save", value, "checkpoints are saved before training goes on")


def _only_model(draft: Draft, value: bool) -> None:
    _if_known(draft, "checkpoint.model_only", value, "checkpoints hold everything that a resumed run needs")


def _if_known(draft: Draft, path: str, value: Any, otherwise: str) -> None:
    if is_known(path):
        draft.set(path, value)
    else:
        draft.remark(otherwise, used=not value)


def _schedule(draft: Draft, value: str) -> None:
    draft.set("schedule.kind", LR_SCHEDULES[value])


def _lora_rank(draft: Draft, value: int | None) -> None:
    draft.set("lora.rank", value or 0)


def _betas(draft: Draft, value: float) -> None:
    values = draft.values
    betas = [values.get("training_args.adam_beta1", 0.9), values.get("training_args.adam_beta2", 0.999)]
    draft.set("optimizer.betas", betas)


def _device_mapping(draft: Draft, value: Any) -> None:
    draft.set("parallel.world_size", len(device_ids(draft.key, value)))
    draft.remark("torchrun starts the ranks, CUDA_VISIBLE_DEVICES chooses the GPUs")


def device_ids(key: str, value: Any) -> list[int]:
    """`[0, 1]` and the text `list(range(a,b[,step]))`, which is read and never executed."""
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return value
    found = re.fullmatch(r"\s*(?:list\()?range\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?(?:,\s*(\d+)\s*)?\)\)?\s*", str(value))
    ids = list(range(*(int(part) for part in found.groups() if part is not None))) if found else []
    if not ids:
        raise ConfigError(f"{key}: got {value!r}, expected device ids: [0, 1] or list(range(0,2))")
    return ids


def _dead(what: str) -> Rule:
    return no_effect(f"nothing reads it, also where it comes from: {what}")


KEYS: dict[str, Rule] = {
    "strategy_args.strategy_name": Rule(Literal["fsdp2_train", "fsdp2_infer"], "-> train.mode", _mode),
    f"{CONFIG}.fsdp_size": Rule(int, "-> parallel.fsdp_size; at most 1: all ranks", _fsdp_size),
    f"{CONFIG}.param_dtype": Rule(str, "-> parallel.param_dtype (fsdp2_infer: model.dtype)", _param_dtype),
    f"{CONFIG}.reduce_dtype": Rule(str, "-> parallel.reduce_dtype", _reduce_dtype),
    f"{CONFIG}.reshard_after_forward": becomes("parallel.reshard_after_forward", bool | int | None),
    f"{CONFIG}.offload_policy": becomes("parallel.offload", bool),
    f"{CONFIG}.wrap_policy.transformer_layer_cls_to_wrap": becomes("parallel.auto_wrap", list[str] | None),
    f"{CONFIG}.wrap_policy.wrap_embeddings": Rule(bool, "no effect: always a unit", _wrap_own_unit),
    f"{CONFIG}.wrap_policy.wrap_lm_output": Rule(bool, "no effect: always a unit", _wrap_own_unit),
    f"{CONFIG}.wrap_policy.moe_experts": Rule(list[str], "-> parallel.expert_units", _expert_units),
    f"{CONFIG}.apply_expert_patch": becomes("model.expert_patch", bool),
    f"{CONFIG}.apply_tiled_mlp": Rule(bool, "-> model.tiled_mlp = tiled_num_shards", _tiled),
    f"{CONFIG}.tiled_num_shards": Rule(int, "-> model.tiled_mlp (4 when not given)", _tiled_shards),
    f"{CONFIG}.model_type": no_effect("which MLPs are tiled follows from the model", str | None),
    f"{CONFIG}.async_save_ckpt": Rule(bool, "-> checkpoint.async_save", _async),
    f"{CONFIG}.save_only_model": Rule(bool, "-> checkpoint.model_only", _only_model),
    f"{CONFIG}.reduce_scatter_during_grad_accumulation": becomes(
        "parallel.accumulate", bool, lambda value: "reduce_scatter" if value else "nothing"
    ),
    f"{CONFIG}.ep_size": becomes("parallel.expert_parallel", int),
    f"{CONFIG}.efsdp_size": becomes("parallel.expert_fsdp_size", int),
    f"{CONFIG}.moe_use_grouped_mm": becomes("model.grouped_gemm", bool),
    f"{CONFIG}.forward_prefetch": _dead("units are gathered ahead in the recorded order"),
    f"{CONFIG}.use_batched_model_update": _dead("weights leave by fsdp2x.export.stream"),
    "model_args.model_name_or_path": becomes("model.path", str),
    "model_args.attn_implementation": becomes(
        "model.attn_implementation", str, lambda value: {"fa2": "flash_attention_2"}.get(value, value)
    ),
    "model_args.disable_gradient_checkpointing": becomes(
        "train.activation_checkpointing", bool, lambda value: not value
    ),
    "model_args.dtype": Rule(str, "-> parallel.param_dtype, unless strategy_config has it", _dtype),
    "model_args.model_type": only(
        str | None, [None], "the model's own head", "heads for values are not built here; set model_type: ~"
    ),
    "model_args.ulysses_size": becomes("parallel.sequence_parallel", int),
    "model_args.freeze_module_prefix": becomes("model.freeze", list[str] | None, lambda value: value or []),
    "model_args.lora_rank": Rule(int | None, "-> lora.rank", _lora_rank),
    "model_args.lora_alpha": becomes("lora.alpha", float),
    "model_args.lora_dropout": becomes("lora.dropout", float),
    "model_args.lora_target": becomes("lora.target_modules", list[str]),
    "training_args.learning_rate": becomes("optimizer.lr", float),
    "training_args.weight_decay": becomes("optimizer.weight_decay", float),
    "training_args.adam_beta1": Rule(float, "-> optimizer.betas[0]", _betas),
    "training_args.adam_beta2": Rule(float, "-> optimizer.betas[1]", _betas),
    "training_args.adam_epsilon": becomes("optimizer.eps", float),
    "training_args.max_grad_norm": becomes("train.clip", float, lambda value: value or None),
    "training_args.per_device_train_batch_size": becomes("train.batch_size", int),
    "training_args.per_device_eval_batch_size": becomes("train.eval_batch_size", int),
    "training_args.gradient_accumulation_steps": becomes("train.accumulation", int),
    "training_args.warmup_steps": becomes("schedule.warmup_steps", int),
    "training_args.warmup_ratio": becomes("schedule.warmup_ratio", float),
    "training_args.lr_scheduler_type": Rule(Literal[tuple(LR_SCHEDULES)], "-> schedule.kind", _schedule),
    "training_args.num_train_epochs": becomes("train.epochs", int),
    "training_args.max_steps": becomes("train.steps", int, lambda value: value if value > 0 else None),
    "training_args.logging_steps": becomes("logging.every", int),
    "training_args.save_steps": becomes("checkpoint.save_every", int),
    "training_args.output_dir": becomes("logging.output", str),
    "training_args.seed": becomes("train.seed", int),
    "device_mapping": Rule(Any, "-> parallel.world_size, the number of ids", _device_mapping),
    "infer_batch_size": becomes("train.eval_batch_size", int),
    "pretrain": becomes("model.path", str),
    "seed": becomes("train.seed", int),
    "output_dir": becomes("logging.output", str),
    "exp_name": no_effect("a run is known by its output folder", str),
}


def owns(key: str, value: Any) -> bool:
    return key in BLOCKS or key in KEYS or _is_role(key, value)


def _is_role(key: str, value: Any) -> bool:
    return key in ROLES or (isinstance(value, Mapping) and any(name in BLOCKS for name in value))


def read(settings: Mapping, role: str | None) -> list[ForeignSetting]:
    roles = [key for key, value in settings.items() if _is_role(key, value)]
    if role is None and len(roles) > 1:
        raise ConfigError(f"the file has the roles {', '.join(roles)}; say which one with role=NAME")
    if role is not None and role not in roles:
        raise ConfigError(f"role={role}: the file has {', '.join(roles) or 'no roles'}")
    role = role or next(iter(roles), None)
    items = []
    for key, value in settings.items():
        if key not in roles:
            items += _leaves(key, key, value)
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}: got {value!r}, expected a mapping with {', '.join(BLOCKS)}")
        inert = "" if key == role else f"this run is the role {role}"
        for name, inner in value.items():
            items += _leaves(name, f"{key}.{name}", inner, inert)
    return items


def _leaves(name: str, shown: str, value: Any, inert: str = "") -> list[ForeignSetting]:
    return leaves(CONFIG if name == "strategy_config" else name, shown, value, KEYS, inert)


def finish(draft: Draft) -> None:
    if draft.get("train.mode") == "evaluate":
        draft.imply("(mode)", "data.held_out", 0.0, "the loss is that of all text")
