"""The configuration of `fsdp2x grpo`: the sections of `fsdp2x train`, and those for sampling and rewards.

`train.steps` counts rollouts, and `train.global_batch_size` counts prompts of a rollout over all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fsdp2x.rl import losses
from fsdp2x.train.config import (
    COUNT,
    FRACTION,
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    Check,
    ConfigError,
    DataConfig,
    OptimizerConfig,
    Section,
    TrainConfig,
    setting,
)

T = TypeVar("T")
Engine = Literal["colocated", "server", "vllm", "sglang"]
Algorithm = Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "reinforce", "ppo"]
ABOVE_1 = Check("more than 1", lambda value: value > 1)
UP_TO_1 = Check("a fraction in (0, 1]", lambda value: 0 < value <= 1)

_LOSSES = {
    "grpo": losses.GRPO,
    "dapo": losses.DAPO,
    "dr_grpo": losses.DR_GRPO,
    "gspo": losses.GSPO,
    "cispo": losses.CISPO,
    "reinforce": losses.REINFORCE,
    "ppo": losses.PolicySettings(),
}


@dataclass(frozen=True)
class PromptSection(DataConfig):
    """Rows with a prompt each. Other columns are passed to the reward functions."""

    prompt_column: str = setting("prompt", "column of the prompt: text, or a list of messages")
    answer_column: str = setting("answer", "column that exact_match, contains, number and math_verify compare with")
    apply_chat_template: bool = setting(
        False, "turn a text prompt into a user's message; false: the model continues the text"
    )
    system: str | None = setting(None, "system message for every prompt that has none")
    max_prompt_tokens: int | None = setting(None, "skip prompts of more tokens", COUNT)

    def check(self) -> None:
        super().check()
        self.require("format", self.format != "text", "jsonl or parquet: a prompt is a row with columns")

    @property
    def packs(self) -> bool:
        return True

    def check_budget(self) -> None:
        """Accepts any length: a prompt and its response may be longer than a block. The step checks the budget."""

    def require(self, name: str, condition: bool, expected: str) -> None:
        if not condition:
            raise ConfigError(f"data.{name}: got {getattr(self, name)!r}, expected {expected}")


@dataclass(frozen=True)
class OptimizerSection(OptimizerConfig):
    """Settings of the optimizer. Tuning from rewards needs smaller steps than training on text."""

    lr: float = setting(1e-6, "peak learning rate", POSITIVE)


@dataclass(frozen=True)
class RolloutSection(Section):
    """The engine that samples responses, and its settings."""

    engine: Engine = setting(
        "colocated",
        "colocated: each rank samples in its own process while its trainer's memory is freed; server: fsdp2x rollout "
        "processes; vllm, sglang: a server at rollout.addresses",
    )
    addresses: list[str] = setting(
        [], "running engines: @NAME or sockets for server, a URL for vllm and sglang; unset: server starts its own"
    )
    num_engines: int = setting(1, "fsdp2x rollout processes to start, with engine=server and no addresses", COUNT)
    group_size: int = setting(8, "responses to each prompt", COUNT)
    max_tokens: int = setting(256, "most tokens of a response", COUNT)
    temperature: float = setting(1.0, "divisor of the logits, before log-probabilities", POSITIVE)
    top_p: float = setting(1.0, "draw from the most likely tokens that together have this probability", UP_TO_1)
    top_k: int = setting(0, "draw from this number of most likely tokens; 0: from all", NOT_NEGATIVE)
    stop_ids: list[int] | None = setting(
        None, "tokens that end a response; unset: those of the generation config, else the tokenizer's end of sequence"
    )
    ahead: Literal[0, 1] = setting(
        0, "1: draw responses for the next step while this one is trained, with weights one version older"
    )
    eval_temperature: float = setting(0.0, "temperature in evaluation; 0 takes the most likely tokens", NOT_NEGATIVE)
    log_samples: int = setting(2, "responses of rank 0 to write to samples.jsonl at each logged step", NOT_NEGATIVE)
    push: Literal["auto", "merged", "adapter"] = setting(
        "auto",
        "with lora.rank: full merged weights, or only the adapter for engines that hold the base; auto: adapter for "
        "colocated, and for server with model.path",
    )
    bucket_mib: int = setting(64, "size of a bucket when weights are pushed, in MiB", COUNT)
    tolerance: float | None = setting(
        None,
        "largest difference of log-probabilities between trainer and engine before the run ends; unset: only logged",
        POSITIVE,
    )
    timeout_s: float = setting(
        300.0, "seconds that an engine has for an answer or a push; less than parallel.timeout_s", POSITIVE
    )

    def check(self) -> None:
        served = self.engine in ("vllm", "sglang")
        self.require("addresses", len(self.addresses) == 1 or not served, f"one URL of a running {self.engine} server")
        self.require("addresses", not self.addresses or self.engine != "colocated", "none with engine=colocated")
        started = self.engine == "server" and not self.addresses
        self.require("num_engines", self.num_engines == 1 or started, "1, or engine=server without addresses")
        self.require("ahead", not self.ahead or self.engine != "colocated", "0: a colocated engine has no other time")
        self.require("top_p", self.top_p == 1 or self.engine != "sglang", "1 with sglang")


@dataclass(frozen=True)
class RewardSection(Section):
    """The reward of a response: a weighted sum of functions."""

    functions: list[Any] = setting(
        [],
        "names, FILE.py:FUNCTION, or mappings with name, weight and options; built in: exact_match, contains, regex, "
        "number, length, math_verify",
    )
    clip: float | None = setting(None, "rewards are cut to [-clip, clip]", POSITIVE)
    correct: float = setting(1.0, "pass@k counts responses of at least this reward as correct")

    def check(self) -> None:
        self.require("functions", bool(self.functions), "at least one reward, such as [exact_match]")


@dataclass(frozen=True)
class AlgorithmSection(Section):
    """Advantages and the loss; formulas and sources are in `fsdp2x.rl.losses`."""

    name: Algorithm = setting("grpo", "ppo: with a critic; the others compare the responses to one prompt")
    clip_low: float | None = setting(None, "distance the ratio may fall below 1; unset: the algorithm's", FRACTION)
    clip_high: float | None = setting(None, "distance the ratio may rise above 1; unset: the algorithm's", NOT_NEGATIVE)
    dual_clip: float | None = setting(None, "bound of the loss of tokens with a negative advantage", ABOVE_1)
    mean: Literal["tokens", "samples", "constant"] | None = setting(
        None, "items over which the loss is a mean; unset: the algorithm's"
    )
    advantage_scale: Literal["std", "batch", "none"] | None = setting(
        None, "divisor of group advantages; unset: std, for dr_grpo none"
    )
    kl: Literal["k1", "k2", "k3", "k3+"] = setting("k3+", "estimate of the KL to the reference model")
    kl_weight: float = setting(0.0, "weight of the KL in the loss; 0: there is no reference model", NOT_NEGATIVE)
    kl_end: float | None = setting(
        None, "weight of the KL at the last step, with a linear change from kl_weight; unset: constant", NOT_NEGATIVE
    )
    entropy_weight: float = setting(0.0, "weight of the entropy, which is subtracted from the loss")
    epochs: int = setting(1, "passes over the responses of a rollout", COUNT)
    minibatches: int = setting(1, "optimizer steps of a pass", COUNT)
    max_weight: float | None = setting(
        None,
        "upper bound of the importance weights that correct for the engine's probabilities (truncated importance "
        "sampling); unset: 2 with rollout.ahead, else no weights",
        POSITIVE,
    )
    dynamic_sampling: int = setting(
        0, "rounds of further prompts to replace groups whose rewards are all equal (DAPO); 0: keep such groups",
        NOT_NEGATIVE,
    )  # fmt: skip
    gamma: float = setting(1.0, "ppo: discount of later rewards", UP_TO_1)
    gae_lambda: float = setting(0.95, "ppo: decay of generalized advantage estimation", FRACTION)
    value_clip: float = setting(0.2, "ppo: distance a value may move before its loss is clipped", POSITIVE)
    critic_lr: float = setting(1e-5, "ppo: learning rate of the critic", POSITIVE)
    critic_warmup: int = setting(0, "ppo: steps in which only the critic is trained", NOT_NEGATIVE)

    def check(self) -> None:
        has_kl = f"null, since algorithm.kl_weight is {self.kl_weight:g}"
        self.require("kl_end", self.kl_end is None or self.kl_weight > 0, has_kl)
        own = AlgorithmSection.__dataclass_fields__
        for name in ("gamma", "gae_lambda", "value_clip", "critic_lr", "critic_warmup"):
            unset = getattr(self, name) == own[name].default
            self.require(name, unset or self.name == "ppo", f"{own[name].default}, since algorithm.name is {self.name}")
        grouped = "null, since ppo has the advantages of a critic"
        self.require("advantage_scale", self.advantage_scale is None or self.name != "ppo", grouped)

    def loss(self, max_tokens: int, kl_weight: float) -> losses.PolicySettings:
        """Returns the settings of `rl.policy_loss`, for responses of `max_tokens` and this step's `kl_weight`."""
        base = _LOSSES[self.name]
        low, high = base.clip
        return dataclasses.replace(
            base,
            clip=(_default(self.clip_low, low), _default(self.clip_high, high)),
            dual_clip=self.dual_clip,
            mean=_default(self.mean, base.mean),
            max_tokens=max_tokens,
            kl=self.kl if kl_weight else None,
            kl_weight=kl_weight,
            entropy_weight=self.entropy_weight,
        )

    @property
    def scale(self) -> Literal["std", "batch", "none"]:
        return self.advantage_scale or ("none" if self.name == "dr_grpo" else "std")


def _default(value: T | None, default: T) -> T:
    return default if value is None else value


@dataclass(frozen=True)
class EvaluationSection(Section):
    """Evaluation on held-out prompts, every `train.eval_every` steps."""

    samples: int = setting(1, "responses to each held-out prompt: pass@1 and pass@samples are reported", COUNT)


@dataclass(frozen=True)
class ReferenceSection(Section):
    """The frozen model of the KL. With LoRA it is the model without its adapters."""

    path: str | None = setting(None, "HuggingFace directory; unset: the policy's weights before training", PATH)
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "dtype of its parameters and computation")
    offload: bool = setting(False, "keep its shards in CPU memory while it is not used")


@dataclass(frozen=True)
class GrpoConfig(TrainConfig):
    """All settings of `fsdp2x grpo`, by section."""

    NEEDS = {
        "data.files": "data.files=FILES: rows of prompts",
        "reward.functions": "reward.functions=[NAME or FILE.py:FUNCTION]: the rewards of responses",
    }

    data: PromptSection
    optimizer: OptimizerSection = dataclasses.field(default_factory=OptimizerSection)
    rollout: RolloutSection = dataclasses.field(default_factory=RolloutSection)
    reward: RewardSection = dataclasses.field(default_factory=RewardSection)
    algorithm: AlgorithmSection = dataclasses.field(default_factory=AlgorithmSection)
    reference: ReferenceSection = dataclasses.field(default_factory=ReferenceSection)
    evaluation: EvaluationSection = dataclasses.field(default_factory=EvaluationSection)

    @staticmethod
    def describe_step(sections: Mapping[str, Any], per_rank: int, accumulation: int, num_readers: int) -> str:
        prompts, group = per_rank * accumulation * num_readers, sections["rollout"].group_size
        updates = sections["algorithm"].epochs * sections["algorithm"].minibatches
        return (
            f"a step: {prompts} prompts x {group} responses = {prompts * group} samples, in {updates} update(s) of the "
            "policy"
        )

    @property
    def engine_may_hold_base(self) -> bool:
        """Whether the engine can have the policy's base weights without a push."""
        starts = self.rollout.engine == "server" and not self.rollout.addresses
        return self.model.path is not None or not starts

    @property
    def pushes_adapter(self) -> bool:
        """Whether only the adapter is pushed."""
        if self.rollout.push != "auto":
            return self.rollout.push == "adapter"
        is_ours = self.rollout.engine in ("colocated", "server")
        return self.lora.rank > 0 and is_ours and self.engine_may_hold_base

    def __post_init__(self) -> None:
        super().__post_init__()
        for path, (given, why) in _REFUSED.items():
            if given(self):
                raise ConfigError(f"{path}: {why}")


# Settings of `fsdp2x train` without a meaning here: when they are set, and what to write instead.
_REFUSED: dict[str, tuple[Any, str]] = {
    "data.packing": (lambda c: c.data.packing, "responses are packed in any case; leave it out"),
    "data.columns": (lambda c: bool(c.data.columns), "set data.prompt_column and data.answer_column"),
    "data.streaming": (lambda c: c.data.streaming, "prompts are read when the run begins; leave it out"),
    "data.truncation": (
        lambda c: c.data.truncation != "error",
        "data.max_prompt_tokens leaves out prompts that are too long",
    ),
    "train.patience": (lambda c: c.train.patience is not None, "it counts held-out losses, and rewards are held out"),
    "data.max_bytes": (lambda c: c.data.max_bytes is not None, "prompts are rows; cut the file instead"),
    "data.block_size": (lambda c: c.data.block_size != 512, "set data.max_prompt_tokens and rollout.max_tokens"),
    "train.mode": (lambda c: c.train.mode != "train", "`fsdp2x train` evaluates; a policy is trained here"),
    "train.batch_size": (
        lambda c: c.train.batch_size is not None,
        "set train.global_batch_size, the prompts of a rollout over all ranks, and data.max_tokens, the budget of a "
        "micro-batch",
    ),
    "train.accumulation": (
        lambda c: c.train.accumulation is not None,
        "micro-batches follow from data.max_tokens, their budget of tokens",
    ),
    "train.eval_batch_size": (
        lambda c: c.train.eval_batch_size is not None or c.train.global_eval_batch_size is not None,
        "all held-out prompts are sampled at once; train.eval_blocks bounds their number",
    ),
    "parallel.sequence_parallel": (
        lambda c: c.parallel.sequence_ranks.total > 1,
        "sequences are not cut over ranks here; set it to 1",
    ),
    "scaler.enabled": (lambda c: bool(c.scaler.enabled), "losses are not scaled here; compute in bfloat16"),
    "parallel.param_dtype": (
        lambda c: "float16" in (c.parallel.param_dtype, c.model.dtype),
        "float16 needs a scaled loss, which is not supported here; use bfloat16",
    ),
    "reference.path": (
        lambda c: c.reference.path is not None and (c.lora.rank > 0 or not c.algorithm.kl_weight),
        "there is no reference model of its own with lora.rank, or without algorithm.kl_weight",
    ),
    "evaluation.samples": (
        lambda c: c.evaluation.samples > 1 and c.rollout.eval_temperature == 0,
        "several responses at rollout.eval_temperature=0 would all be the same; set a temperature",
    ),
    "rollout.push": (
        lambda c: c.rollout.push == "adapter" and (not c.lora.rank or not c.engine_may_hold_base),
        "adapter needs lora.rank, and an engine that holds the base: one that the run starts has it from model.path",
    ),
    "algorithm.dynamic_sampling": (
        lambda c: c.algorithm.dynamic_sampling > 0 and (c.algorithm.name == "ppo" or c.rollout.group_size == 1),
        "it needs groups of several responses, and an algorithm that compares them",
    ),
    "rollout.group_size": (
        lambda c: c.rollout.group_size == 1 and c.algorithm.name not in ("ppo", "reinforce"),
        "advantages compare the responses to a prompt: at least 2",
    ),
}
