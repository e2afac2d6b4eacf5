"""``PlanRequest``: the run whose memory ``plan_memory`` predicts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import ConfigError
from fsdp2x.lifecycle.comms import wire_formats_of
from fsdp2x.lifecycle.contexts import BeforeLast
from fsdp2x.plan.optimizers import PLANNED, may_be_on_host
from fsdp2x.plan.steps import MicroBatches
from fsdp2x.sharding.offload import OffloadMode, mode_of
from fsdp2x.sharding.transport import TransportKind
from fsdp2x.sharding.wrap import AutoWrap


@checked
@dataclass(frozen=True)
class PlanRequest:
    """A run whose memory :func:`plan_memory` predicts: arguments of ``fully_shard``, an optimizer, and a step.

    Args:
        world_size: number of all ranks.
        replicas: number of rank groups that hold copies of the same shards.
        transport: ``"process_group"``, or ``"shm"`` if all ranks of a group are on one host.
        device: ``"cuda"`` (with NCCL) or ``"cpu"``. None: the CPU with shared memory, else CUDA.
        offload: a mode of ``HostOffloadPolicy``, or a mapping of ``fully_shard``, from names of parameters to policies.
        optimizer: adamw, muon with ``muon_param_groups(model)``, sgd, sgd_momentum, or none. A suffix sets the
            ``moments_dtype`` of adamw or muon: adamw_float32, adamw_bfloat16, adamw_int8.
        auto_wrap, reshard_after_forward, mp_policy, ignored_params: see ``fully_shard``.
        expert_parallel: number of ranks that share the experts of a block.
        expert_fsdp_size: number of ranks that shard each part of the experts. None: all others.
        micro_batches, before_last: see ``memory_report``.
        local_world_size: number of ranks on one host. None: all.
        wire_weights, wire_gradients: formats of ``set_wire_dtype``, over a process group.

    Raises:
        ValueError: sizes do not divide each other, shared memory is used on CUDA, the optimizer is unknown or cannot be
            offloaded, or ``set_wire_dtype`` would raise.
    """

    world_size: int
    _: KW_ONLY
    replicas: int = 1
    transport: Literal["process_group", "shm"] = "process_group"
    device: Literal["cuda", "cpu"] | None = None
    offload: OffloadMode | Mapping[str, OffloadPolicy] = "none"
    optimizer: str = "adamw"
    auto_wrap: AutoWrap = None
    reshard_after_forward: bool | int | None = None
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    ignored_params: Collection[nn.Parameter] = ()
    expert_parallel: int = 1
    expert_fsdp_size: int | None = None
    micro_batches: int = 1
    before_last: BeforeLast = "nothing"
    local_world_size: int | None = None
    wire_weights: str | None = None
    wire_gradients: str | None = None

    def __post_init__(self) -> None:
        world_size, replicas = self.world_size, self.replicas
        if world_size < 1 or replicas < 1 or world_size % replicas:
            raise ConfigError(f"{replicas} replicas do not divide a world of {world_size} rank(s)")
        if self.device == "cuda" and self.transport == TransportKind.SHM:
            raise ConfigError("transport: expected process_group with device cuda, got shm, which only CPU ranks share")
        if self.optimizer not in PLANNED:
            raise ConfigError(f"optimizer: expected one of {', '.join(PLANNED)}, got {self.optimizer!r}")
        if self.on_cuda and "optimizer" in self.offload_modes and not may_be_on_host(self.optimizer):
            raise ConfigError(
                f"offload: only AdamW can offload its optimizer. Use gradients or all with {self.optimizer}."
            )
        if self.wire_weights is not None or self.wire_gradients is not None:
            self._check_wire()

    @property
    def on_cuda(self) -> bool:
        return self.device != "cpu" and self.transport != TransportKind.SHM

    @property
    def offload_modes(self) -> Collection[OffloadMode]:
        """The mode of all parameters, or those of the named ones."""
        return (self.offload,) if isinstance(self.offload, str) else [mode_of(one) for one in self.offload.values()]

    @property
    def accumulation(self) -> MicroBatches:
        return MicroBatches(self.micro_batches, self.before_last)

    def _check_wire(self) -> None:
        wire_formats_of("plan", self.wire_weights, self.wire_gradients)
        if self.transport != TransportKind.PROCESS_GROUP:
            raise ConfigError(f"wire formats: expected transport process_group, got {self.transport}")
        if self.wire_weights is not None and self.reshard_after_forward not in (None, True, False):
            raise ConfigError(
                "wire formats: expected reshard_after_forward true or false with encoded weights, got "
                f"{self.reshard_after_forward}"
            )
        if self.wire_gradients is not None and self.mp_policy.reduce_dtype not in (None, torch.float32):
            raise ConfigError(
                "wire formats: expected reduce_dtype torch.float32 with encoded gradients, got "
                f"{self.mp_policy.reduce_dtype}"
            )
