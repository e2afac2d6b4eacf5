"""Settings of ``grpo_toy.py`` out of a YAML file: its own names, or those of three other trainers of policies.

    by role        actor_train, actor_infer and reference, each with its blocks (``fsdp2x.train``'s), keys of a pipeline
    by model       models.policy_trainer, models.policy, models.ref_policy and runtime_args
    flags          names of a command line without their dashes; words behind ``--`` are such a line as well

A table says what each key becomes, or why it has no effect here. What blocks say about training is read by the tables
of ``fsdp2x.train`` and reaches the loop as far as that has a place for it. Unknown keys, values of the wrong type and
what would train something else than the file says are errors.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from grpo_loop import Settings

from fsdp2x.train.config import ConfigError
from fsdp2x.train.dialects import CONFIG, NESTED_ROWS, STRATEGY_ROWS
from fsdp2x.train.parse import apply_overrides, read_yaml, show
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

KINDS = {**typing.get_type_hints(Settings), "processes": int, "out": str}
OUR_POLICY = "the policy is a small one of this program"
OUR_TASK = "prompts, responses and rewards are those of sorting digits"
ONE_UPDATE = "one update of all samples of a step, in packed rows"
ENGINE = "it belongs to the engine, which is started here"

# What settings of `fsdp2x.train` are in this loop, for the policy and for the frozen reference.
OF_POLICY = {
    "optimizer.lr": "lr", "optimizer.weight_decay": "weight_decay", "optimizer.betas": "betas", "optimizer.eps": "eps",
    "train.clip": "max_grad_norm", "parallel.fsdp_size": "fsdp_size", "parallel.param_dtype": "param_dtype",
    "parallel.reduce_dtype": "reduce_dtype", "parallel.reshard_after_forward": "reshard_after_forward",
    "parallel.world_size": "processes", "train.seed": "seed", "logging.output": "out", "train.steps": "steps",
    "data.max_tokens": "max_tokens",
}  # fmt: skip
OF_REFERENCE = {
    "parallel.fsdp_size": "reference_fsdp_size",
    "parallel.param_dtype": "reference_dtype",
    "model.dtype": "reference_dtype",
}
# What else there may be has no effect, and why, but for these values alone.
WITHOUT = {
    "model": OUR_POLICY, "lora": OUR_POLICY, "data": OUR_TASK, "schedule": "the learning rate stays what it is",
    "checkpoint": "nothing is saved", "logging": "metrics go to the output folder", "train": ONE_UPDATE,
    "parallel": "ranks are processes of this host", "optimizer": ONE_UPDATE,
    "train.activation_checkpointing": "a small policy keeps its activations",
}  # fmt: skip
HARMLESS = {"lora.rank": 0, "parallel.sequence_parallel": 1, "parallel.expert_parallel": 1, "parallel.offload": False}


def _in_loop(row: Row, prefix: str, fields: Mapping[str, str]) -> Row:
    """A row of `fsdp2x.train` as one of this loop."""

    def by(value: Any, given: Mapping[str, Any]) -> KeyResult:
        inner = {**given, **{key.removeprefix(prefix): one for key, one in given.items() if key.startswith(prefix)}}
        try:
            found = row.apply("", value, inner)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix(": ")) from None
        for path, setting in found.became.items():
            if setting != HARMLESS.get(path, setting):
                raise ConfigError(f"got {show(value)}; this loop has only {path}={show(HARMLESS[path])}")
        became = {fields[path]: setting for path, setting in found.became.items() if path in fields}
        left = next((path for path in found.became if path not in fields), None)
        if became or left is None:
            return KeyResult({key: _without_none(key, one) for key, one in became.items()}, found.remark, found.used)
        if fields is OF_REFERENCE:
            return KeyResult(remark="the reference is only asked, and its rows are those of the policy")
        return KeyResult(remark=WITHOUT.get(left) or WITHOUT[left.partition(".")[0]])

    known = ", ".join(fields[path] for path in row.to if path in fields)
    return Row(by=by, kind=row.kind, note=f"-> {known}" if known else "", remark=OUR_POLICY)


def _without_none(field: str, value: Any) -> Any:
    return 0.0 if field == "max_grad_norm" and value is None else value


def _rows(rows: Mapping[str, Row], prefix: str, fields: Mapping[str, str], start: str = "") -> dict[str, Row]:
    """Those whose keys begin with `start`, under `prefix`."""
    return {
        f"{prefix}{key.removeprefix(start)}": _in_loop(row, prefix, fields)
        for key, row in rows.items()
        if key.startswith(start)
    }


# ---- by role

_ENGINES = {"vllm": "vllm", "hf_infer": "rollout"}
_KL_KINDS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
_GROUP = only("grpo", "advantages are those of a group", 'this loop has the advantages of GRPO; write "grpo"')


def _engine(value: str, _: Mapping) -> str:
    if value not in _ENGINES:
        raise ConfigError(f"got {value!r}, expected one of {', '.join(_ENGINES)}: other engines are not started here")
    return _ENGINES[value]


def _weight_if(switch: str):
    def by(value: float, given: Mapping) -> Any:
        return value if given.get(switch) else KeyResult({"kl_weight": 0.0}, f"{switch} is not on")

    return by


def _switch(weight: str):
    def by(value: bool, given: Mapping) -> KeyResult:
        if value and weight not in given:
            return KeyResult(remark=f"with the KL's own weight, as {weight} is not given", used=True)
        return KeyResult(remark=f"{weight} says how much", used=True) if value else KeyResult({"kl_weight": 0.0})

    return Row(by=by, kind=bool, note="-> kl_weight = 0 when off")


def _shares_devices(value: Any, given: Mapping) -> KeyResult:
    """Engine and trainer are colocated where their devices are the same."""
    mine, theirs = str(value), given.get("actor_train.device_mapping")
    return KeyResult(
        {"colocate": theirs is not None and str(theirs) == mine}, "whether the trainer has the same devices"
    )


def _one_ahead(value: float, _: Mapping) -> bool:
    if value not in (0, 1):
        raise ConfigError(f"got {show(value)}; the engine is in turns (0) or one step ahead (1) here")
    return bool(value)


_ACTOR = _rows(STRATEGY_ROWS, "actor_train.", OF_POLICY)
_REFERENCE = _rows(STRATEGY_ROWS, "reference.", OF_REFERENCE)
BY_ROLE_KEYS = table({"": {
    **_ACTOR,
    **_REFERENCE,
    "actor_train.strategy_args.strategy_name": only("fsdp2_train", "it is trained", "write fsdp2_train"),
    "reference.strategy_args.strategy_name": only("fsdp2_infer", "it is only asked", "write fsdp2_infer"),
    **{key: _in_loop(STRATEGY_ROWS[key], "", OF_POLICY) for key in ("pretrain", "seed", "output_dir", "exp_name")},
    "actor_infer.strategy_args.strategy_name": becomes("engine", by=_engine, kind=str),
    "actor_infer.strategy_args.strategy_config": Row(remark=ENGINE),
    "actor_infer.model_args": Row(remark=OUR_POLICY),
    "actor_infer.device_mapping": becomes("colocate", by=_shares_devices, kind=Any),
    "actor_infer.infer_batch_size": Row(remark=ENGINE),
    "actor_infer.generating_args.temperature": "temperature",
    "actor_infer.generating_args.top_p": only(1.0, "nothing is cut off", "whole distributions are drawn from"),
    "actor_infer.generating_args.top_k": only(-1, "nothing is cut off", "whole distributions are drawn from"),
    "actor_infer.generating_args.num_return_sequences": "samples",
    **no_effect(OUR_TASK, "actor_infer.generating_args.max_new_tokens", "actor_infer.generating_args.num_beams"),
    **no_effect(OUR_TASK, "rewards", "prompt_length", "response_length", "reward_clip", "validation", "eval_steps"),
    **no_effect("nothing is saved", "save_steps", "checkpoint_config", "logging_dir", "track_with", "tracker_kwargs"),
    "max_steps": "steps",
    "rollout_batch_size": "prompts",
    "num_return_sequences_in_group": "samples",
    "ppo_epochs": only(1, "samples are used once", ONE_UPDATE + "; set ppo_epochs: 1"),
    "adv_estimator": _GROUP,
    "use_kl_loss": _switch("kl_loss_coef"),
    "kl_loss_coef": becomes("kl_weight", by=_weight_if("use_kl_loss")),
    "entropy_loss_coef": "entropy_weight",
    "pg_clip": becomes("clip_low", "clip_high", kind=float),
    "async_generation_ratio": becomes("is_async", by=_one_ahead, kind=float),
}}, KINDS)  # fmt: skip
_ROLES = ("actor_train", "actor_infer", "reference")


def _read_roles(settings: Mapping, role: str | None) -> list[ForeignKey]:
    items = []
    for key, value in settings.items():
        blocks = value if key in _ROLES and isinstance(value, Mapping) else {"": value}
        for name, inner in blocks.items():
            shown = f"{key}.{name}" if name else key
            canonical = f"{key}.{CONFIG}" if name == "strategy_config" else shown
            items += leaves(canonical, shown, inner, BY_ROLE_KEYS)
    return items


# ---- by model

TRAINER, RUN = "models.policy_trainer.", "runtime_args."
_PER_PROMPT = "models.policy.num_inference_per_prompt"


def _prompts(value: int, given: Mapping) -> int:
    samples = given.get(_PER_PROMPT, Settings.samples)
    if value % samples:
        raise ConfigError(f"got {value}, which is not a multiple of {_PER_PROMPT}={samples}")
    return value // samples


def _whole_step(value: int, given: Mapping) -> KeyResult:
    whole = given.get(RUN + "sample_per_episode")
    if whole != value:
        raise ConfigError(f"got {value}; {ONE_UPDATE}: set it to sample_per_episode, {show(whole)}")
    return KeyResult(remark=ONE_UPDATE, used=True)


BY_MODEL_KEYS = table({"": {
    **_rows(NESTED_ROWS, TRAINER, OF_POLICY, TRAINER),
    **_rows(NESTED_ROWS, "models.ref_policy.", OF_REFERENCE, "models.ref_policy."),
    **{key: row for key, row in NESTED_ROWS.items() if key.startswith(("models.policy.", "models.reward."))},
    **_rows(NESTED_ROWS, RUN, OF_POLICY, RUN),
    TRAINER + "pos_clip_ratio": "clip_high",
    TRAINER + "neg_clip_ratio": "clip_low",
    TRAINER + "entropy_coef": "entropy_weight",
    TRAINER + "kl_coef": "kl_weight",
    "models.policy.num_inference_per_prompt": "samples",
    "models.policy.temperature": "temperature",
    "models.policy.top_p": only(1.0, "nothing is cut off", "whole distributions are drawn from"),
    RUN + "colocation": becomes(
        "colocate", by=lambda names, _: {"policy", "policy_trainer"} <= set(names), kind=list[str], note=" of both"
    ),
    RUN + "num_episode": "steps",
    RUN + "sample_per_episode": becomes("prompts", by=_prompts, note=" = it / num_inference_per_prompt", kind=int),
    RUN + "train_global_batch_size": Row(by=_whole_step, kind=int, note="all samples of an episode only"),
}}, KINDS)  # fmt: skip


def _read_models(settings: Mapping, role: str | None) -> list[ForeignKey]:
    return [leaf for key, value in settings.items() for leaf in leaves(key, key, value, BY_MODEL_KEYS)]


# ---- flags


def _ranks(_: int, given: Mapping) -> int:
    return given.get("actor_num_nodes", 1) * given.get("actor_num_gpus_per_node", 8)


def _clip_low(value: float, given: Mapping) -> KeyResult:
    return KeyResult({"clip_low": value} | ({} if "eps_clip_high" in given else {"clip_high": value}))


def _whole_rollout(value: int, given: Mapping) -> KeyResult:
    whole = given.get("rollout_batch_size", 0) * given.get("n_samples_per_prompt", 1)
    if value != whole:
        raise ConfigError(
            f"got {value}; {ONE_UPDATE}: set it to {whole}, rollout_batch_size times n_samples_per_prompt"
        )
    return KeyResult(remark=ONE_UPDATE, used=True)


def _betas(_: float, given: Mapping) -> list[float]:
    return [given.get("adam_beta1", Settings.betas[0]), given.get("adam_beta2", Settings.betas[1])]


FLAG_KEYS = table({"": {
    "actor_num_nodes": becomes("processes", by=_ranks, note=" = nodes * actor_num_gpus_per_node", kind=int),
    "actor_num_gpus_per_node": becomes("processes", by=_ranks, note=" = actor_num_nodes * GPUs", kind=int),
    **no_effect("there is one engine", "rollout_num_gpus", "rollout_num_gpus_per_engine", "num_gpus_per_node"),
    "colocate": "colocate",
    "train_async": becomes("is_async", remark="the script of that name", kind=bool),
    "train_backend": only("fsdp", "the only one", "only fsdp is trained here"),
    "slime_backend": only("fsdp", "the only one", "only fsdp is trained here"),
    "fsdp_full_params": Row(remark="weights go out whole by buckets in any case"),
    "update_weights_bucket_size": "bucket_bytes",
    "update_weight_buffer_size": "bucket_bytes",
    **no_effect(OUR_POLICY, "hf_checkpoint", "ref_load", "gradient_checkpointing", "attn_implementation"),
    **no_effect("nothing is saved", "load", "save", "save_interval", "use_wandb", "wandb_project", "wandb_group"),
    **no_effect(
        OUR_TASK,
        "prompt_data",
        "input_key",
        "label_key",
        "apply_chat_template",
        "rollout_shuffle",
        "rm_type",
        "rollout_max_response_len",
        "eval_prompt_data",
        "eval_interval",
        "n_samples_per_eval_prompt",
        "eval_max_response_len",
        "eval_top_p",
    ),  # fmt: skip
    **no_effect(
        ENGINE,
        "sglang_log_level",
        "sglang_decode_log_interval",
        "sglang_mem_fraction_static",
        "sglang_server_concurrency",
    ),
    "num_rollout": "steps",
    "rollout_batch_size": "prompts",
    "n_samples_per_prompt": "samples",
    "rollout_temperature": "temperature",
    "rollout_top_p": only(1.0, "nothing is cut off", "whole distributions are drawn from"),
    "global_batch_size": Row(by=_whole_rollout, kind=int, note="all samples of a rollout only"),
    "num_steps_per_rollout": only(1, "samples are used once", ONE_UPDATE + "; set it to 1"),
    "advantage_estimator": _GROUP,
    "use_kl_loss": _switch("kl_loss_coef"),
    "kl_loss_coef": becomes("kl_weight", by=_weight_if("use_kl_loss")),
    "kl_loss_type": becomes("kl", by=_KL_KINDS, kind=Literal[tuple(_KL_KINDS)]),
    "kl_coef": only(0.0, "rewards carry no KL", "rewards carry no KL here; use_kl_loss adds it to the loss"),
    "entropy_coef": "entropy_weight",
    "eps_clip": becomes("clip_low", by=_clip_low, note=", and clip_high without eps_clip_high", kind=float),
    "eps_clip_high": "clip_high",
    "use_tis": only(True, "asynchronous runs are corrected", "asynchronous runs are corrected in any case"),
    "tis_clip": "max_weight",
    "optimizer": only("adam", "AdamW", "this loop has AdamW; write adam"),
    "lr": "lr",
    "lr_decay_style": only(
        str, "constant", "it stays what it is", "the learning rate stays what it is; write constant"
    ),
    "weight_decay": "weight_decay",
    "adam_beta1": becomes("betas", by=_betas, note="[0]", kind=float),
    "adam_beta2": becomes("betas", by=_betas, note="[1]", kind=float),
    "adam_eps": "eps",
    "clip_grad": "max_grad_norm",
    "seed": "seed",
}}, KINDS)  # fmt: skip


def _read_flags(settings: Mapping, role: str | None) -> list[ForeignKey]:
    return [ForeignKey(str(key).replace("-", "_").lower(), str(key), value) for key, value in settings.items()]


def read_words(words: Iterable[str]) -> dict[str, Any]:
    """Words of a command line: a flag without a value is on."""
    found: dict[str, Any] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, _, value = word[2:].partition("=")
            found[flag] = True if not value else apply_overrides({}, [f"value={value}"])["value"]
        elif not flag:
            raise ConfigError(f"{word!r}: expected a flag such as --colocate before it")
        else:
            found[flag] = apply_overrides({}, [f"value={word}"])["value"]
    return found


# ---- all of them

OWN_KEYS = table({"": {name: name for name in KINDS}}, KINDS)

DIALECTS = (
    Dialect("own", "this program's own names", OWN_KEYS, lambda key, _: key in OWN_KEYS,
            lambda settings, _: [ForeignKey(str(key), str(key), value) for key, value in settings.items()]),
    Dialect("by role", "actor_train, actor_infer and reference", BY_ROLE_KEYS,
            lambda key, _: key in _ROLES or key in BY_ROLE_KEYS, _read_roles),
    Dialect("by model", "models.* and runtime_args.*", BY_MODEL_KEYS,
            lambda key, _: key in ("models", "runtime_args"), _read_models),
    Dialect("flags", "the flags", FLAG_KEYS, lambda key, _: key.replace("-", "_").lower() in FLAG_KEYS, _read_flags),
)  # fmt: skip


def translate(settings: Mapping[str, Any]) -> Translation:
    """The settings of ``Settings``, ``processes`` and ``out``, and what became of each key.

    The dialect is the one that knows most keys of the top level.

    Raises:
        ConfigError: an unknown key (with the nearest one), a value of the wrong type, or one that cannot be had here.
    """
    dialect = max(DIALECTS, key=lambda one: sum(one.owns(str(key), value) for key, value in settings.items()))
    found = dialect.translate(settings, None, {})
    if found.settings.get("param_dtype", "float32") != "float32" and "tolerance" not in found.settings:
        # Trainers compute in 16 bits, engines in 32.
        found.settings["tolerance"] = LOOSE
    return found


LOOSE = 0.2


def read_config(path: str, overrides: Iterable[str]) -> Translation:
    """A YAML file, changed by ``key=value`` in its own dialect."""
    return translate(apply_overrides(read_yaml(path), overrides))
