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

from ..config import DTYPE_NAMES, ConfigError, dtype_name
from .draft import ALL_TEXT
from .rules import Dialect, Fate, ForeignKey, Rule, always, becomes, leaves, no_effect, only

TITLE = "model_args, training_args and strategy_args"
BLOCKS = ("model_args", "training_args", "strategy_args", "strategy_config", "device_mapping", "infer_batch_size")
ROLES = ("actor_train", "actor_infer", "reference", "critic", "reward", "student_train", "sft_train")
CONFIG = "strategy_args.strategy_config"
MODES = {"fsdp2_train": "train", "fsdp2_infer": "evaluate"}
LR_SCHEDULES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosine_with_min_lr": "cosine", "inverse_sqrt": "inverse_sqrt", "warmup_stable_decay": "wsd",
}  # fmt: skip


def _dtype(name: str, _: Mapping) -> str:
    return dtype_name(name)


def _param_dtype(value: str, given: Mapping) -> Fate:
    dtype = _dtype(value, given)
    if given.get("strategy_args.strategy_name") == "fsdp2_infer":
        return Fate({"model.dtype": dtype}, "nothing is trained: parameters are kept in it as well")
    remark = "" if dtype == "float32" else "of computation; the optimizer updates float32 parameters"
    return Fate({"parallel.param_dtype": dtype}, remark)


def _model_dtype(value: str, given: Mapping) -> Fate:
    stronger = given.get(f"{CONFIG}.param_dtype")
    if stronger is None:
        return _param_dtype(value, given)
    if DTYPE_NAMES.get(stronger) == _dtype(value, given):
        return Fate(remark="the same as strategy_config.param_dtype", used=True)
    return Fate(remark=f"strategy_config.param_dtype={stronger} comes before it")


def _fsdp_size(value: int, _: Mapping) -> Any:
    return Fate({"parallel.fsdp_size": value}, "at most 1 means all ranks") if value <= 1 else value


def _tiled_mlp(value: bool, given: Mapping) -> int:
    return given.get(f"{CONFIG}.tiled_num_shards", 4) if value else 0


def _tiled_shards(value: int, given: Mapping) -> Any:
    return value if given.get(f"{CONFIG}.apply_tiled_mlp") else Fate(remark="apply_tiled_mlp is not on")


def _betas(_: float, given: Mapping) -> list[float]:
    return [given.get("training_args.adam_beta1", 0.9), given.get("training_args.adam_beta2", 0.999)]


def _num_devices(value: Any, _: Mapping) -> int:
    """Of `[0, 1]` or of the text `list(range(a,b[,step]))`, which is read and never executed."""
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return len(value)
    found = re.fullmatch(
        r"\s*(?:list\()?range\(\s*(\d{1,9})\s*(?:,\s*(\d{1,9})\s*)?(?:,\s*(0*[1-9]\d{0,8})\s*)?\)\)?\s*", str(value)
    )
    ids = range(*(int(part) for part in found.groups() if part is not None)) if found else ()
    if not ids:
        raise ConfigError(f"got {value!r}, expected device ids: [0, 1] or list(range(0,2))")
    return len(ids)


_OWN_UNIT = "embedding and head are units of their own, or one unit when their weights are tied"
_UNREAD = "nothing reads it, also where it comes from"
_WHOLE_CHECKPOINT = "checkpoints hold everything that a resumed run needs"

KEYS: dict[str, Rule] = {
    "strategy_args.strategy_name": becomes(Literal[tuple(MODES)], "train.mode", by=MODES),
    f"{CONFIG}.fsdp_size": becomes(int, "parallel.fsdp_size", by=_fsdp_size, note="; at most 1: all ranks"),
    f"{CONFIG}.param_dtype": becomes(str, "parallel.param_dtype", by=_param_dtype, note=" (fsdp2_infer: model.dtype)"),
    f"{CONFIG}.reduce_dtype": becomes(str, "parallel.reduce_dtype", by=_dtype),
    f"{CONFIG}.reshard_after_forward": becomes(bool | int | None, "parallel.reshard_after_forward"),
    f"{CONFIG}.offload_policy": becomes(bool, "parallel.offload"),
    f"{CONFIG}.wrap_policy.transformer_layer_cls_to_wrap": becomes(list[str] | None, "parallel.auto_wrap"),
    f"{CONFIG}.wrap_policy.wrap_embeddings": always(True, _OWN_UNIT, "no effect: always a unit"),
    f"{CONFIG}.wrap_policy.wrap_lm_output": always(True, _OWN_UNIT, "no effect: always a unit"),
    f"{CONFIG}.wrap_policy.moe_experts": becomes(list[str], "parallel.expert_units"),
    f"{CONFIG}.apply_expert_patch": becomes(bool, "model.expert_patch"),
    f"{CONFIG}.apply_tiled_mlp": becomes(bool, "model.tiled_mlp", by=_tiled_mlp, note=" = tiled_num_shards"),
    f"{CONFIG}.tiled_num_shards": becomes(int, "model.tiled_mlp", by=_tiled_shards, note=" (4 when not given)"),
    f"{CONFIG}.model_type": no_effect("which MLPs are tiled follows from the model", str | None),
    f"{CONFIG}.async_save_ckpt": becomes(bool, "checkpoint.async_save"),
    f"{CONFIG}.save_only_model": always(False, _WHOLE_CHECKPOINT, f"no effect: {_WHOLE_CHECKPOINT}"),
    f"{CONFIG}.reduce_scatter_during_grad_accumulation": becomes(
        bool, "parallel.accumulate", by={True: "reduce_scatter", False: "nothing"}
    ),
    f"{CONFIG}.ep_size": becomes(int, "parallel.expert_parallel"),
    f"{CONFIG}.efsdp_size": becomes(int, "parallel.expert_fsdp_size"),
    f"{CONFIG}.moe_use_grouped_mm": becomes(bool, "model.grouped_gemm"),
    f"{CONFIG}.forward_prefetch": no_effect(f"{_UNREAD}: units are gathered ahead in the recorded order"),
    f"{CONFIG}.use_batched_model_update": no_effect(f"{_UNREAD}: weights leave by fsdp2x.export.stream"),
    "model_args.model_name_or_path": becomes(str, "model.path"),
    "model_args.attn_implementation": becomes(str, "model.attn_implementation", by={"fa2": "flash_attention_2"}),
    "model_args.disable_gradient_checkpointing": becomes(
        bool, "train.activation_checkpointing", by={True: False, False: True}
    ),
    "model_args.dtype": becomes(str, "parallel.param_dtype", by=_model_dtype, note=", unless strategy_config has it"),
    "model_args.model_type": only(
        str | None, None, "the model's own head", "heads for values are not built here; set model_type: ~"
    ),
    "model_args.ulysses_size": becomes(int, "parallel.sequence_parallel"),
    "model_args.freeze_module_prefix": becomes(list[str] | None, "model.freeze", by=lambda value, _: value or []),
    "model_args.lora_rank": becomes(int | None, "lora.rank", by={None: 0}),
    "model_args.lora_alpha": becomes(float, "lora.alpha"),
    "model_args.lora_dropout": becomes(float, "lora.dropout"),
    "model_args.lora_target": becomes(list[str], "lora.target_modules"),
    "training_args.learning_rate": becomes(float, "optimizer.lr"),
    "training_args.weight_decay": becomes(float, "optimizer.weight_decay"),
    "training_args.adam_beta1": becomes(float, "optimizer.betas", by=_betas, note="[0]"),
    "training_args.adam_beta2": becomes(float, "optimizer.betas", by=_betas, note="[1]"),
    "training_args.adam_epsilon": becomes(float, "optimizer.eps"),
    "training_args.max_grad_norm": becomes(float, "train.clip", by={0: None}),
    "training_args.per_device_train_batch_size": becomes(int, "train.batch_size"),
    "training_args.per_device_eval_batch_size": becomes(int, "train.eval_batch_size"),
    "training_args.gradient_accumulation_steps": becomes(int, "train.accumulation"),
    "training_args.warmup_steps": becomes(int, "schedule.warmup_steps"),
    "training_args.warmup_ratio": becomes(float, "schedule.warmup_ratio"),
    "training_args.lr_scheduler_type": becomes(Literal[tuple(LR_SCHEDULES)], "schedule.kind", by=LR_SCHEDULES),
    "training_args.num_train_epochs": becomes(int, "train.epochs"),
    "training_args.max_steps": becomes(int, "train.steps", by=lambda value, _: value if value > 0 else None),
    "training_args.logging_steps": becomes(int, "logging.every"),
    "training_args.save_steps": becomes(int, "checkpoint.save_every"),
    "training_args.output_dir": becomes(str, "logging.output"),
    "training_args.seed": becomes(int, "train.seed"),
    "device_mapping": becomes(
        Any,
        "parallel.world_size",
        by=_num_devices,
        note=", the number of ids",
        remark="torchrun starts the ranks, CUDA_VISIBLE_DEVICES chooses the GPUs",
    ),
    "infer_batch_size": becomes(int, "train.eval_batch_size"),
    "pretrain": becomes(str, "model.path"),
    "seed": becomes(int, "train.seed"),
    "output_dir": becomes(str, "logging.output"),
    "exp_name": no_effect("a run is known by its output folder", str),
}


def _owns(key: str, value: Any) -> bool:
    return key in BLOCKS or key in KEYS or _is_role(key, value)


def _is_role(key: str, value: Any) -> bool:
    if key in BLOCKS:  # strategy_args holds another block, strategy_config
        return False
    return key in ROLES or (isinstance(value, Mapping) and any(name in BLOCKS for name in value))


def _read(settings: Mapping, role: str | None) -> list[ForeignKey]:
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


def _leaves(name: str, shown: str, value: Any, inert: str = "") -> list[ForeignKey]:
    return leaves(CONFIG if name == "strategy_config" else name, shown, value, KEYS, inert)


BY_ROLE = Dialect("strategy", TITLE, KEYS, _owns, _read, (ALL_TEXT,))
