"""The settings that depend on the number of ranks, on the device or on the text: worked out once, when a run begins."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .config import ConfigError, ModelConfig, ParallelConfig, ScalerConfig, TrainSection

DEFAULT_STEPS = 1000
DEFAULT_BATCH_SIZE = 8


@dataclass(frozen=True)
class Batching:
    """Blocks: per rank and micro-batch, micro-batches per step, per rank in evaluation."""

    batch_size: int
    accumulation: int
    eval_batch_size: int


def resolve_batching(train: TrainSection, num_readers: int) -> Batching:
    """`num_readers` ranks read different text: all of them, or one of each group that shares its sequences.

    Raises:
        ConfigError: a global batch that does not come out even.
    """
    batch_size, accumulation, total = train.batch_size, train.accumulation, train.global_batch_size
    if total is None:
        batch_size, accumulation = batch_size or DEFAULT_BATCH_SIZE, accumulation or 1
    elif batch_size is None:
        accumulation = accumulation or 1
        batch_size = _quotient("train.global_batch_size", total, num_readers, accumulation, "micro-batches")
    else:
        steps = _quotient("train.global_batch_size", total, num_readers, batch_size, "blocks a micro-batch")
        if accumulation is not None and accumulation != steps:
            raise ConfigError(
                f"train.global_batch_size: got {total}, but {num_readers} ranks x batch_size {batch_size} x "
                f"accumulation {accumulation} are {num_readers * batch_size * accumulation}; leave one of them out"
            )
        accumulation = steps
    eval_batch_size = train.eval_batch_size or batch_size
    if train.global_eval_batch_size is not None:
        if train.eval_batch_size is not None:
            raise ConfigError("train: got both eval_batch_size and global_eval_batch_size, expected one of them")
        eval_batch_size = _quotient("train.global_eval_batch_size", train.global_eval_batch_size, num_readers, 1, "")
    return Batching(batch_size, accumulation, eval_batch_size)


def _quotient(path: str, total: int, num_readers: int, other: int, unit: str) -> int:
    if total % (num_readers * other):
        times = f" x {other} {unit}" if other > 1 else ""
        raise ConfigError(f"{path}: got {total}, expected a multiple of {num_readers} ranks{times}")
    return total // (num_readers * other)


def resolve_steps(train: TrainSection, num_blocks: int, blocks_per_step: int) -> int:
    """Optimizer steps of the whole run; an epoch is as many whole steps as its blocks give, at least one."""
    if train.epochs is None:
        return train.steps or DEFAULT_STEPS
    by_epochs = max(train.epochs * num_blocks // blocks_per_step, 1)
    return min(by_epochs, train.steps) if train.steps else by_epochs


def resolve_param_dtype(model: ModelConfig, parallel: ParallelConfig, device: torch.device) -> torch.dtype | None:
    """What blocks compute in; None: in the dtype of the parameters."""
    wanted = parallel.param_dtype
    if wanted is None:
        return None
    if wanted != "auto":
        return getattr(torch, wanted)
    if device.type == "cpu":
        return None
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def resolve_scaling(scaler: ScalerConfig, model: ModelConfig, param_dtype: torch.dtype | None) -> bool:
    """Whether the loss is scaled.

    Raises:
        ConfigError: parameters in float16, whose gradients have no range left to be unscaled in.
    """
    half = (param_dtype or getattr(torch, model.dtype)) == torch.float16
    enabled = half if scaler.enabled is None else scaler.enabled
    if enabled and model.dtype == "float16":
        raise ConfigError(
            "model.dtype: got 'float16', whose gradients cannot be unscaled; set model.dtype=float32 and "
            "parallel.param_dtype=float16"
        )
    return enabled
