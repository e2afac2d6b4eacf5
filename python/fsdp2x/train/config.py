"""Defines the typed training configuration: a pydantic model for each section, each field with its help text.

`parse.py` reads YAML and overrides, and `strategy.py` resolves settings that depend on the number of ranks.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fsdp2x.base.errors import ConfigError as ConfigError


class TrainingError(RuntimeError):
    """A run that cannot continue. The message names the step, and what may help."""


# Names of dtypes: `bf16` and `torch.bfloat16` are bfloat16 as well.
DTYPE = BeforeValidator(lambda value: _dtype_name(value) if isinstance(value, str) else value)
DType = Annotated[Literal["float32", "bfloat16", "float16"], DTYPE]
Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
# One text is a list of one. An empty path would mean the folder that the command runs in.
Names = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
Rate = Annotated[float, Field(ge=0, lt=1)]
# YAML 1.1 reads on and off as booleans.
ON_OFF = BeforeValidator(lambda value: {True: "on", False: "off"}[value] if isinstance(value, bool) else value)
AS_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Count = Annotated[int, Field(ge=1)]


class SequenceRanks(NamedTuple):
    """How many ranks share each sequence, by what they exchange: heads, or keys and values."""

    ulysses: int = 1
    context: int = 1

    @property
    def total(self) -> int:
        return self.ulysses * self.context

    def __str__(self) -> str:
        both = f" (Ulysses {self.ulysses} x context {self.context})" if self.context > 1 else ""
        return f"{self.total} ranks{both}"


def setting(default: Any, help: str, **limits: Any) -> Any:
    """Makes a field with a help text and pydantic's limits. null passes if a setting may be null."""
    return Field(default, description=help, **limits)


class Section(BaseModel):
    """One section of the configuration. It is immutable, converts no types, and has no other keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _take_null(cls, values: Any) -> Any:
        return {} if values is None else values  # a section of a YAML file without keys

    @model_validator(mode="after")
    def _checked(self) -> Section:
        self.check()
        return self

    def check(self) -> None:
        """Raises `ValueError` for settings that do not fit together."""

    def require(self, name: str, condition: bool, expected: str) -> None:
        section = type(self).__name__.removesuffix("Config").removesuffix("Section").lower()
        if not condition:
            raise ValueError(f"{section}.{name}: got {getattr(self, name)!r}, expected {expected}")


class ModelConfig(Section):
    """The model to train, from one of `config` and `path`."""

    config: dict | None = setting(
        None, "HuggingFace config as a mapping: model_type and its fields; weights are initialized from train.seed"
    )
    path: str | None = setting(
        None, "local HuggingFace directory with config.json and weights; nothing is ever downloaded", min_length=1
    )
    dtype: DType | Literal["auto"] = setting(
        "auto",
        "dtype of the parameters that the optimizer updates; auto: float32, but with lora.rank on a GPU the frozen "
        "ones have bfloat16 if their files have it, and the adapters float32",
    )
    attn_implementation: str | None = setting(
        None, "attention of transformers: eager, sdpa, ...; unset: the model's default"
    )
    load: Literal["auto", "whole", "rows"] = setting(
        "auto",
        "with model.path: every rank reads the full model, or only the rows of its shards; auto: rows, but whole with "
        "parallel.expert_parallel",
    )
    freeze: Names = setting([], "prefixes of parameter names that are not trained; one that matches none is an error")
    tiled_mlp: int = setting(
        0, "number of pieces of the sequence in which gated MLPs run, to save memory; 0: off", ge=0
    )
    expert_patch: bool = setting(False, "lets ranks without tokens run blocks of experts that are units of their own")
    grouped_gemm: bool = setting(False, "compute all experts of a layer in grouped matrix products")

    @property
    def missing(self) -> list[str]:
        needed = "model.path=FOLDER or model.config={model_type: ...}: the model"
        return [] if self.path or self.config else [needed]

    def check(self) -> None:
        self.require("load", self.load != "rows" or self.config is None, "whole: rows are read from model.path")
        if self.config and self.path is not None:
            raise ValueError("model: got both of model.config and model.path, expected one of them")
        self.require("config", "model_type" in (self.config or {"model_type"}), "a mapping with the key model_type")


class LoraConfig(Section):
    """Low-rank adapters; on when `rank` is positive."""

    rank: int = setting(0, "rank of the adapters; 0 trains the model itself", ge=0)
    alpha: float = setting(16.0, "scale of the adapters: their output is multiplied by alpha / rank")
    dropout: float = setting(0.0, "dropout before the adapters", ge=0, lt=1)
    target_modules: Names = setting(["all-linear"], "names of the modules that get adapters")


class DataConfig(Section):
    files: Names = setting([], "text files, folders (read recursively) or globs")
    validation_files: Names = setting([], "files for evaluation, as data.files; they replace held_out")
    pattern: Names = setting(
        [], "name patterns such as '*.py' that a file must match one of; applies to folders and globs"
    )
    exclude: Names = setting([], "name patterns; a file is skipped if a part of its path matches one")
    max_bytes: int | None = setting(
        None, "stop reading after this many bytes of text (files in order of a seeded shuffle)", gt=0
    )
    tokenizer: str | None = setting(
        None,
        "'bytes' or a local directory with a HuggingFace tokenizer, which adds bos if it does so by default; unset: "
        "that of model.path, else bytes",
        min_length=1,
    )
    block_size: int = setting(512, "tokens per training example; with packing, the most tokens of one", ge=2)
    held_out: float | None = setting(
        None,
        "fraction of the examples kept for evaluation; whole text files as far as possible; unset: 0.05 if the run "
        "evaluates, else 0",
        ge=0,
        lt=1,
    )
    shuffle: bool = setting(True, "visit the blocks in a new seeded order every epoch")
    packing: bool = setting(
        False,
        "each line of text is a sample, and samples are packed by data.max_tokens without seeing each other; false "
        "cuts text into blocks",
    )
    max_tokens: int | None = setting(None, "with packing: most tokens of a rank's micro-batch; unset: block_size")

    def check(self) -> None:
        longest = f"at least data.block_size={self.block_size}, the longest sample, or null"
        self.require("max_tokens", self.max_tokens is None or self.max_tokens >= self.block_size, longest)


class OptimizerConfig(Section):
    name: Literal["adamw", "muon", "sgd"] = setting(
        "adamw", "optimizer; muon: for matrices, with AdamW for embeddings, the output head and fewer dims"
    )
    lr: float = setting(3e-4, "peak learning rate", gt=0)
    adamw_lr: float | None = setting(None, "with muon, peak learning rate of AdamW's parameters; unset: lr", gt=0)
    betas: Annotated[tuple[Rate, Rate], AS_TUPLE] = setting((0.9, 0.95), "decay rates of AdamW's two moments")
    eps: float = setting(1e-8, "AdamW's epsilon", gt=0)
    implementation: Literal["fsdp2x", "foreach", "fused", "for_loop"] = setting(
        "fsdp2x", "of adamw: the engine's step, or a way of torch.optim.AdamW over local shards"
    )
    weight_decay: float = setting(0.1, "decay of parameters with two or more dims; norms and biases get none", ge=0)
    momentum: float | None = setting(None, "momentum of sgd (unset: 0) and of muon (unset: 0.95)", ge=0, lt=1)
    muon_split: Literal["blocks", "heads", "none"] = setting(
        "blocks", "what muon orthogonalizes alone: each matrix that a parameter fuses, also each head, or the parameter"
    )
    muon_ns_method: Literal["standard", "gram"] = setting(
        "standard", "muon's Newton-Schulz iteration; gram: on the Gram matrix, faster where a matrix is not square"
    )
    muon_ns_dtype: Literal["auto", "bfloat16", "float32"] = setting(
        "auto", "dtype of that iteration; auto: bfloat16, or float32 if a rank's CPU has no fast bfloat16 arithmetic"
    )
    moments_dtype: Annotated[Literal["float32", "bfloat16", "int8"], DTYPE] | None = setting(
        None,
        "dtype of AdamW's moments, also with muon: int8 takes a quarter of float32; unset: that of the parameters",
    )
    stochastic_rounding: bool = setting(
        False, "with moments_dtype: round values that are stored in fewer bits up or down at random, unbiased"
    )

    @property
    def planned_name(self) -> str:
        """The name for `plan_memory`."""
        if self.name == "sgd":
            return "sgd_momentum" if self.momentum else "sgd"
        return self.name if self.moments_dtype is None else f"{self.name}_{self.moments_dtype}"

    def check(self) -> None:
        name, coded = self.name, self.moments_dtype is not None
        unrounded = "false, since optimizer.moments_dtype is null and nothing is rounded"
        ours = self.implementation == "fsdp2x"
        self.require("implementation", ours or name == "adamw", f"fsdp2x, since optimizer.name is {name}")
        torchs = f"null, since optimizer.implementation={self.implementation} keeps torch's moments"
        self.require("moments_dtype", ours or not coded, torchs)
        self.require("adamw_lr", self.adamw_lr is None or name == "muon", f"null, since optimizer.name is {name}")
        self.require("momentum", not self.momentum or name in ("sgd", "muon"), f"0, since optimizer.name is {name}")
        self.require("moments_dtype", not coded or name in ("adamw", "muon"), f"null, since optimizer.name is {name}")
        self.require("stochastic_rounding", coded or not self.stochastic_rounding, unrounded)


class ScheduleConfig(Section):
    """The learning rate over time. `schedule.lr_factor` has the formulas."""

    kind: Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"] = setting(
        "cosine", "shape of the learning rate after the warm-up; wsd: stable, then a linear decay over wsd_decay_steps"
    )
    warmup_steps: int = setting(0, "steps over which the rate rises linearly to its peak", ge=0)
    warmup_ratio: float = setting(
        0.0, "the same as a fraction of the run's steps; used when warmup_steps is 0", ge=0, le=1
    )
    decay_steps: int | None = setting(None, "step at which the lowest rate is reached; unset: the run's last", gt=0)
    min_lr_ratio: float = setting(0.1, "lowest rate as a fraction of the peak", ge=0, le=1)
    min_lr: float | None = setting(None, "lowest rate itself; replaces min_lr_ratio", ge=0)
    wsd_decay_steps: int | None = setting(None, "length of wsd's decay; unset: a tenth of decay_steps", gt=0)


class ParallelConfig(Section):
    strategy: Strategy | None = setting(
        None, "mesh and resharding by name; unset: from fsdp_size and reshard_after_forward (see strategy.py)"
    )
    fsdp_size: int | None = setting(
        None,
        "ranks of one shard group; more than one and fewer than all: replicas of such groups (HSDP), else all ranks",
    )
    sequence_parallel: Count | dict[Literal["ulysses", "context"], Count] = setting(
        1,
        "consecutive ranks that share each sequence by Ulysses, which exchanges heads; or {ulysses: 2, context: 2}: "
        "context parallelism gathers keys and values, for any number of heads; an error with the router's auxiliary "
        "loss (output_router_logits)",
    )
    expert_parallel: int = setting(1, "ranks over which the experts of a layer are spread", ge=1)
    expert_fsdp_size: int | None = setting(
        None, "ranks over which each expert is sharded; unset: the rest of the world", ge=1
    )
    world_size: int | None = setting(
        None, "number of ranks this config was written for; a different number only prints a note", ge=1
    )
    reshard_after_forward: bool | int | None = setting(
        None, "free the gathered parameters after forward; unset: the default of fully_shard"
    )
    param_dtype: DType | Literal["auto"] | None = setting(
        None,
        "compute dtype; unset: bfloat16 on GPUs that have it if model.dtype is float32, else model.dtype; auto: the "
        "same, but float16 on other GPUs",
    )
    reduce_dtype: DType | None = setting(
        None, "dtype in which gradients are summed; unset: that of the parameters, or param_dtype before torch 2.15"
    )
    auto_wrap: bool | Names | None = setting(
        None, "modules that form units: null for the model's own plan, or class names, or false"
    )
    expert_units: Names = setting([], "class names of modules that become separate units inside their layer")
    offload: bool | Literal["none", "optimizer", "gradients", "all"] = setting(
        False,
        "state that a GPU's rank keeps in CPU memory: optimizer: AdamW's moments; gradients: moments and gradients; "
        "all or true: shards as well",
    )
    accumulate: Literal["nothing", "reduce_scatter"] = setting(
        "nothing", "communication of backwards before a step's last one; reduce_scatter takes less memory"
    )
    transport: Literal["auto", "shm", "process_group"] = setting(
        "auto", "how shards and gradients travel between ranks"
    )
    wire_weights: Literal["int8", "fp8"] | None = setting(
        None, "dtype in which weights are gathered over a process group; unset: the compute dtype"
    )
    wire_gradients: Annotated[Literal["int8", "bfloat16"], DTYPE] | None = setting(
        None, "the same for gradients, summed in float32; int8 keeps rounding errors, a byte for each parameter"
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where to train; auto takes CUDA when there is a GPU")
    timeout_s: float = setting(600.0, "seconds after which a rank that waits for another gives up", gt=0)

    @property
    def sequence_ranks(self) -> SequenceRanks:
        given = self.sequence_parallel
        return SequenceRanks(**given) if isinstance(given, dict) else SequenceRanks(ulysses=given)


class ScalerConfig(Section):
    """Scaling of the loss for float16 gradients. A step whose gradients overflow on any rank is skipped on all."""

    enabled: bool | None = setting(None, "unset: when parallel.param_dtype is float16")
    init_scale: float = setting(65536.0, "first scale", gt=0)
    growth_interval: int = setting(2000, "good steps in a row before the scale doubles; a skipped one halves it", ge=1)


class TrainSection(Section):
    mode: Literal["train", "evaluate"] = setting(
        "train", "evaluate: no gradients and no optimizer, the loss on held-out text (on all when held_out is 0)"
    )
    steps: int | None = setting(None, "optimizer steps in the whole run, counted from step 1; unset: by epochs", gt=0)
    epochs: int | None = setting(
        None, "passes over the training text; with steps, the shorter run counts; unset: 1, or by steps", gt=0
    )
    batch_size: int | None = setting(None, "blocks per rank and micro-batch; unset: 8, or from global_batch_size", gt=0)
    accumulation: int | None = setting(
        None, "micro-batches per optimizer step; unset: 1, or from global_batch_size and batch_size", gt=0
    )
    global_batch_size: int | None = setting(None, "blocks per optimizer step over all ranks; must divide evenly", gt=0)
    eval_batch_size: int | None = setting(None, "blocks per rank in evaluation; unset: as in training", gt=0)
    global_eval_batch_size: int | None = setting(None, "the same over all ranks; must divide evenly", gt=0)
    clip: float | None = setting(1.0, "largest norm of the full gradient; null: no clipping", gt=0)
    on_nonfinite: Literal["end", "skip"] = setting(
        "end", "a loss or gradient that is not finite: end the run and save nothing, or skip the step with a warning"
    )
    seed: int = setting(0, "seed of the weights, of the data order and of each rank's generators")
    eval_every: int = setting(0, "steps between evaluations on held-out text, also at the end; 0: never", ge=0)
    eval_blocks: int | None = setting(None, "most held-out blocks of an evaluation; unset: all", gt=0)
    activation_checkpointing: bool = setting(False, "recompute the activations of each block in backward")
    tiled_loss: bool | None = setting(
        None, "the loss from tiles of logits, never all of them; unset: on a GPU, if the model's head allows it"
    )
    compile: bool = setting(False, "torch.compile of each block")
    compile_backend: str = setting("inductor", "backend of torch.compile")
    deterministic: bool = setting(False, "deterministic algorithms only: two runs are bitwise equal")


class CheckpointConfig(Section):
    save_every: int = setting(0, "steps between saves; 0: by save_minutes, and at the end", ge=0)
    save_minutes: float = setting(
        30.0, "a run that saves at all also saves when its last save is so many minutes ago; 0: never", ge=0
    )
    save_last: bool = setting(True, "save after the last step")
    form: Literal["sharded", "full", "per_rank"] = setting(
        "sharded", "a DCP directory or one file, both for any number of ranks, or a file per rank for the same number"
    )
    async_save: bool = setting(False, "copy the shards and continue training while a thread writes them")
    keep: int = setting(2, "number of checkpoints that stay on disk in addition to those of keep_every", ge=1)
    keep_every: int = setting(0, "checkpoints at multiples of this many steps are never deleted; 0: none", ge=0)
    resume_from: str | None = setting(
        None, "a checkpoint, or a folder of checkpoints, whose latest is used", min_length=1
    )
    accept_changes: bool = setting(
        False, "resume also if model, adapter, tokenizer or packing differ from those of the checkpoint's run"
    )
    folder: str | None = setting(None, "folder of the checkpoints; unset: checkpoints/ in logging.output", min_length=1)

    @property
    def saves(self) -> bool:
        """Whether a training run saves at all."""
        return self.save_last or self.save_every > 0


class LoggingConfig(Section):
    output: str = setting("out/run", "folder of this run: metrics.jsonl, tensorboard/, checkpoints/", min_length=1)
    every: int = setting(1, "steps between log lines", ge=1)
    tensorboard: bool = setting(False, "also write TensorBoard events")
    tensorboard_dir: str | None = setting(None, "folder of the events; unset: tensorboard/ in output", min_length=1)
    wandb: bool = setting(False, "also log to Weights & Biases; needs the package wandb")
    wandb_options: dict = setting({}, "arguments of wandb.init: project, name, dir, id, resume, mode, ...")
    progress: Annotated[Literal["auto", "on", "off"], ON_OFF] = setting(
        "auto", "progress bar of rank 0; auto shows it on a terminal"
    )
    report: bool = setting(False, "list every parameter with its placement, global and local shape")
    memory_snapshot: int | None = setting(
        None,
        "step after which to write memory/: on GPUs torch's snapshot of allocations, on CPUs planned and real bytes",
        ge=1,
    )
    profile_start: int | None = setting(None, "first step of the window that fsdp2x.profile records in profile/", ge=1)
    profile_end: int | None = setting(None, "last step of the window; unset: profile_start", ge=1)

    def check(self) -> None:
        first, last = self.profile_start, self.profile_end
        self.require(
            "tensorboard_dir", self.tensorboard or self.tensorboard_dir is None, "logging.tensorboard=true as well"
        )
        self.require("profile_end", last is None or first is not None, "logging.profile_start as well")
        self.require("profile_end", last is None or (first is not None and first <= last), f"{first} or more")


class TrainConfig(BaseModel):
    """All settings of `fsdp2x train`, by section. A run needs those that `missing` names in addition."""

    model_config = Section.model_config

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    scaler: ScalerConfig = ScalerConfig()
    train: TrainSection = TrainSection()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _check_offload(self) -> TrainConfig:
        optimizer, parallel = self.optimizer, self.parallel
        parallel.require(
            "offload",
            parallel.offload != "optimizer" or _keeps_state_on_host(optimizer),
            "gradients, all or none with this optimizer: AdamW of implementation fsdp2x alone keeps its state there",
        )
        parallel.require(
            "offload",
            parallel.offload in (False, "none") or parallel.expert_parallel == 1,
            "none with parallel.expert_parallel, whose experts stay on the device",
        )
        return self

    @property
    def missing(self) -> list[str]:
        return self.model.missing if self.data.files else [*self.model.missing, "data.files=FILES: the text"]


def _dtype_name(text: str) -> str:
    from fsdp2x.base.arguments import dtype_name  # it imports torch, which listing the keys does not need

    return dtype_name(text)


def _keeps_state_on_host(optimizer: OptimizerConfig) -> bool:
    from fsdp2x.api import may_be_on_host

    return may_be_on_host(optimizer.planned_name) and optimizer.implementation == "fsdp2x"


# ---- all keys

SECTIONS: dict[str, type[Section]] = {name: field.annotation for name, field in TrainConfig.model_fields.items()}  # type: ignore[misc]


class KnownKey(NamedTuple):
    type: str
    default: Any
    help: str


@functools.cache
def known_keys() -> dict[str, KnownKey]:
    """Returns every setting by its dotted path."""
    return {
        f"{section}.{name}": KnownKey(
            type_name(field.annotation, field.metadata),
            field.get_default(call_default_factory=True),
            field.description or "",
        )
        for section, cls in SECTIONS.items()
        for name, field in cls.model_fields.items()
    }


def list_keys() -> dict[str, dict[str, Any]]:
    """Returns the ``type``, ``default`` and ``help`` of all keys, by name."""
    return {key: known._asdict() for key, known in known_keys().items()}


def type_name(kind: Any, limits: Sequence[Any] = ()) -> str:
    """Returns the values that a setting takes, in words. `limits` are pydantic's metadata of a field."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return type_name(args[0], [limit for one in args[1:] for limit in getattr(one, "metadata", [])])
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(one, limits if one is not types.NoneType else ()) for one in args)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is dict:
        return f"mapping from {' to '.join(map(type_name, args))}"
    if origin in (list, tuple):
        return f"list of {len(args) if origin is tuple else ''} {type_name(args[0])}".replace("  ", " ")
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    said = [f"{word} {getattr(one, name)}" for one in limits for name, word in words.items() if hasattr(one, name)]
    text = {types.NoneType: "null", dict: "mapping"}.get(kind) or kind.__name__
    return " ".join(
        ["nonempty"] * any(hasattr(one, "min_length") for one in limits) + [text, " and ".join(said)]
    ).strip()
