"""Nested keys by model and for the run: `models.policy_trainer...`, `runtime_args...`, also as `key=value` overrides.

    models:
      policy_trainer: {load: folder, num_gpu: 2, optimizer: {lr: 2e-6}, packing: True, max_token_in_packing: 10000}
    runtime_args: {train_micro_batch_size: 8, train_global_batch_size: 512, output_dir: out}

The file is written for a loop that samples, scores and trains; what belongs to sampling and scoring has no effect on
training and is told. `role=ref_policy` evaluates the reference model instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..config import ConfigError
from .rules import Draft, ForeignSetting, Rule, becomes, leaves, no_effect, only, unknown

NAME = "nested"
TITLE = "models.* and runtime_args.*"
ROLES = ("policy_trainer", "ref_policy")

_SLEEP = "memory is freed between phases only in a loop that also samples"
_REINFORCEMENT = "it belongs to reinforcement learning; this run trains on text"
_ENGINE = "it belongs to the engine that samples"


def _clip(draft: Draft, value: float) -> None:
    draft.set("train.clip", value or None)


def _num_gpu(draft: Draft, value: int) -> None:
    draft.set("parallel.world_size", value)
    draft.remark("torchrun starts the ranks")


def _max_tokens(draft: Draft, value: int) -> None:
    if draft.values.get("models.policy_trainer.packing") or draft.values.get("models.ref_policy.packing"):
        draft.set("data.max_tokens", value)
    else:
        draft.remark("packing is off")


def _trainable(draft: Draft, value: bool) -> None:
    draft.set("train.mode", "train" if value else "evaluate")


def _save_hf(draft: Draft, value: bool) -> None:
    draft.remark("`fsdp2x export CHECKPOINT FOLDER` writes HuggingFace folders")


def _wandb(name: str) -> Rule:
    return becomes(f"logging.wandb_options.{name}", str | None)


def _steps_per_episode(draft: Draft) -> int | None:
    samples = draft.values.get("runtime_args.sample_per_episode")
    batch = draft.values.get("runtime_args.train_global_batch_size")
    return math.ceil(samples / batch) if samples and batch else None


def _episodes(path: str) -> Rule:
    def act(draft: Draft, value: int) -> None:
        steps = _steps_per_episode(draft)
        if steps is None:
            draft.remark("steps of an episode follow from sample_per_episode and train_global_batch_size")
        else:
            draft.set(path, value * steps)
            draft.remark(f"{steps} step(s) an episode")

    return Rule(int, f"-> {path}, in steps of an episode", act)


def _samples(draft: Draft, value: int) -> None:
    if _steps_per_episode(draft) is None:
        draft.remark("steps of an episode need train_global_batch_size as well")
    else:
        draft.remark(f"{_steps_per_episode(draft)} step(s) an episode", used=True)


def _trainer(role: str) -> dict[str, Rule]:
    keys = {
        "load": becomes("model.path", str),
        "trainable": Rule(bool, "-> train.mode", _trainable),
        "num_gpu": Rule(int, "-> parallel.world_size", _num_gpu),
        "gpu_per_process": only(int, [1], "one GPU a rank", "a rank has one GPU; set gpu_per_process: 1"),
        "fsdp_size": becomes("parallel.fsdp_size", int),
        "ulysses_sequence_parallel_size": becomes("parallel.sequence_parallel", int),
        "packing": becomes("data.packing", bool),
        "max_token_in_packing": Rule(int, "-> data.max_tokens", _max_tokens),
        "meta_init": becomes("model.load", bool, lambda value: "rows" if value else "whole"),
        "groupgemm": becomes("model.grouped_gemm", bool),
        "gradient_checkpointing": becomes("train.activation_checkpointing", bool),
        "generation_batch_size": becomes("train.eval_batch_size", int),
        "optimizer.lr": becomes("optimizer.lr", float),
        "optimizer.clip_grad": Rule(float, "-> train.clip; 0 does not clip", _clip),
        "optimizer.weight_decay": becomes("optimizer.weight_decay", float),
        "save_hf": Rule(bool, "no effect: fsdp2x export does it", _save_hf),
        "use_expandable_segments": no_effect("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True instead", bool),
    }
    keys |= {
        f"free_gpu_memory.{name}": no_effect(_SLEEP, bool)
        for name in ("offload_weights", "offload_optimizer_states", "free_grad_buffers")
    }
    keys |= {
        name: no_effect(_REINFORCEMENT, float)
        for name in (
            "pos_clip_ratio", "neg_clip_ratio", "diff_clip_ratio", "final_clip_ratio", "entropy_coef", "kl_coef",
        )
    }  # fmt: skip
    return {f"models.{role}.{name}": rule for name, rule in keys.items()}


_ENGINE_KEYS = (
    "free_gpu_memory.offload_weights", "generation_batch_size", "gpu_per_process", "num_gpu", "enforce_eager",
    "tensor_model_parallel_size", "trainable", "load", "num_inference_per_prompt", "seq_length",
    "max_seq_len_to_capture", "temperature", "top_p", "top_k", "eval_temperature", "eval_top_p", "eval_top_k",
    "vllm_prompt_key", "vllm_input_ids_key", "enable_thinking", "enable_stage_resume", "gpu_memory_utilization",
)  # fmt: skip

KEYS: dict[str, Rule] = {
    **_trainer("policy_trainer"),
    **_trainer("ref_policy"),
    **{f"models.policy.{name}": no_effect(_ENGINE) for name in _ENGINE_KEYS},
    **{
        f"models.reward.{name}": no_effect(_REINFORCEMENT, int)
        for name in ("num_cpu", "cpu_per_process", "generation_batch_size")
    },
    "runtime_args.train_backend": only(str, ["fsdp"], "the only one", "only fsdp is trained here"),
    "runtime_args.exp_name": no_effect("a run is known by its output folder; wandb_name names it there", str),
    "runtime_args.colocation": no_effect(_REINFORCEMENT, list[str]),
    "runtime_args.output_dir": becomes("logging.output", str),
    "runtime_args.data_path": becomes("data.files", list[str]),
    "runtime_args.eval_data_path": no_effect("held-out text is a part of data_path (data.held_out)", str),
    "runtime_args.data_checkpoint_path": no_effect("the place in the data is part of each checkpoint", str),
    "runtime_args.num_episode": _episodes("train.steps"),
    "runtime_args.sample_per_episode": Rule(int, "makes num_episode steps", _samples),
    "runtime_args.train_micro_batch_size": becomes("train.batch_size", int),
    "runtime_args.train_global_batch_size": becomes("train.global_batch_size", int),
    "runtime_args.save_episode_interval": _episodes("checkpoint.save_every"),
    "runtime_args.eval_episode_interval": _episodes("train.eval_every"),
    "runtime_args.enable_eval_before_training": no_effect("evaluation is every train.eval_every steps", bool),
    "runtime_args.data_shuffle": becomes("data.shuffle", bool),
    "runtime_args.data_rerank": no_effect(_REINFORCEMENT, bool),
    "runtime_args.max_replay_episode": no_effect(_REINFORCEMENT, int),
    "runtime_args.log_args_dict.log_dir": becomes("logging.output", str),
    "runtime_args.log_args_dict.enable_wandb": becomes("logging.wandb", bool),
    "runtime_args.log_args_dict.wandb_project": _wandb("project"),
    "runtime_args.log_args_dict.wandb_dir": _wandb("dir"),
    "runtime_args.log_args_dict.wandb_name": _wandb("name"),
    "runtime_args.log_args_dict.wandb_id": _wandb("id"),
    "runtime_args.log_args_dict.wandb_resume": _wandb("resume"),
}


def owns(key: str, value: Any) -> bool:
    return key in ("models", "runtime_args")


def read(settings: Mapping, role: str | None) -> list[ForeignSetting]:
    role = role or "policy_trainer"
    if role not in ROLES:
        raise ConfigError(f"role={role}: expected one of {', '.join(ROLES)}")
    items = []
    for key, value in settings.items():
        for leaf in leaves(key, key, value, KEYS):
            other = any(leaf.canonical.startswith(f"models.{name}.") for name in ROLES if name != role)
            inert = f"this run is the model {role}" if other else ""
            if key not in ("models", "runtime_args"):
                raise ConfigError(unknown(leaf.canonical, leaf.shown, KEYS, TITLE))
            items.append(ForeignSetting(leaf.canonical, leaf.shown, leaf.value, inert))
    return items


def finish(draft: Draft) -> None:
    if any(key.startswith("models.") and not key.startswith("models.policy.") for key in draft.values):
        if draft.get("train.mode") == "evaluate":
            draft.imply("(precision)", "model.dtype", "bfloat16", "nothing is trained")
            draft.imply("(mode)", "data.held_out", 0.0, "the loss is that of all text")
        else:
            draft.imply("(precision)", "parallel.param_dtype", "bfloat16", "of computation; parameters are float32")
            draft.imply("(precision)", "parallel.reduce_dtype", "float32", "of sums of gradients")
    if draft.get("train.batch_size") and draft.get("train.global_batch_size") is None:
        draft.imply("(batch)", "train.accumulation", 1, "train_global_batch_size is not given")
