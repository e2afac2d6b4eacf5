"""The typed training configuration: one frozen dataclass per section, each field with its help text.

Only names, types, defaults and checks of single values live here. Reading YAML, overrides and other spellings of
the same settings is `parse.py`'s job, so that a new spelling never touches these classes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


class ConfigError(ValueError):
    """A setting that cannot be used; the message names its dotted path, what was got and what is expected."""


DType = Literal["float32", "bfloat16", "float16"]


def setting(default: Any, help: str) -> Any:
    """A dataclass field with a help text; mutable defaults are copied per instance."""
    metadata = {"help": help}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def require(condition: bool, path: str, got: Any, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{path}: got {got!r}, expected {expected}")


@dataclass(frozen=True)
class ModelConfig:
    """Exactly one of `config` and `path` says which model is trained."""

    config: dict | None = setting(
        None, "HuggingFace config as a mapping: model_type and its fields; weights are initialised from train.seed"
    )
    path: str | None = setting(
        None, "local HuggingFace directory with config.json and weights; nothing is ever downloaded"
    )
    dtype: DType = setting("float32", "dtype of the parameters that the optimizer updates")
    attn_implementation: str | None = setting(
        None, "attention of transformers: eager, sdpa, ...; unset takes the model's own choice"
    )

    def __post_init__(self) -> None:
        if (self.config is None) == (self.path is None):
            got = "neither" if self.config is None else "both"
            raise ConfigError(f"model: got {got} of model.config and model.path, expected exactly one of them")
        if self.config is not None:
            require(
                "model_type" in self.config, "model.config", sorted(self.config), "a mapping with the key model_type"
            )


@dataclass(frozen=True)
class DataConfig:
    files: list[str] = setting([], "text files, folders (read recursively) or globs")
    pattern: list[str] = setting(
        [], "name patterns such as '*.py' that a file must match one of; applies to folders and globs"
    )
    exclude: list[str] = setting([], "name patterns; a file is left out when one of its path's parts matches")
    max_bytes: int | None = setting(
        None, "stop reading after so many bytes of text (files in order of a seeded shuffle)"
    )
    tokenizer: str = setting("bytes", "'bytes', or a local directory with a HuggingFace tokenizer")
    block_size: int = setting(512, "tokens per training example")
    held_out: float = setting(0.05, "fraction of the blocks kept for evaluation; whole files as far as possible")
    shuffle: bool = setting(True, "visit the blocks in a new seeded order every epoch")

    def __post_init__(self) -> None:
        require(len(self.files) > 0, "data.files", self.files, "at least one file, folder or glob")
        require(self.block_size >= 2, "data.block_size", self.block_size, "at least 2 tokens")
        require(0.0 <= self.held_out < 1.0, "data.held_out", self.held_out, "a fraction in [0, 1)")
        require(
            self.max_bytes is None or self.max_bytes > 0, "data.max_bytes", self.max_bytes, "a positive number or null"
        )


@dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["adamw"] = setting("adamw", "optimizer; adamw is torch.optim.AdamW")
    lr: float = setting(3e-4, "peak learning rate")
    betas: tuple[float, float] = setting((0.9, 0.95), "AdamW's decay rates of the two moments")
    eps: float = setting(1e-8, "AdamW's epsilon")
    weight_decay: float = setting(0.1, "decay of parameters with two or more dims; norms and biases get none")
    implementation: Literal["auto", "foreach", "fused", "for_loop"] = setting(
        "auto", "which of torch's loops updates the parameters"
    )

    def __post_init__(self) -> None:
        require(self.lr > 0, "optimizer.lr", self.lr, "a positive number")
        require(all(0 <= b < 1 for b in self.betas), "optimizer.betas", self.betas, "two numbers in [0, 1)")
        require(self.eps > 0, "optimizer.eps", self.eps, "a positive number")
        require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "zero or more")


@dataclass(frozen=True)
class ScheduleConfig:
    kind: Literal["cosine", "constant"] = setting("cosine", "shape of the learning rate after the warm-up")
    warmup_steps: int = setting(0, "steps over which the rate rises linearly to its peak")
    decay_steps: int | None = setting(None, "step at which the lowest rate is reached; unset means train.steps")
    min_lr_ratio: float = setting(0.1, "lowest rate as a fraction of the peak")

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, "schedule.warmup_steps", self.warmup_steps, "zero or more")
        require(
            self.decay_steps is None or self.decay_steps > 0,
            "schedule.decay_steps",
            self.decay_steps,
            "a positive number or null",
        )
        require(0 <= self.min_lr_ratio <= 1, "schedule.min_lr_ratio", self.min_lr_ratio, "a fraction in [0, 1]")


@dataclass(frozen=True)
class ParallelConfig:
    reshard_after_forward: bool | int | None = setting(
        None, "free the gathered parameters after forward; unset is fully_shard's own rule"
    )
    param_dtype: DType | None = setting(None, "dtype of computation; unset computes in model.dtype")
    reduce_dtype: DType | None = setting(
        None, "dtype in which gradients are summed; unset takes that of the parameters, param_dtype before torch 2.15"
    )
    auto_wrap: bool | list[str] | None = setting(
        None, "which modules form units: null by the model's own plan, or class names, or false"
    )
    transport: Literal["auto", "shm", "process_group"] = setting(
        "auto", "how shards and gradients travel between ranks"
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where to train; auto takes CUDA when there is a GPU")
    timeout_s: float = setting(600.0, "seconds after which a rank that waits for another gives up")

    def __post_init__(self) -> None:
        require(self.timeout_s > 0, "parallel.timeout_s", self.timeout_s, "a positive number of seconds")


@dataclass(frozen=True)
class TrainSection:
    steps: int = setting(1000, "optimizer steps in the whole run, counted from step 1")
    batch_size: int = setting(8, "blocks per rank and micro-batch")
    accumulation: int = setting(1, "micro-batches per optimizer step")
    clip: float | None = setting(1.0, "largest norm of the whole gradient; null does not clip")
    seed: int = setting(0, "seed of the weights, of the data order and of each rank's generators")
    eval_every: int = setting(0, "evaluate on held-out text every so many steps and at the end; 0 never")
    eval_blocks: int | None = setting(None, "evaluate on at most so many held-out blocks; unset takes all")
    activation_checkpointing: bool = setting(False, "recompute the activations of each block in backward")

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulation"):
            require(getattr(self, name) > 0, f"train.{name}", getattr(self, name), "a positive number")
        require(self.clip is None or self.clip > 0, "train.clip", self.clip, "a positive number or null")
        require(self.eval_every >= 0, "train.eval_every", self.eval_every, "zero or more")
        require(
            self.eval_blocks is None or self.eval_blocks > 0,
            "train.eval_blocks",
            self.eval_blocks,
            "a positive number or null",
        )


@dataclass(frozen=True)
class CheckpointConfig:
    save_every: int = setting(0, "save every so many steps; 0 saves only at the end")
    save_last: bool = setting(True, "save after the last step")
    keep: int = setting(2, "how many checkpoints stay on disk")
    resume_from: str | None = setting(None, "a checkpoint, or a folder of checkpoints whose latest one is taken")

    def __post_init__(self) -> None:
        require(self.save_every >= 0, "checkpoint.save_every", self.save_every, "zero or more")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")


@dataclass(frozen=True)
class LoggingConfig:
    output: str = setting("out/run", "folder of this run: metrics.jsonl, tensorboard/, checkpoints/")
    every: int = setting(1, "log every so many steps")
    tensorboard: bool = setting(False, "also write TensorBoard events")
    progress: Literal["auto", "on", "off"] = setting("auto", "progress bar of rank 0; auto shows it on a terminal")

    def __post_init__(self) -> None:
        require(self.every >= 1, "logging.every", self.every, "at least 1")


@dataclass(frozen=True)
class TrainConfig:
    """Everything `fsdp2x train` reads, section by section."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    train: TrainSection = dataclasses.field(default_factory=TrainSection)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
