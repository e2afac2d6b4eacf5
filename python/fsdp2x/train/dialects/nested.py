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
from .draft import ALL_TEXT, Draft, evaluates
from .rules import Dialect, Fate, ForeignKey, Implied, Rule, becomes, leaves, no_effect, only

TITLE = "models.* and runtime_args.*"
ROLES = ("policy_trainer", "ref_policy")

_SLEEP = "memory is freed between phases only in a loop that also samples"
_REINFORCEMENT = "it belongs to reinforcement learning; this run trains on text"
_ENGINE = "it belongs to the engine that samples"


def _max_tokens(value: int, given: Mapping) -> Any:
    return value if any(given.get(f"models.{role}.packing") for role in ROLES) else Fate(remark="packing is off")


def _steps_per_episode(given: Mapping) -> int | None:
    samples, batch = given.get("runtime_args.sample_per_episode"), given.get("runtime_args.train_global_batch_size")
    return math.ceil(samples / batch) if samples and batch else None


def _episodes(path: str) -> Rule:
    def by(value: int, given: Mapping) -> Fate:
        steps = _steps_per_episode(given)
        if steps is None:
            return Fate(remark="steps of an episode follow from sample_per_episode and train_global_batch_size")
        return Fate({path: value * steps}, f"{steps} step(s) an episode")

    return becomes(int, path, by=by, note=", in steps of an episode")


def _samples(_: int, given: Mapping) -> Fate:
    steps = _steps_per_episode(given)
    if steps is None:
        return Fate(remark="steps of an episode need train_global_batch_size as well")
    return Fate(remark=f"{steps} step(s) an episode", used=True)


def _trainer(role: str) -> dict[str, Rule]:
    keys = {
        "load": becomes(str, "model.path"),
        "trainable": becomes(bool, "train.mode", by={True: "train", False: "evaluate"}),
        "num_gpu": becomes(int, "parallel.world_size", remark="torchrun starts the ranks"),
        "gpu_per_process": only(int, 1, "one GPU a rank", "a rank has one GPU; set gpu_per_process: 1"),
        "fsdp_size": becomes(int, "parallel.fsdp_size"),
        "ulysses_sequence_parallel_size": becomes(int, "parallel.sequence_parallel"),
        "packing": becomes(bool, "data.packing"),
        "max_token_in_packing": becomes(int, "data.max_tokens", by=_max_tokens),
        "meta_init": becomes(bool, "model.load", by={True: "rows", False: "whole"}),
        "groupgemm": becomes(bool, "model.grouped_gemm"),
        "gradient_checkpointing": becomes(bool, "train.activation_checkpointing"),
        "generation_batch_size": becomes(int, "train.eval_batch_size"),
        "optimizer.lr": becomes(float, "optimizer.lr"),
        "optimizer.clip_grad": becomes(float, "train.clip", by={0: None}, note="; 0 does not clip"),
        "optimizer.weight_decay": becomes(float, "optimizer.weight_decay"),
        "save_hf": Rule(
            bool,
            note="no effect: fsdp2x export does it",
            remark="`fsdp2x export CHECKPOINT FOLDER` writes HuggingFace folders",
        ),
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
    "runtime_args.train_backend": only(str, "fsdp", "the only one", "only fsdp is trained here"),
    "runtime_args.exp_name": no_effect("a run is known by its output folder; wandb_name names it there", str),
    "runtime_args.colocation": no_effect(_REINFORCEMENT, list[str]),
    "runtime_args.output_dir": becomes(str, "logging.output"),
    "runtime_args.data_path": becomes(list[str], "data.files"),
    "runtime_args.eval_data_path": no_effect("held-out text is a part of data_path (data.held_out)", str),
    "runtime_args.data_checkpoint_path": no_effect("the place in the data is part of each checkpoint", str),
    "runtime_args.num_episode": _episodes("train.steps"),
    "runtime_args.sample_per_episode": Rule(int, by=_samples, note="makes num_episode steps"),
    "runtime_args.train_micro_batch_size": becomes(int, "train.batch_size"),
    "runtime_args.train_global_batch_size": becomes(int, "train.global_batch_size"),
    "runtime_args.save_episode_interval": _episodes("checkpoint.save_every"),
    "runtime_args.eval_episode_interval": _episodes("train.eval_every"),
    "runtime_args.enable_eval_before_training": no_effect("evaluation is every train.eval_every steps", bool),
    "runtime_args.data_shuffle": becomes(bool, "data.shuffle"),
    "runtime_args.data_rerank": no_effect(_REINFORCEMENT, bool),
    "runtime_args.max_replay_episode": no_effect(_REINFORCEMENT, int),
    "runtime_args.log_args_dict.log_dir": becomes(str, "logging.output"),
    "runtime_args.log_args_dict.enable_wandb": becomes(bool, "logging.wandb"),
    **{
        f"runtime_args.log_args_dict.wandb_{name}": becomes(str | None, f"logging.wandb_options.{name}")
        for name in ("project", "dir", "name", "id", "resume")
    },
}


def _read(settings: Mapping, role: str | None) -> list[ForeignKey]:
    role = role or "policy_trainer"
    if role not in ROLES:
        raise ConfigError(f"role={role}: expected one of {', '.join(ROLES)}")
    inert = tuple(f"models.{name}." for name in ROLES if name != role)
    return [
        leaf._replace(inert=f"this run is the model {role}") if leaf.canonical.startswith(inert) else leaf
        for key, value in settings.items()
        for leaf in leaves(key, key, value, KEYS)
    ]


def _trains(draft: Draft) -> bool:
    names = (key for key in draft.given if key.startswith("models.") and not key.startswith("models.policy."))
    return any(names) and not evaluates(draft)


def _lacks_whole_batch(draft: Draft) -> bool:
    return bool(draft.settings.get("train.batch_size")) and draft.settings.get("train.global_batch_size") is None


IMPLIED = (
    Implied("(precision)", "model.dtype", "bfloat16", "nothing is trained", evaluates),
    ALL_TEXT,
    Implied("(precision)", "parallel.param_dtype", "bfloat16", "of computation; parameters are float32", _trains),
    Implied("(precision)", "parallel.reduce_dtype", "float32", "of sums of gradients", _trains),
    Implied("(batch)", "train.accumulation", 1, "train_global_batch_size is not given", _lacks_whole_batch),
)
NESTED = Dialect("nested", TITLE, KEYS, lambda key, _: key in ("models", "runtime_args"), _read, IMPLIED)
