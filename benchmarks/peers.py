"""Shards models for bench_step and bench_memory with FSDP2, FSDP1, and DeepSpeed ZeRO-3, over the same units."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

import harness


def _units(model: nn.Module) -> list:
    """The units that fsdp2x plans."""
    from fsdp2x.sharding.wrap import plan_units

    return plan_units(model, None)


def shard_stock(model: nn.Module, **options: Any) -> nn.Module:
    """Torch's FSDP2, with these options of it for every unit."""
    for plan in _units(model):
        part = plan.modules[0] if len(plan.modules) == 1 else list(plan.modules)
        stock_fully_shard(part, reshard_after_forward=plan.reshard_after_forward, **options)
    return stock_fully_shard(model, **options)


def shard_fsdp1(model: nn.Module) -> nn.Module:
    """Torch's FullyShardedDataParallel; a unit of several modules becomes several."""
    chosen = {id(module) for plan in _units(model) for module in plan.modules}
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: id(module) in chosen)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"), sync_module_states=False
    )


class GlooAlone:
    """Only the collectives that a step of a model over gloo needs, one after the other, in memory that is used again.

    Gathers run as messages between the ranks and reductions as all-to-alls, because both copy nothing."""

    def __init__(self, model: nn.Module) -> None:
        import fsdp2x
        from fsdp2x.base.collectives import gather_in_place

        world = dist.get_world_size()
        self._gather = functools.partial(gather_in_place, dist.group.WORLD)
        units = fsdp2x.memory_report(model).units
        gathered = [*units, *(unit for unit in units if unit.reshard_after_forward)]
        self._gathers = [unit.slot_bytes // world for unit in gathered]
        self._reductions = [unit.gradient_bytes for unit in units if unit.gradient_bytes]
        largest = max(*self._gathers, *self._reductions) * world
        self._memory = [torch.ones(largest, dtype=torch.uint8) for _ in range(2)]
        self._world = world

    def step(self, timer: harness.PhaseTimer) -> None:
        """Leaves the time of the whole step to ``timer``, which counts it without phases."""
        for size in self._gathers:
            whole = self._memory[0][: size * self._world]
            self._gather([whole], [whole.view(self._world, size)[dist.get_rank()]]).wait()
        for size in self._reductions:
            received, sent = (memory[: size * self._world] for memory in self._memory)
            dist.all_to_all_single(received, sent)


def has_deepspeed() -> bool:
    """Whether it is installed; it is not required for anything, and rank 0 says so where it is left out."""
    found = importlib.util.find_spec("deepspeed") is not None
    if not found and os.environ.get("RANK", "0") == "0":
        print(
            "DeepSpeed ZeRO-3 is left out: `pip install deepspeed` into this environment measures it", file=sys.stderr
        )
    return found


def _remove_its_shared_memory() -> None:
    """Removes the memory files of this rank's all-reduces, which DeepSpeed leaves."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_{os.environ['RANK']}"):
        path.unlink(missing_ok=True)


class ZeRO3:
    """DeepSpeed's stage 3 around a model: model(...), backward(loss), step()."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
        import deepspeed

        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "gradient_clipping": 0.0,  # the others do not clip; DeepSpeed's default does
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        atexit.register(_remove_its_shared_memory)

    def __call__(self, **inputs: torch.Tensor):
        return self.engine(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        """Zeroes the gradients as well."""
        self.engine.step()
