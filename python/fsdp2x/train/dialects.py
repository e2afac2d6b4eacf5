"""Tables of the keys of three other trainers: what every key becomes here, or why it has no effect.

flat       one level, a GPT, `sharding_strategy`, and `train_batch` for all ranks together
strategy   model_args, training_args and strategy_args, for each of several roles or once
nested     models.policy_trainer, models.ref_policy and runtime_args, of a loop that samples, scores and trains
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

from fsdp2x.train.config import ConfigError, DType
from fsdp2x.train.translate import (
    Dialect,
    ForeignKey,
    KeyResult,
    Row,
    Translation,
    becomes,
    leaves,
    no_effect,
    only,
    table,
)

# ---- flat

SIZES = ("n_layer", "n_head", "n_embd")


def _held_out(value: float, _: Mapping) -> float:
    if not 0 < value <= 1:
        raise ConfigError(f"got {value}, expected a fraction in (0, 1]")
    return round(1 - value, 9)


def _eval_blocks(value: int, given: Mapping) -> Any:
    if "test_batch" not in given:
        return KeyResult(remark="it counts batches of test_batch, which is not given: all held-out text is taken")
    return value * given["test_batch"]


def _fsdp(value: bool, given: Mapping) -> Any:
    if value:
        return given.get("sharding_strategy", "FULL_SHARD")
    return KeyResult({"parallel.strategy": "NO_SHARD"}, "every rank keeps all parameters")


def _strategy(value: str, given: Mapping) -> Any:
    return value if given.get("fsdp", True) else KeyResult(remark="fsdp is False: every rank keeps all parameters")


def _betas(first: str, second: str, default: float) -> dict[str, Row]:
    """Returns rows for both rates of Adam by two keys."""

    def by(_: float, given: Mapping) -> list[float]:
        return [given.get(first, 0.9), given.get(second, default)]

    return {
        key.rpartition(".")[2]: becomes("optimizer.betas", by=by, kind=float, note=f"[{index}]")
        for index, key in enumerate((first, second))
    }


def one_of(values: Iterable[str]) -> Any:
    """Returns the type of these values."""
    return cast(Any, Literal)[tuple(values)]


NO_CLIP = becomes("train.clip", by={0: None}, note="; 0 does not clip")
FLAT_ROWS = table({"": {
    "data_path": "data.files",
    "train_percent": becomes("data.held_out", by=_held_out, note=" = 1 - train_percent"),
    "block_size": becomes("data.block_size", "model.config.n_positions"),
    **{key: becomes(f"model.config.{key}", kind=int) for key in ("vocab_size", *SIZES)},
    "dropout": becomes(*(f"model.config.{name}_pdrop" for name in ("resid", "embd", "attn")), kind=float),
    "bias": only(
        True,
        "GPT-2's layers have biases",
        "GPT-2 of transformers always has them; set bias: True, or give another model with model.config.model_type",
    ),
    "compile": "train.compile",
    "max_epoch": becomes("train.epochs", remark="all steps of so many passes"),
    "tensorboard_path": becomes(
        "logging.tensorboard", "logging.tensorboard_dir", kind=str,
        by=lambda value, _: KeyResult({"logging.tensorboard": True, "logging.tensorboard_dir": value}),
    ),
    "device": becomes(
        "parallel.device", by={"cuda": "auto"}, kind=Literal["cuda", "cpu"],
        remark="cuda: a GPU of this rank's number on its node, the CPU where there is none",
    ),
    "eval_freq": "train.eval_every",
    "eval_steps": becomes("train.eval_blocks", by=_eval_blocks, kind=int, note=" = eval_steps * test_batch"),
    "train_batch": "train.global_batch_size",
    "test_batch": becomes("train.global_eval_batch_size", kind=int),
    "grad_clip": NO_CLIP,
    "fsdp": becomes("parallel.strategy", by=_fsdp, kind=bool, note=": NO_SHARD when False"),
    **no_effect("torchrun passes it to each process", "local_rank"),
    "world_size": "parallel.world_size",
    "sharding_strategy": becomes("parallel.strategy", by=_strategy),
    "lr": "optimizer.lr",
    "warmup_steps": "schedule.warmup_steps",
    "decay_steps": "schedule.decay_steps",
    "min_lr": "schedule.min_lr",
    "weight_decay": "optimizer.weight_decay",
    **_betas("beta1", "beta2", 0.95),
    # A folder of this run, with its metrics next to its checkpoints.
    "checkpoint_root": becomes("checkpoint.folder", "logging.output", kind=str),
    "save_freq": "checkpoint.save_every",
    "resume_from": becomes("checkpoint.resume_from", by={"": None, "NULL": None}),
    "seed": "train.seed",
}})  # fmt: skip


def _finish_flat(found: Translation, ours: Mapping[str, Any]) -> None:
    missing = [key for key in SIZES if key not in found.given]
    if len(missing) == len(SIZES):
        # Single settings of a missing model would hide that it is missing.
        found.settings.pop("model", None)
    elif not ours.get("model"):
        found.needs = [f"{', '.join(missing)}: the model's size"] if missing else []
        found.imply("(model)", "model.config.model_type", "gpt2", "a GPT with learned positions and tied embeddings")
    auto = "bfloat16 or float16 by the GPU, with float32 parameters and a scaler for float16"
    found.imply("(precision)", "parallel.param_dtype", "auto", auto)
    found.imply("(precision)", "parallel.reduce_dtype", "float32", "sums of gradients keep their precision")
    found.imply("(checkpoints)", "checkpoint.form", "full", "one file, for any number of ranks")
    found.imply("(sharding)", "parallel.strategy", "FULL_SHARD", "the default; units are the model's blocks")


def no_role(role: str | None, title: str) -> None:
    if role is not None:
        raise ConfigError(f"role={role}: {title} describe one model; leave role out")


def _read_flat(settings: Mapping, role: str | None) -> list[ForeignKey]:
    no_role(role, FLAT.title)
    return [leaf for key, value in settings.items() for leaf in leaves(key, key, value, FLAT_ROWS)]


FLAT = Dialect("flat", "the flat training keys", FLAT_ROWS, lambda key, _: key in FLAT_ROWS, _read_flat, _finish_flat)

# ---- strategy: blocks, under roles or not

BLOCKS = ("model_args", "training_args", "strategy_args", "strategy_config", "device_mapping", "infer_batch_size")
ROLES = ("actor_train", "actor_infer", "reference", "critic", "reward", "student_train", "sft_train")
CONFIG = "strategy_args.strategy_config"
MODES = {"fsdp2_train": "train", "fsdp2_infer": "evaluate"}
LR_SCHEDULES = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosine_with_min_lr": "cosine", "inverse_sqrt": "inverse_sqrt", "warmup_stable_decay": "wsd",
}  # fmt: skip


def _param_dtype(value: str, given: Mapping) -> KeyResult:
    if given.get("strategy_args.strategy_name") == "fsdp2_infer":
        return KeyResult({"model.dtype": value}, "nothing is trained: parameters are kept in it as well")
    remark = "" if value == "float32" else "of computation; the optimizer updates float32 parameters"
    return KeyResult({"parallel.param_dtype": value}, remark)


def _model_dtype(value: str, given: Mapping) -> KeyResult:
    stronger = given.get(f"{CONFIG}.param_dtype")
    if stronger is None:
        return _param_dtype(value, given)
    if stronger == value:
        return KeyResult(remark="the same as strategy_config.param_dtype", used=True)
    return KeyResult(remark=f"strategy_config.param_dtype={stronger} comes before it")


def _tiled_mlp(value: bool, given: Mapping) -> int:
    return given.get(f"{CONFIG}.tiled_num_shards", 4) if value else 0


def _tiled_shards(value: int, given: Mapping) -> Any:
    return value if given.get(f"{CONFIG}.apply_tiled_mlp") else KeyResult(remark="apply_tiled_mlp is not on")


def _num_devices(value: Any, _: Mapping) -> int:
    """Counts the ids of `[0, 1]` or of the text `list(range(a,b[,step]))`, which is parsed and never executed."""
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return len(value)
    found = re.fullmatch(
        r"\s*(?:list\()?range\(\s*(\d{1,9})\s*(?:,\s*(\d{1,9})\s*)?(?:,\s*(0*[1-9]\d{0,8})\s*)?\)\)?\s*", str(value)
    )
    ids = range(*(int(part) for part in found.groups() if part is not None)) if found else ()
    if not ids:
        raise ConfigError(f"got {value!r}, expected device ids: [0, 1] or list(range(0,2))")
    return len(ids)


_UNREAD = "the original trainer does not read it either"
STRATEGY_ROWS = table({
    "strategy_args": {"strategy_name": becomes("train.mode", by=MODES, kind=one_of(MODES))},
    CONFIG: {
        "fsdp_size": becomes("parallel.fsdp_size", kind=int, note="; at most 1: all ranks"),
        "param_dtype": becomes(
            "parallel.param_dtype", by=_param_dtype, kind=DType, note=" (fsdp2_infer: model.dtype)"
        ),
        "reduce_dtype": "parallel.reduce_dtype",
        "reshard_after_forward": "parallel.reshard_after_forward",
        "offload_policy": becomes("parallel.offload", kind=bool),
        "wrap_policy.transformer_layer_cls_to_wrap": becomes("parallel.auto_wrap", kind=list[str] | None),
        **no_effect(
            "embedding and head are separate units, or one unit if their weights are tied",
            "wrap_policy.wrap_embeddings", "wrap_policy.wrap_lm_output",
        ),
        "wrap_policy.moe_experts": "parallel.expert_units",
        "apply_expert_patch": "model.expert_patch",
        "apply_tiled_mlp": becomes("model.tiled_mlp", by=_tiled_mlp, kind=bool, note=" = tiled_num_shards"),
        "tiled_num_shards": becomes("model.tiled_mlp", by=_tiled_shards, note=" (4 when not given)"),
        **no_effect("which MLPs are tiled follows from the model", "model_type"),
        "async_save_ckpt": "checkpoint.async_save",
        **no_effect("checkpoints hold everything that a resumed run needs", "save_only_model"),
        "reduce_scatter_during_grad_accumulation": becomes(
            "parallel.accumulate", by={True: "reduce_scatter", False: "nothing"}, kind=bool
        ),
        "ep_size": "parallel.expert_parallel",
        "efsdp_size": "parallel.expert_fsdp_size",
        "moe_use_grouped_mm": "model.grouped_gemm",
        **no_effect(f"{_UNREAD}: units are gathered ahead in the recorded order", "forward_prefetch"),
        **no_effect(f"{_UNREAD}: weights leave by fsdp2x.export.stream", "use_batched_model_update"),
    },
    "model_args": {
        "model_name_or_path": "model.path",
        "attn_implementation": becomes("model.attn_implementation", by={"fa2": "flash_attention_2"}),
        "disable_gradient_checkpointing": becomes("train.activation_checkpointing", by={True: False, False: True}),
        "dtype": becomes(
            "parallel.param_dtype", by=_model_dtype, kind=DType, note=", unless strategy_config has it"
        ),
        "model_type": only(
            None, "the model's own head", "heads for values are not built here; set model_type: ~", str | None
        ),
        "ulysses_size": becomes("parallel.sequence_parallel", kind=int),
        "freeze_module_prefix": becomes("model.freeze", by=lambda value, _: value or [], kind=list[str] | None),
        "lora_rank": becomes("lora.rank", by={None: 0}, kind=int | None),
        "lora_alpha": "lora.alpha",
        "lora_dropout": "lora.dropout",
        "lora_target": "lora.target_modules",
    },
    "training_args": {
        "learning_rate": "optimizer.lr",
        "weight_decay": "optimizer.weight_decay",
        **_betas("training_args.adam_beta1", "training_args.adam_beta2", 0.999),
        "adam_epsilon": "optimizer.eps",
        "max_grad_norm": NO_CLIP,
        "per_device_train_batch_size": "train.batch_size",
        "per_device_eval_batch_size": "train.eval_batch_size",
        "gradient_accumulation_steps": "train.accumulation",
        "warmup_steps": "schedule.warmup_steps",
        "warmup_ratio": "schedule.warmup_ratio",
        "lr_scheduler_type": becomes("schedule.kind", by=LR_SCHEDULES, kind=one_of(LR_SCHEDULES)),
        "num_train_epochs": "train.epochs",
        "max_steps": becomes("train.steps", by=lambda value, _: value if value > 0 else None, kind=int),
        "logging_steps": "logging.every",
        "save_steps": "checkpoint.save_every",
        "output_dir": "logging.output",
        "seed": "train.seed",
    },
    "": {
        "device_mapping": becomes(
            "parallel.world_size", by=_num_devices, kind=Any, note=", the number of ids",
            remark="torchrun starts the ranks, CUDA_VISIBLE_DEVICES chooses the GPUs",
        ),
        "infer_batch_size": "train.eval_batch_size",
        "pretrain": "model.path",
        "seed": "train.seed",
        "output_dir": "logging.output",
        **no_effect("a run is known by its output folder", "exp_name"),
    },
})  # fmt: skip


def _is_role(key: str, value: Any) -> bool:
    if key in BLOCKS:  # strategy_args holds another block, strategy_config
        return False
    return key in ROLES or (isinstance(value, Mapping) and any(name in BLOCKS for name in value))


def _read_roles(settings: Mapping, role: str | None) -> list[ForeignKey]:
    roles = [key for key, value in settings.items() if _is_role(key, value)]
    if role is None and len(roles) > 1:
        raise ConfigError(f"the file has the roles {', '.join(roles)}; say which one with role=NAME")
    if role is not None and role not in roles:
        raise ConfigError(f"role={role}: the file has {', '.join(roles) or 'no roles'}")
    found = []
    for key, value in settings.items():
        if key in roles and not isinstance(value, Mapping):
            raise ConfigError(f"{key}: got {value!r}, expected a mapping with {', '.join(BLOCKS)}")
        inert = f"this run is the role {role}" if key in roles and role not in (None, key) else ""
        for name, inner in value.items() if key in roles else [(key, value)]:
            canonical = CONFIG if name == "strategy_config" else name
            found += leaves(canonical, f"{key}.{name}" if key in roles else name, inner, STRATEGY_ROWS, inert)
    return found


def _held_out_of_evaluation(found: Translation, _: Mapping[str, Any]) -> None:
    if found.evaluates:
        found.imply("(mode)", "data.held_out", 0.0, "the loss is that of all text")


STRATEGY = Dialect(
    "strategy",
    "model_args, training_args and strategy_args",
    STRATEGY_ROWS,
    lambda key, value: key in BLOCKS or key in STRATEGY_ROWS or _is_role(key, value),
    _read_roles,
    _held_out_of_evaluation,
)

# ---- nested

MODELS = ("policy_trainer", "ref_policy")
_REINFORCEMENT = "it belongs to reinforcement learning; this run trains on text"


def _max_tokens(value: int, given: Mapping) -> Any:
    return value if any(given.get(f"models.{role}.packing") for role in MODELS) else KeyResult(remark="packing is off")


def _steps_per_episode(given: Mapping) -> int | None:
    samples, batch = given.get("runtime_args.sample_per_episode"), given.get("runtime_args.train_global_batch_size")
    return math.ceil(samples / batch) if samples and batch else None


def _episodes(path: str) -> Row:
    def by(value: int, given: Mapping) -> KeyResult:
        steps = _steps_per_episode(given)
        if steps is None:
            return KeyResult(remark="steps of an episode follow from sample_per_episode and train_global_batch_size")
        return KeyResult({path: value * steps}, f"{steps} step(s) an episode")

    return becomes(path, by=by, kind=int, note=", in steps of an episode")


def _samples(_: int, given: Mapping) -> KeyResult:
    steps = _steps_per_episode(given)
    if steps is None:
        return KeyResult(remark="steps of an episode need train_global_batch_size as well")
    return KeyResult(remark=f"{steps} step(s) an episode", used=True)


TRAINER = {
    "load": "model.path",
    "trainable": becomes("train.mode", by={True: "train", False: "evaluate"}, kind=bool),
    "num_gpu": becomes("parallel.world_size", kind=int, remark="torchrun starts the ranks"),
    "gpu_per_process": only(1, "one GPU a rank", "a rank has one GPU; set gpu_per_process: 1"),
    "fsdp_size": "parallel.fsdp_size",
    "ulysses_sequence_parallel_size": becomes("parallel.sequence_parallel", kind=int),
    "packing": "data.packing",
    "max_token_in_packing": becomes("data.max_tokens", by=_max_tokens),
    "meta_init": becomes("model.load", by={True: "rows", False: "whole"}, kind=bool),
    "groupgemm": "model.grouped_gemm",
    "gradient_checkpointing": "train.activation_checkpointing",
    "generation_batch_size": "train.eval_batch_size",
    "optimizer.lr": "optimizer.lr",
    "optimizer.clip_grad": NO_CLIP,
    "optimizer.weight_decay": "optimizer.weight_decay",
    **no_effect("`fsdp2x export CHECKPOINT FOLDER` writes HuggingFace folders", "save_hf"),
    **no_effect("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True instead", "use_expandable_segments"),
    **no_effect(
        "memory is freed between phases only in a loop that also samples", "free_gpu_memory.offload_weights",
        "free_gpu_memory.offload_optimizer_states", "free_gpu_memory.free_grad_buffers",
    ),
    **no_effect(
        _REINFORCEMENT, "pos_clip_ratio", "neg_clip_ratio", "diff_clip_ratio", "final_clip_ratio", "entropy_coef",
        "kl_coef",
    ),
}  # fmt: skip
NESTED_ROWS = table({
    **{f"models.{role}": TRAINER for role in MODELS},
    "models.policy": no_effect(
        "it belongs to the engine that samples",
        "free_gpu_memory.offload_weights", "generation_batch_size", "gpu_per_process", "num_gpu", "enforce_eager",
        "tensor_model_parallel_size", "trainable", "load", "num_inference_per_prompt", "seq_length",
        "max_seq_len_to_capture", "temperature", "top_p", "top_k", "eval_temperature", "eval_top_p", "eval_top_k",
        "vllm_prompt_key", "vllm_input_ids_key", "enable_thinking", "enable_stage_resume", "gpu_memory_utilization",
    ),
    "models.reward": no_effect(_REINFORCEMENT, "num_cpu", "cpu_per_process", "generation_batch_size"),
    "runtime_args": {
        "train_backend": only("fsdp", "the only one", "only fsdp is trained here"),
        **no_effect("a run is known by its output folder; wandb_name names it there", "exp_name"),
        **no_effect(_REINFORCEMENT, "colocation", "data_rerank", "max_replay_episode"),
        "output_dir": "logging.output",
        "data_path": "data.files",
        "eval_data_path": "data.validation_files",
        **no_effect("the place in the data is part of each checkpoint", "data_checkpoint_path"),
        "num_episode": _episodes("train.steps"),
        "sample_per_episode": Row(by=_samples, kind=int, note="makes num_episode steps"),
        "train_micro_batch_size": "train.batch_size",
        "train_global_batch_size": becomes("train.global_batch_size", kind=int),
        "save_episode_interval": _episodes("checkpoint.save_every"),
        "eval_episode_interval": _episodes("train.eval_every"),
        **no_effect("evaluation is every train.eval_every steps", "enable_eval_before_training"),
        "data_shuffle": "data.shuffle",
        "log_args_dict.log_dir": "logging.output",
        "log_args_dict.enable_wandb": "logging.wandb",
        **{
            f"log_args_dict.wandb_{name}": becomes(f"logging.wandb_options.{name}", kind=str | None)
            for name in ("project", "dir", "name", "id", "resume")
        },
    },
})  # fmt: skip


def _read_models(settings: Mapping, role: str | None) -> list[ForeignKey]:
    role = role or MODELS[0]
    if role not in MODELS:
        raise ConfigError(f"role={role}: expected one of {', '.join(MODELS)}")
    inert = tuple(f"models.{name}." for name in MODELS if name != role)
    return [
        leaf._replace(inert=f"this run is the model {role}") if leaf.canonical.startswith(inert) else leaf
        for key, value in settings.items()
        for leaf in leaves(key, key, value, NESTED_ROWS)
    ]


def _finish_nested(found: Translation, ours: Mapping[str, Any]) -> None:
    _held_out_of_evaluation(found, ours)
    if found.evaluates:
        found.imply("(precision)", "model.dtype", "bfloat16", "nothing is trained")
    elif any(key.startswith("models.") and not key.startswith("models.policy.") for key in found.given):
        found.imply("(precision)", "parallel.param_dtype", "bfloat16", "of computation; parameters are float32")
        found.imply("(precision)", "parallel.reduce_dtype", "float32", "of sums of gradients")
    if "runtime_args.train_micro_batch_size" in found.given:
        if "runtime_args.train_global_batch_size" not in found.given:
            found.imply("(batch)", "train.accumulation", 1, "train_global_batch_size is not given")


NESTED = Dialect(
    "nested",
    "models.* and runtime_args.*",
    NESTED_ROWS,
    lambda key, _: key in ("models", "runtime_args"),
    _read_models,
    _finish_nested,
)
DIALECTS = (FLAT, STRATEGY, NESTED)
