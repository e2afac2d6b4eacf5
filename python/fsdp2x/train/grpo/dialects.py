"""Tables of the keys of three other policy trainers: what every key becomes here, or why it has no effect.

roles      actor_train, actor_infer and reference, with the blocks of `train/dialects.py`, and the keys of a pipeline
models     models.policy_trainer, models.policy, models.ref_policy and runtime_args
flags      names of a command line, with dashes or underscores (`flags.py`)

Their rollout is a step here, so their optimizer steps per rollout become `algorithm.minibatches`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fsdp2x.train.config import ConfigError
from fsdp2x.train.dialects import CONFIG, NESTED_ROWS, STRATEGY_ROWS, no_role
from fsdp2x.train.grpo.flags import FLAGS
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
    moved,
    of_reference,
    parts,
    reference_path,
)
from fsdp2x.train.parse import show
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

# ---- roles

_ROLES = ("actor_train", "actor_infer", "reference")
_ACTOR, _REFERENCE, _SAMPLES = "actor_train.", "reference.", "actor_infer.generating_args."


def _role_tokens(value: int, given: Mapping) -> KeyResult:
    if "prompt_length" not in given or "response_length" not in given:
        return KeyResult(remark=TOKENS, used=True)
    length = given["prompt_length"] + given["response_length"]
    return KeyResult({"data.max_tokens": value * length}, "samples of prompt_length and response_length")


def _role_minibatches(value: int, given: Mapping) -> KeyResult:
    wanted = ("rollout_batch_size", "num_return_sequences_in_group", _ACTOR + "device_mapping")
    missing = [key for key in wanted if key not in given]
    if missing:
        raise ConfigError(f"got {value}; updates of a rollout follow from it only with {', '.join(missing)}")
    prompts, samples, devices = (given[key] for key in wanted)
    per_device = given.get(_ACTOR + "training_args.per_device_train_batch_size", 1)
    ranks = STRATEGY_ROWS["device_mapping"].apply("", devices, {}).became["parallel.world_size"]
    return KeyResult(
        {"algorithm.minibatches": parts(prompts * samples, value * per_device * ranks, "over all devices")},
        f"{value} x {per_device} x {ranks} devices samples each",
    )


def _role_engine(value: str, given: Mapping) -> KeyResult:
    mine, theirs = given.get("actor_infer.device_mapping"), given.get(_ACTOR + "device_mapping")
    if mine is not None and str(mine) == str(theirs):
        return KeyResult({"rollout.engine": "colocated"}, "fsdp2x's own: it has the trainer's devices")
    return KeyResult({"rollout.engine": {"hf_infer": "server"}.get(value, value)})


def _role_kl(value: float, given: Mapping) -> KeyResult:
    if given.get("use_kl_loss"):
        return KeyResult({"algorithm.kl_weight": value})
    return KeyResult(remark="use_kl_loss is not on")


def _role_rewards(value: Mapping, _: Mapping) -> KeyResult:
    """Returns rewards for the classes of their workers."""
    workers = [one.get("worker_cls", name) if isinstance(one, Mapping) else name for name, one in value.items()]
    classes = sorted({str(worker).rpartition(".")[2] for worker in workers})
    if classes == ["MathRuleRewardWorker"]:
        return KeyResult({"reward.functions": ["math_verify"], "data.answer_column": "ground_truth"})
    return KeyResult(remark=f"no built-in reward is {', '.join(classes)}; write it as a function")


def _role_domains(value: Mapping, _: Mapping) -> KeyResult:
    if len(value) > 1:
        raise ConfigError(f"got {show(value)}; rows of all files are drawn alike; keep one domain")
    return KeyResult(remark="there is one domain")


def _role_clip(bound: str) -> Row:
    def by(value: float, given: Mapping) -> KeyResult:
        if not given.get("use_pg_clip_range"):
            return KeyResult(remark="use_pg_clip_range is not on")
        return KeyResult({f"algorithm.clip_{bound}": value})

    return becomes(f"algorithm.clip_{bound}", by=by)


def _role_both_clips(value: float, given: Mapping) -> KeyResult:
    if given.get("use_pg_clip_range"):
        return KeyResult(remark="pg_clip_low and pg_clip_high come before it")
    return KeyResult({"algorithm.clip_low": value, "algorithm.clip_high": value})


def _role_dual_clip(value: bool, given: Mapping) -> KeyResult:
    return KeyResult({"algorithm.dual_clip": 1 + 2 * given.get("pg_clip", 0.2) if value else None}, "1 + 2 pg_clip")


def _tracker(value: str, given: Mapping) -> KeyResult:
    options = given.get("tracker_kwargs") or {}
    if value == "wandb":
        known = {name: options[name] for name in ("project", "name", "dir", "id") if name in options}
        return KeyResult({"logging.wandb": True, "logging.wandb_options": known})
    folder = {"logging.tensorboard_dir": options["log_dir"]} if "log_dir" in options else {}
    return KeyResult({"logging.tensorboard": True, **folder})


def _folder(value: Mapping, _: Mapping) -> KeyResult:
    if "output_dir" not in value:
        return KeyResult(remark="it names no output_dir")
    return KeyResult({"checkpoint.folder": value["output_dir"]})


def _one_ahead(value: float, _: Mapping) -> int:
    if value not in (0, 1):
        raise ConfigError(f"got {show(value)}; rollouts are drawn in turns (0) or one step ahead (1)")
    return int(value)


_STRATEGY = {key: row for key, row in STRATEGY_ROWS.items() if not key.endswith("strategy_name")}
_NAME = "strategy_args.strategy_name"
ROLE_ROWS = table({"": {
    **moved(_STRATEGY, _ACTOR),
    **of_reference(moved(_STRATEGY, _REFERENCE)),
    **{key: STRATEGY_ROWS[key] for key in ("pretrain", "seed", "output_dir", "exp_name")},
    _ACTOR + _NAME: only("fsdp2_train", "it is trained", "the policy is trained; write fsdp2_train"),
    _REFERENCE + _NAME: only("fsdp2_infer", "it is only asked", "the reference is only asked; write fsdp2_infer"),
    **{role + CONFIG + ".model_type": STRATEGY_ROWS[CONFIG + ".model_type"] for role in (_ACTOR, _REFERENCE)},
    _ACTOR + "model_args.ulysses_size": only(1, "whole sequences", ONE_SEQUENCE),
    _REFERENCE + "model_args.model_name_or_path": reference_path(
        "pretrain", lambda given: given.get("use_kl_loss") and given.get("kl_loss_coef")
    ),
    _ACTOR + "training_args.per_device_train_batch_size": becomes(
        "data.max_tokens", by=_role_tokens, kind=int, note=" = it * (prompt_length + response_length)"
    ),
    _ACTOR + "training_args.gradient_accumulation_steps": becomes(
        "algorithm.minibatches", by=_role_minibatches, note=" = samples of a rollout / samples of an optimizer step"
    ),
    **no_effect(TOKENS, _ACTOR + "training_args.per_device_eval_batch_size", _ACTOR + "infer_batch_size"),
    _ACTOR + "data_args.file_name": becomes("data.files", kind=list[str]),
    _ACTOR + "data_args.messages": "data.prompt_column",
    _ACTOR + "data_args.prompt": "data.prompt_column",
    _ACTOR + "data_args.template": becomes(
        "data.apply_chat_template", kind=str, by=lambda *_: True, remark="the tokenizer's own template"
    ),
    _ACTOR + "data_args.domain_interleave_probs": Row(by=_role_domains, kind=dict, note="one domain only"),
    **no_effect("files are given by their paths", _ACTOR + "data_args.dataset_dir"),
    **no_effect("rows are read once", _ACTOR + "data_args.preprocessing_num_workers",
                _ACTOR + "data_args.interleave_probs"),
    "actor_infer.strategy_args.strategy_name": becomes(
        "rollout.engine", by=_role_engine, kind=Literal["vllm", "sglang", "hf_infer"],
        note="; hf_infer: server, the trainer's devices: colocated",
    ),
    "actor_infer.device_mapping": acts_on("actor_infer.strategy_args.strategy_name", Any),
    **no_effect(SERVER, "actor_infer.strategy_args.strategy_config", "actor_infer.model_args", "actor_infer.data_args",
                "actor_infer.num_gpus_per_worker", "actor_infer.infer_batch_size"),
    _SAMPLES + "temperature": "rollout.temperature",
    _SAMPLES + "top_p": "rollout.top_p",
    _SAMPLES + "top_k": becomes("rollout.top_k", by={-1: 0}),
    _SAMPLES + "max_new_tokens": "rollout.max_tokens",
    _SAMPLES + "num_return_sequences": "rollout.group_size",
    _SAMPLES + "num_beams": only(1, "responses are drawn", "responses are drawn, not searched; write 1"),
    "validation.data_args.file_name": becomes("data.validation_files", kind=list[str]),
    "validation.generating_args.temperature": "rollout.eval_temperature",
    "validation.generating_args.num_return_sequences": "evaluation.samples",
    "validation.eval_steps": "train.eval_every",
    **no_effect(EVALUATION, "validation.data_args.template", *(
        f"validation.generating_args.{name}" for name in ("max_new_tokens", "top_p", "top_k", "num_beams")
    )),
    "rewards": becomes(
        "reward.functions", "data.answer_column", by=_role_rewards, kind=dict,
        note="; MathRuleRewardWorker: math_verify",
    ),
    **no_effect("rewards are functions here", "reward_pretrain"),
    "rollout_batch_size": becomes("train.global_batch_size", kind=int),
    "num_return_sequences_in_group": "rollout.group_size",
    "prompt_length": becomes("data.max_prompt_tokens", kind=int),
    "response_length": "rollout.max_tokens",
    "max_steps": becomes("train.steps", kind=int),
    "save_steps": "checkpoint.save_every",
    "logging_steps": "logging.every",
    "eval_steps": "train.eval_every",
    "resume_from_checkpoint": becomes(
        "checkpoint.resume_from", by={False: None}, kind=Literal[False] | str, note="; false: a new run"
    ),
    "checkpoint_config": becomes("checkpoint.folder", by=_folder, kind=dict, note=" = its output_dir"),
    "track_with": becomes(
        "logging.tensorboard", "logging.tensorboard_dir", "logging.wandb", "logging.wandb_options", by=_tracker,
        kind=Literal["tensorboard", "wandb"],
    ),
    "tracker_kwargs": acts_on("track_with", dict),
    **no_effect("torchrun starts the ranks", "num_gpus_per_node", "rpc_timeout"),
    **no_effect("set them in the shell", "system_envs"),
    **no_effect("logs and metrics are in logging.output", "logging_dir", "hydra", "defaults"),
    "ppo_epochs": "algorithm.epochs",
    "adv_estimator": becomes(
        "algorithm.name", by={"gae": "ppo"}, kind=Literal["gae", "grpo"], note="; gae: ppo, with a critic"
    ),
    "importance_sampling": becomes(
        "algorithm.name", kind=Literal["token", "seq"], note="; seq: gspo",
        by=lambda value, _: KeyResult({"algorithm.name": "gspo"}) if value == "seq" else KeyResult(
            remark="of each token", used=True
        ),
    ),
    "use_kl_loss": acts_on("kl_loss_coef"),
    "kl_loss_coef": becomes("algorithm.kl_weight", by=_role_kl),
    "entropy_loss_coef": "algorithm.entropy_weight",
    "use_pg_clip_range": acts_on("pg_clip_low and pg_clip_high"),
    "pg_clip": becomes("algorithm.clip_low", "algorithm.clip_high", by=_role_both_clips, kind=float),
    "pg_clip_low": _role_clip("low"),
    "pg_clip_high": _role_clip("high"),
    "dual_clip_loss": becomes("algorithm.dual_clip", by=_role_dual_clip, kind=bool),
    "reward_clip": "reward.clip",
    "loss_agg_mode": becomes(
        "algorithm.mean", by={"token-mean": "tokens", "seq-mean-token-mean": "samples"},
        kind=Literal["token-mean", "seq-mean-token-mean"],
    ),
    "norm_mean_type": keeps("group", "rewards are compared in their group; write group", Literal["group"]),
    "norm_std_type": becomes(
        "algorithm.advantage_scale", by={"group": "std", None: "none"}, kind=Literal["group", "batch"] | None
    ),
    "value_clip": if_critic("algorithm.value_clip"),
    "gamma": if_critic("algorithm.gamma"),
    "lambd": if_critic("algorithm.gae_lambda"),
    "advantage_clip": keeps(None, "advantages are not cut off; reward_clip bounds rewards", float | None),
    "whiten_advantages": keeps(False, "advantages of groups are not whitened again; set it to false"),
    "add_token_level_kl": keeps(False, "rewards carry no KL; use_kl_loss adds it to the loss"),
    "max_len_mask": keeps(False, "truncated responses count; set it to false, or raise response_length"),
    "difficulty_mask": keeps(False, "set it to false; algorithm.dynamic_sampling=8 replaces groups of equal rewards"),
    **{name: keeps(False, "samples are not weighted; set it to false")
       for name in ("difficulty_loss_weight", "length_loss_weight", "error_max_len_clip")},
    **no_effect("difficulty_mask is not on", "difficulty_low_threshold", "difficulty_high_threshold"),
    "async_generation_ratio": becomes("rollout.ahead", by=_one_ahead, kind=float),
}}, KINDS)  # fmt: skip


def _is_role(key: str, value: Any) -> bool:
    """Returns whether a key is a role. `reference` is a section of fsdp2x as well."""
    inner = value if isinstance(value, Mapping) else ()
    return key in _ROLES[:2] or any(row.startswith(f"{key}.{name}") for row in ROLE_ROWS for name in inner)


def _read_roles(settings: Mapping, role: str | None) -> list[ForeignKey]:
    no_role(role, ROLES.title)
    items = []
    for key, value in settings.items():
        blocks = value if key in _ROLES and isinstance(value, Mapping) else {"": value}
        for name, inner in blocks.items():
            shown = f"{key}.{name}" if name else key
            canonical = f"{key}.{CONFIG}" if name == "strategy_config" else shown
            items += leaves(canonical, shown, inner, ROLE_ROWS)
    return items


def _finish_roles(found: Translation, ours: Mapping[str, Any]) -> None:
    if not is_given(found, ours, "train.global_batch_size"):
        found.needs.append("rollout_batch_size: prompts of a rollout, over all ranks")
    imply_all(found, ours, "k3")


ROLES = Dialect(
    "roles",
    "actor_train, actor_infer, reference and their pipeline",
    ROLE_ROWS,
    lambda key, value: key in ROLE_ROWS or _is_role(key, value),
    _read_roles,
    _finish_roles,
)

# ---- models

_TRAINER, _POLICY, _FROZEN, _RUN = "models.policy_trainer.", "models.policy.", "models.ref_policy.", "runtime_args."


def _episode_prompts(value: int, given: Mapping) -> int:
    samples = given.get(_POLICY + "num_inference_per_prompt", 1)
    if value % samples:
        raise ConfigError(f"expected a multiple of {_POLICY}num_inference_per_prompt={samples}, got {value}")
    return value // samples


def _episode_parts(value: int, given: Mapping) -> int:
    samples = given.get(_RUN + "sample_per_episode")
    if samples is None:
        raise ConfigError(f"got {value}; optimizer steps of an episode follow from it only with sample_per_episode")
    return parts(samples, value, "sample_per_episode")


def _model_tokens(value: int, given: Mapping) -> KeyResult:
    length = given.get(_POLICY + "seq_length")
    if given.get(_TRAINER + "packing") or length is None:
        return KeyResult(remark=TOKENS)
    return KeyResult({"data.max_tokens": value * length}, "samples of seq_length tokens")


def _model_engine(value: list, given: Mapping) -> KeyResult:
    if {"policy", "policy_trainer"} <= set(value):
        return KeyResult({"rollout.engine": "colocated"}, "fsdp2x's own, in the trainers' processes")
    return KeyResult({"rollout.engine": given.get(_RUN + "rollout_backend", "vllm")}, "rollout_backend")


def _model_backend(value: str, given: Mapping) -> KeyResult:
    if {"policy", "policy_trainer"} <= set(given.get(_RUN + "colocation", ())):
        return KeyResult(remark="a colocated engine is fsdp2x's own")
    return KeyResult({"rollout.engine": value})


_OTHER = ("trainable", "ulysses_sequence_parallel_size")
_NESTED = {key: row for key, row in NESTED_ROWS.items() if not key.endswith(_OTHER) or key.startswith(_POLICY)}
MODEL_ROWS = table({"": {
    **_NESTED,
    **of_reference({key: row for key, row in _NESTED.items() if key.startswith(_FROZEN)}),
    _FROZEN + "load": reference_path(_TRAINER + "load", lambda given: given.get(_TRAINER + "kl_coef")),
    _TRAINER + "trainable": only(True, "it is trained", "the policy is trained; write True"),
    _FROZEN + "trainable": only(False, "it is only asked", "the reference is only asked; write False"),
    _TRAINER + "ulysses_sequence_parallel_size": only(1, "whole sequences", ONE_SEQUENCE),
    _FROZEN + "ulysses_sequence_parallel_size": only(1, "whole sequences", ONE_SEQUENCE),
    _TRAINER + "packing": acts_on(_RUN + "train_micro_batch_size"),
    **no_effect(TOKENS, _TRAINER + "generation_batch_size"),
    **no_effect(MEMORY, *(key for key in NESTED_ROWS if ".free_gpu_memory." in key)),
    _TRAINER + "pos_clip_ratio": "algorithm.clip_high",
    _TRAINER + "neg_clip_ratio": "algorithm.clip_low",
    **no_effect("losses have no further bound; algorithm.dual_clip is one", _TRAINER + "diff_clip_ratio",
                _TRAINER + "final_clip_ratio"),
    _TRAINER + "entropy_coef": "algorithm.entropy_weight",
    _TRAINER + "kl_coef": "algorithm.kl_weight",
    _POLICY + "num_inference_per_prompt": "rollout.group_size",
    _POLICY + "seq_length": becomes("rollout.max_tokens", remark="of a response; there it counts the prompt as well"),
    _POLICY + "temperature": "rollout.temperature",
    _POLICY + "top_p": "rollout.top_p",
    _POLICY + "top_k": becomes("rollout.top_k", by={-1: 0}),
    _POLICY + "eval_temperature": "rollout.eval_temperature",
    **no_effect(EVALUATION, _POLICY + "eval_top_p", _POLICY + "eval_top_k"),
    _POLICY + "vllm_prompt_key": "data.prompt_column",
    **no_effect("the tokenizer's chat template has its own default", _POLICY + "enable_thinking"),
    **no_effect("rewards are functions in the trainers' processes", *(
        key for key in NESTED_ROWS if key.startswith("models.reward.")
    )),
    _RUN + "colocation": becomes("rollout.engine", by=_model_engine, kind=list[str], note="; of both: colocated"),
    _RUN + "rollout_backend": becomes("rollout.engine", by=_model_backend, kind=Literal["vllm", "sglang"]),
    **no_effect("prompts are shuffled each epoch, and responses are used once", _RUN + "data_rerank",
                _RUN + "max_replay_episode"),
    _RUN + "eval_data_path": "data.validation_files",
    _RUN + "num_episode": becomes("train.steps", kind=int),
    _RUN + "sample_per_episode": becomes(
        "train.global_batch_size", by=_episode_prompts, kind=int, note=" = it / num_inference_per_prompt"
    ),
    _RUN + "train_global_batch_size": becomes(
        "algorithm.minibatches", by=_episode_parts, note=" = sample_per_episode / it"
    ),
    _RUN + "train_micro_batch_size": becomes(
        "data.max_tokens", by=_model_tokens, kind=int, note=" = it * seq_length, without packing"
    ),
    _RUN + "save_episode_interval": "checkpoint.save_every",
    _RUN + "eval_episode_interval": "train.eval_every",
}}, KINDS)  # fmt: skip


def _read_models(settings: Mapping, role: str | None) -> list[ForeignKey]:
    no_role(role, MODELS.title)
    return [leaf for key, value in settings.items() for leaf in leaves(key, key, value, MODEL_ROWS)]


def _finish_models(found: Translation, ours: Mapping[str, Any]) -> None:
    found.imply("(precision)", "parallel.param_dtype", "bfloat16", "of computation; parameters are float32")
    found.imply("(precision)", "parallel.reduce_dtype", "float32", "of sums of gradients")
    found.imply("(schedule)", "schedule.kind", "constant", "the rate stays what it is")
    found.imply("(data)", "data.apply_chat_template", True, "prompts are messages there")
    if _RUN + "colocation" not in found.given:
        found.imply("(engine)", "rollout.engine", "vllm", "policy and trainer are not in colocation")
    imply_all(found, ours, "k3")


MODELS = Dialect(
    "models",
    "models.* and runtime_args.*",
    MODEL_ROWS,
    lambda key, _: key in ("models", "runtime_args"),
    _read_models,
    _finish_models,
)

DIALECTS: tuple[Dialect, ...] = (ROLES, MODELS, FLAGS)
