"""What a training YAML means for a plan: the model as its run prepares it, on meta, and the planner's arguments.

Every setting that changes the bytes of a rank is read here or refused by name; `tests/parity/test_plan_settings.py`
walks through all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2x.runtime.transport import Transport
from fsdp2x.train import ConfigError, TrainConfig
from fsdp2x.train.explain_config import parse_without_text
from fsdp2x.train.load_config import translate_file
from fsdp2x.train.model import build_on_meta, offload_mode, prepare, unit_policy
from fsdp2x.train.strategy import plan_mesh, resolve_batching
from fsdp2x.train.tokenizer import choose_tokenizer, make_tokenizer


def read_training(
    path: Path, overrides: Sequence[str], world_size: int, local_world_size: int, given: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any], bool]:
    """A run before it exists.

    `given`: what the caller has decided, such as the device, on which other settings depend.

    Returns:
        The model; arguments of `plan_memory`, and `dtype` and dtypes of the policy by name; whether a copy of what is
        saved stays in host memory.

    Raises:
        ConfigError: what a run would refuse, and settings whose bytes cannot be foretold.
    """
    config = parse_without_text(translate_file(path, overrides).settings)
    parallel, optimizer = config.parallel, config.optimizer
    _refuse_unforeseen(config)
    mesh = plan_mesh(parallel, world_size, local_world_size)
    trains = config.train.mode == "train"
    shares_memory = Transport.SHM in (given.get("transport"), parallel.transport)
    device = given.get("device") or ("cpu" if parallel.device == "cpu" or shares_memory else "cuda")
    in_few_bits = parallel.wire_weights is not None or parallel.wire_gradients is not None
    on_one_host = device == "cpu" and mesh.shard_size <= local_world_size
    asked = {
        "dtype": config.model.dtype,
        "param_dtype": _param_dtype(parallel.param_dtype, device),
        "reduce_dtype": parallel.reduce_dtype,
        "replicas": mesh.num_replicas,
        "reshard_after_forward": mesh.reshard_after_forward,
        "transport": (Transport.SHM if on_one_host and not in_few_bits else Transport.PROCESS_GROUP)
        if parallel.transport == "auto"
        else parallel.transport,
        "wire_weights": parallel.wire_weights,
        "wire_gradients": parallel.wire_gradients,
        "device": device,
        "offload": offload_mode(parallel.offload),
        "optimizer": optimizer.planned_name,
        "expert_parallel": parallel.expert_parallel,
        "expert_fsdp_size": parallel.expert_fsdp_size,
        "micro_batches": _micro_batches(config, world_size // parallel.sequence_parallel) if trains else 1,
        "before_last": parallel.accumulate,
    }
    if not trains:
        asked["optimizer"] = "none"
    dtype = getattr(torch, given.get("dtype") or config.model.dtype)
    tokenizer = None if config.model.path else make_tokenizer(choose_tokenizer(config.data.tokenizer, None))
    model = prepare(build_on_meta(config.model, dtype, tokenizer=tokenizer, attn_implementation=None), config)
    asked["auto_wrap"] = unit_policy(model, parallel)
    return model, asked, trains and config.checkpoint.async_save


def _refuse_unforeseen(config: TrainConfig) -> None:
    if config.train.mode == "train" and config.optimizer.implementation in ("foreach", "for_loop"):
        raise ConfigError(
            f"optimizer.implementation: got {config.optimizer.implementation!r}, whose steps take memory that is not "
            "foretold; plan with auto, fsdp2x or fused"
        )


def _param_dtype(setting: str | None, device: str) -> str | None:
    """`auto` as on a GPU of today; float16, which older ones take, has as many bytes."""
    if setting != "auto":
        return setting
    return "bfloat16" if device == "cuda" else None


def _micro_batches(config: TrainConfig, num_readers: int) -> int:
    """Packed samples take as many as the fullest rank needs: at most so many."""
    batching = resolve_batching(config.train, num_readers)
    if not config.data.packing:
        return batching.accumulation
    samples_per_row = (config.data.max_tokens or config.data.block_size) // config.data.block_size
    return -(-batching.batch_size * batching.accumulation // samples_per_row)
