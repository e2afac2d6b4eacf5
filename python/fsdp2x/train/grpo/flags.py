"""Translates command-line flags, with dashes or underscores: what each becomes in `fsdp2x grpo`, or no effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from fsdp2x.train.config import ConfigError
from fsdp2x.train.dialects import NO_CLIP, no_role, one_of
from fsdp2x.train.grpo.shared_rows import (
    EVALUATION,
    KINDS,
    MEMORY,
    ONE_SEQUENCE,
    SERVER,
    TOKENS,
    acts_on,
    if_critic,
    imply_all,
    is_given,
    keeps,
    parts,
    reference_path,
)
from fsdp2x.train.parse import apply_overrides
from fsdp2x.train.translate import Dialect, ForeignKey, KeyResult, Row, Translation, becomes, no_effect, only, table

# Rounds of further prompts for rollouts that continue until they are full.
DYNAMIC_ROUNDS = 8
_RULES = ("math", "deepscaler")
_REWARD_TYPES = (*_RULES, "dapo", "f1", "gpqa", "ifbench", "random", "remote_rm")
_STYLES = {"inverse-square-root": "inverse_sqrt", "WSD": "wsd"}


def _ranks(_: int, given: Mapping) -> int:
    return given.get("actor_num_nodes", 1) * given.get("actor_num_gpus_per_node", 8)


def _flag_samples(given: Mapping) -> int | None:
    prompts = given.get("rollout_batch_size")
    return None if prompts is None else prompts * given.get("n_samples_per_prompt", 1)


def _flag_minibatches(value: int, given: Mapping) -> int:
    samples = _flag_samples(given)
    if samples is None:
        raise ConfigError(f"got {value}; optimizer steps of a rollout follow from it only with rollout_batch_size")
    return parts(samples, value, "rollout_batch_size x n_samples_per_prompt")


def _flag_steps(given: Mapping) -> int:
    """Returns the optimizer steps of a rollout."""
    samples, batch = _flag_samples(given), given.get("global_batch_size")
    return given.get("num_steps_per_rollout") or (parts(samples, batch, "") if samples and batch else 1)


def _iterations(path: str) -> Row:
    """Converts optimizer steps to rollouts, by which the rate changes here."""
    return becomes(path, by=lambda value, given: -(-value // _flag_steps(given)), kind=int, note=", in rollouts")


def _flag_clip(value: float, given: Mapping) -> KeyResult:
    return KeyResult(
        {"algorithm.clip_low": value} | ({} if "eps_clip_high" in given else {"algorithm.clip_high": value})
    )


def _flag_engine(value: bool, given: Mapping) -> KeyResult:
    return KeyResult({"rollout.engine": "colocated" if value else "sglang"}, "fsdp2x's own" if value else "")


def _flag_if(switch: str, path: str) -> Row:
    def by(value: Any, given: Mapping) -> KeyResult:
        return KeyResult({path: value}) if given.get(switch) else KeyResult(remark=f"{switch} is not on")

    return becomes(path, by=by, note=f" with {switch}")


def _flag_reward(value: str, _: Mapping) -> KeyResult:
    if value in _RULES:
        return KeyResult({"reward.functions": ["math_verify"]})
    return KeyResult(remark=f"no built-in reward is {value}; write it as a function")


def _eval_files(value: list[str], _: Mapping) -> list[str]:
    """Returns the files from alternating names and files, or from one file."""
    return value[1::2] if len(value) > 1 else value


def _prompt_file(value: str, _: Mapping) -> list[str]:
    if "@[" in value:
        raise ConfigError(f"got {value!r}; a part of a file cannot be taken; write these rows to a file")
    return [value]


def _load(value: str, _: Mapping) -> KeyResult:
    """Returns the checkpoint to resume from, if there is one."""
    if Path(value).expanduser().exists():
        return KeyResult({"checkpoint.resume_from": value})
    return KeyResult(remark="there is no checkpoint yet")


def _betas(_: float, given: Mapping) -> list[float]:
    return [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.95)]


def _dynamic(value: str, _: Mapping) -> int:
    if not value.endswith("check_reward_nonzero_std"):
        raise ConfigError(f"got {value}; groups are left out for equal rewards only (check_reward_nonzero_std)")
    return DYNAMIC_ROUNDS


FLAG_ROWS = table({"": {
    "actor_num_nodes": becomes("parallel.world_size", by=_ranks, note=" = nodes x GPUs", kind=int),
    "actor_num_gpus_per_node": becomes("parallel.world_size", by=_ranks, note=" = nodes x GPUs", kind=int),
    "colocate": becomes("rollout.engine", by=_flag_engine, kind=bool, note="=colocated; without it sglang"),
    "train_async": becomes("rollout.ahead", by={True: 1, False: 0}, kind=bool, remark="the script of that name"),
    "rollout_external_engine_addrs": becomes(
        "rollout.addresses", kind=list[str],
        by=lambda value, _: [one if "//" in one else f"http://{one}" for one in value],
    ),
    **no_effect(SERVER, "rollout_num_gpus", "rollout_num_gpus_per_engine", "sglang_*", "rollout_external"),
    **no_effect("torchrun starts the ranks", "num_gpus_per_node"),
    **no_effect(MEMORY, "offload", "offload_train", "offload_rollout"),
    "train_backend": only("fsdp", "the only one", "only fsdp is trained here"),
    "slime_backend": only("fsdp", "the only one", "only fsdp is trained here"),
    "context_parallel_size": only(1, "whole sequences", ONE_SEQUENCE),
    "update_weights_interval": only(1, "after each step", "the engine gets the weights of each step; write 1"),
    **no_effect("weights leave in buckets in any case", "fsdp_full_params"),
    **{name: becomes("rollout.bucket_mib", by=lambda value, _: max(value >> 20, 1), note=", in MiB")
       for name in ("update_weights_bucket_size", "update_weight_buffer_size")},
    "fsdp_cpu_offload": becomes("parallel.offload", kind=bool),
    "hf_checkpoint": becomes("model.path", kind=str),
    "ref_load": reference_path(
        "hf_checkpoint", lambda given: given.get("use_kl_loss") and given.get("kl_loss_coef")
    ),
    "load": becomes("checkpoint.resume_from", by=_load, kind=str, note=", if it exists"),
    "save": becomes("checkpoint.folder", kind=str),
    "save_interval": "checkpoint.save_every",
    "gradient_checkpointing": "train.activation_checkpointing",
    "attn_implementation": "model.attn_implementation",
    "deterministic_mode": "train.deterministic",
    "fp16": keeps(False, "float16 needs a scaled loss; leave it out, which computes in bfloat16"),
    "prompt_data": becomes("data.files", by=_prompt_file, kind=str),
    "input_key": "data.prompt_column",
    "label_key": "data.answer_column",
    "apply_chat_template": "data.apply_chat_template",
    "rollout_shuffle": "data.shuffle",
    "rollout_max_prompt_len": becomes("data.max_prompt_tokens", kind=int),
    **no_effect("reward functions get every column", "metadata_key", "reward_key"),
    "rm_type": becomes(
        "reward.functions", by=_flag_reward, kind=one_of(_REWARD_TYPES), note="; math, deepscaler: math_verify"
    ),
    **no_effect("it has another signature; see reward.functions", "custom_rm_path"),
    "num_rollout": becomes("train.steps", kind=int),
    "num_epoch": "train.epochs",
    "rollout_batch_size": becomes("train.global_batch_size", kind=int),
    "n_samples_per_prompt": "rollout.group_size",
    "rollout_max_response_len": "rollout.max_tokens",
    "rollout_temperature": "rollout.temperature",
    "rollout_top_p": "rollout.top_p",
    "rollout_top_k": becomes("rollout.top_k", by={-1: 0}),
    "rollout_stop_token_ids": becomes("rollout.stop_ids", kind=list[int]),
    **no_effect("train.seed is that of the samples as well", "rollout_seed"),
    "global_batch_size": becomes(
        "algorithm.minibatches", by=_flag_minibatches, note=" = rollout_batch_size x n_samples_per_prompt / it"
    ),
    "num_steps_per_rollout": "algorithm.minibatches",
    **no_effect(TOKENS, "micro_batch_size", "balance_data"),
    "use_dynamic_batch_size": acts_on("max_tokens_per_gpu"),
    "max_tokens_per_gpu": _flag_if("use_dynamic_batch_size", "data.max_tokens"),
    "dynamic_sampling_filter_path": becomes(
        "algorithm.dynamic_sampling", by=_dynamic, kind=str, remark="at most so many further rounds"
    ),
    **no_effect("a further round asks for as many prompts as the first", "over_sampling_batch_size"),
    "partial_rollout": keeps(False, "responses are drawn whole; leave it out"),
    "advantage_estimator": becomes("algorithm.name", kind=Literal["ppo", "grpo", "gspo"]),
    "disable_grpo_std_normalization": becomes(
        "algorithm.advantage_scale", by={True: "none", False: "std"}, kind=bool, note="=none"
    ),
    "normalize_advantages": keeps(False, "advantages of groups are not whitened again; leave it out"),
    "calculate_per_token_loss": becomes("algorithm.mean", by={True: "tokens", False: "samples"}, kind=bool),
    "gamma": if_critic("algorithm.gamma"),
    "lambd": if_critic("algorithm.gae_lambda"),
    "value_clip": if_critic("algorithm.value_clip"),
    "critic_lr": if_critic("algorithm.critic_lr"),
    "num_critic_only_steps": if_critic("algorithm.critic_warmup"),
    "use_kl_loss": acts_on("kl_loss_coef"),
    "kl_loss_coef": _flag_if("use_kl_loss", "algorithm.kl_weight"),
    "kl_loss_type": becomes("algorithm.kl", by={"low_var_kl": "k3"}, kind=Literal["k1", "k2", "k3", "low_var_kl"]),
    "kl_coef": keeps(0.0, "rewards carry no KL; use_kl_loss adds it to the loss", float),
    "entropy_coef": "algorithm.entropy_weight",
    "eps_clip": becomes("algorithm.clip_low", "algorithm.clip_high", by=_flag_clip, kind=float),
    "eps_clip_high": "algorithm.clip_high",
    "eps_clip_c": "algorithm.dual_clip",
    "use_tis": becomes(
        "algorithm.max_weight", kind=bool, note=" = tis_clip",
        by=lambda value, given: KeyResult({"algorithm.max_weight": given.get("tis_clip", 2.0)} if value else {}, "off"),
    ),
    "tis_clip": _flag_if("use_tis", "algorithm.max_weight"),
    "tis_clip_low": keeps(0.0, "importance weights are cut off above only; write 0", float),
    "eval_prompt_data": becomes("data.validation_files", by=_eval_files),
    "eval_interval": "train.eval_every",
    "n_samples_per_eval_prompt": "evaluation.samples",
    "eval_temperature": "rollout.eval_temperature",
    **no_effect(EVALUATION, "eval_max_response_len", "eval_top_p", "eval_top_k"),
    "optimizer": only("adam", "AdamW", "the optimizer of these flags is AdamW; write adam, or set optimizer.name"),
    "lr": "optimizer.lr",
    "min_lr": "schedule.min_lr",
    "lr_decay_style": becomes(
        "schedule.kind", by=_STYLES, kind=one_of(("constant", "linear", "cosine", *_STYLES))
    ),
    "lr_decay_iters": _iterations("schedule.decay_steps"),
    "lr_warmup_iters": _iterations("schedule.warmup_steps"),
    "lr_warmup_fraction": "schedule.warmup_ratio",
    "lr_wsd_decay_iters": _iterations("schedule.wsd_decay_steps"),
    "lr_wsd_decay_style": "schedule.wsd_decay",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": becomes("optimizer.betas", by=_betas, note="[0]", kind=float),
    "adam_beta2": becomes("optimizer.betas", by=_betas, note="[1]", kind=float),
    "adam_eps": "optimizer.eps",
    "clip_grad": NO_CLIP,
    "seed": "train.seed",
    "use_wandb": "logging.wandb",
    **{f"wandb_{name}": becomes(f"logging.wandb_options.{option}", kind=str) for name, option in (
        ("project", "project"), ("group", "group"), ("team", "entity"), ("mode", "mode"), ("dir", "dir"),
        ("run_id", "id"),
    )},
    **no_effect("set WANDB_API_KEY in the shell", "wandb_key"),
    "use_tensorboard": "logging.tensorboard",
    "tensorboard_dir": _flag_if("use_tensorboard", "logging.tensorboard_dir"),
}}, KINDS)  # fmt: skip


def _flag(key: str) -> str:
    """Returns the name in the table: with underscores, and all options of the server under one name."""
    name = key.replace("-", "_").lower()
    return "sglang_*" if name.startswith("sglang_") else name


def _read_flags(settings: Mapping, role: str | None) -> list[ForeignKey]:
    no_role(role, FLAGS.title)
    return [ForeignKey(_flag(str(key)), str(key), value) for key, value in settings.items()]


def _finish_flags(found: Translation, ours: Mapping[str, Any]) -> None:
    for what, path, value, why in (
        ("(engine)", "rollout.engine", "sglang", "colocate is not on"),
        ("(precision)", "parallel.param_dtype", "bfloat16", "of computation; parameters are float32"),
        ("(precision)", "parallel.reduce_dtype", "float32", "of sums of gradients"),
        ("(optimizer)", "optimizer.weight_decay", 0.0, "weight_decay is not given"),
        ("(schedule)", "schedule.kind", "constant", "lr_decay_style is not given"),
        ("(data)", "data.shuffle", False, "rollout_shuffle is not on"),
    ):
        found.imply(what, path, value, why)
    if "eval_interval" in found.given:
        temperature = found.given.get("rollout_temperature", 1.0)
        found.imply("(evaluation)", "rollout.eval_temperature", temperature, "eval_temperature is not given")
    if not is_given(found, ours, "optimizer.lr"):
        found.needs.append("lr: the learning rate")
    if not is_given(found, ours, "train.global_batch_size"):
        found.needs.append("rollout_batch_size: prompts of a rollout, over all ranks")
    imply_all(found, ours, "k1")


FLAGS = Dialect(
    "flags",
    "flags of a command line",
    FLAG_ROWS,
    lambda key, value: _flag(key) in FLAG_ROWS and not isinstance(value, Mapping),
    _read_flags,
    _finish_flags,
)


def read_flags(words: Iterable[str]) -> dict[str, Any]:
    """Converts command-line words to a mapping: a flag without a value is on, and one with several has a list.

    The program may come first: `train_async.py` draws one step ahead.

    Raises:
        ConfigError: a word belongs to no flag.
    """
    found: dict[str, list[Any]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            found[flag] = [value] if equals else []
        elif flag:
            found[flag].append(word)
        elif word.endswith("train_async.py"):
            found["train_async"] = ["true"]
        elif not word.endswith(("train.py", "python", "python3")):
            raise ConfigError(f"{word!r}: expected a flag such as --colocate before it")
    read = {flag: [apply_overrides({}, [f"value={one}"])["value"] for one in values] for flag, values in found.items()}
    return {flag: True if not values else values[0] if len(values) == 1 else values for flag, values in read.items()}
