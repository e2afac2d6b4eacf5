"""``plan_memory``: predicts the memory of a run from a model that is not sharded, on the meta device or not.

Units, ranks and dtypes come from the arguments of ``fully_shard`` and go to the same report as those of running models.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import ConfigError
from fsdp2x.lifecycle.comms import wire_formats_of
from fsdp2x.plan.facts import ModelFacts, PlannedMesh, Wire
from fsdp2x.plan.optimizers import PLANNED, may_be_on_host, planned_bytes
from fsdp2x.plan.report import MemoryReport, check_micro_batches, report_of
from fsdp2x.plan.sources import ExpertRanks, facts_of_plan
from fsdp2x.plan.steps import MicroBatches
from fsdp2x.sharding.offload import OFFLOAD_MODES, Offload
from fsdp2x.sharding.transport import TransportKind
from fsdp2x.sharding.wrap import AutoWrap


class PlanError(ConfigError):
    """A config or an option that cannot be planned. The message says what was expected and what it got."""


@checked(own=("auto_wrap",))
def plan_memory(
    model: nn.Module,
    world_size: int,
    *,
    replicas: int = 1,
    transport: str = "process_group",
    device: str | None = None,
    offload: str = "none",
    optimizer: str = "adamw",
    auto_wrap: AutoWrap = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    expert_parallel: int = 1,
    expert_fsdp_size: int | None = None,
    micro_batches: int = 1,
    before_last: str = "nothing",
    local_world_size: int | None = None,
    wire_weights: str | None = None,
    wire_gradients: str | None = None,
) -> MemoryReport:
    """Predicts the ``memory_report`` of rank 0, which has the most rows, after ``fully_shard`` with these arguments.

    Args:
        model: a model that is not sharded. It does not change, and may be on the meta device.
        world_size: number of all ranks.
        replicas: number of rank groups that hold copies of the same shards.
        transport: ``"process_group"``, or ``"shm"`` if all ranks of a group are on one host.
        device: ``"cuda"`` (with NCCL) or ``"cpu"``. None: the CPU with shared memory, else CUDA.
        offload: a mode of ``HostOffloadPolicy``.
        optimizer: adamw, muon with ``muon_param_groups(model)``, sgd, sgd_momentum, or none. A suffix sets the
            ``moments_dtype`` of adamw or muon: adamw_float32, adamw_bfloat16, adamw_int8.
        auto_wrap, reshard_after_forward, mp_policy, ignored_params: see ``fully_shard``.
        expert_parallel: number of ranks that share the experts of a block.
        expert_fsdp_size: number of ranks that shard each part of the experts. None: all others.
        micro_batches, before_last: see ``memory_report``.
        local_world_size: number of ranks on one host. None: all.
        wire_weights, wire_gradients: formats of ``set_wire_dtype``, over a process group.

    Raises:
        ValueError: sizes do not divide each other, shared memory is used on CUDA, or the optimizer cannot be offloaded.
            Also if muon needs ``get_output_embeddings()``, or if ``fully_shard`` would raise.
    """
    accumulation = check_micro_batches("plan_memory", micro_batches, before_last)
    facts = planned_facts(
        model,
        world_size,
        replicas=replicas,
        transport=transport,
        device=device,
        offload=offload,
        auto_wrap=auto_wrap,
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy,
        ignored_params=ignored_params,
        expert_parallel=expert_parallel,
        expert_fsdp_size=expert_fsdp_size,
        local_world_size=local_world_size,
        wire_weights=wire_weights,
        wire_gradients=wire_gradients,
    )
    return planned_report(facts, optimizer, accumulation)


def usual_device(transport: str) -> str:
    """Returns the device of a model if only its transport is known."""
    return "cpu" if transport == TransportKind.SHM else "cuda"


def planned_report(facts: ModelFacts, optimizer: str, micro_batches: MicroBatches) -> MemoryReport:
    """Returns what ``plan_memory`` reports for units that ``planned_facts`` counted.

    Raises:
        PlanError: the optimizer is unknown, or its state cannot be offloaded.
    """
    if optimizer not in PLANNED:
        raise PlanError(f"optimizer: expected one of {', '.join(PLANNED)}, got {optimizer!r}")
    keeps_state = any(group.keeps_host_state for unit in facts.units for group in unit.groups)
    if keeps_state and not may_be_on_host(optimizer):
        raise PlanError(f"offload: only AdamW can offload its optimizer. Use gradients or all with {optimizer}.")
    try:
        state = planned_bytes(optimizer, facts)
    except ValueError as error:
        raise PlanError(f"optimizer: got {optimizer}: {error}") from error
    return report_of(facts, state, micro_batches=micro_batches)


def planned_facts(
    model: nn.Module,
    world_size: int,
    *,
    replicas: int = 1,
    transport: str = "process_group",
    device: str | None = None,
    offload: str = "none",
    auto_wrap: AutoWrap = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    expert_parallel: int = 1,
    expert_fsdp_size: int | None = None,
    local_world_size: int | None = None,
    wire_weights: str | None = None,
    wire_gradients: str | None = None,
) -> ModelFacts:
    """Returns the units that ``plan_memory`` counts, with the same arguments and errors."""
    if world_size < 1 or replicas < 1 or world_size % replicas:
        raise PlanError(f"{replicas} replicas do not divide a world of {world_size} rank(s)")
    if transport not in (TransportKind.PROCESS_GROUP, TransportKind.SHM):
        raise PlanError(f"transport: expected process_group or shm, got {transport!r}")
    if offload not in OFFLOAD_MODES:
        raise PlanError(f"offload: expected one of {', '.join(OFFLOAD_MODES)}, got {offload!r}")
    device = device or usual_device(transport)
    if device not in ("cuda", "cpu"):
        raise PlanError(f"device: expected cuda or cpu, got {device!r}")
    if device == "cuda" and transport == TransportKind.SHM:
        raise PlanError("transport: expected process_group with device cuda, got shm, which only CPU ranks share")
    wire = Wire(wire_weights, wire_gradients)
    _check_wire(wire, device, transport, mp_policy, reshard_after_forward)
    on_one_host = transport == TransportKind.SHM and world_size <= (local_world_size or world_size)

    def ranks_of(key: str, world: int, copies: int) -> PlannedMesh:
        if device == "cuda":
            how = torch_private.gathers_of_nccl()
            return PlannedMesh(key, world, 0, TransportKind.DEVICE, copies, gathers=how)
        share = copies > 1 and on_one_host
        kind = TransportKind.LOCAL if world == 1 else TransportKind(transport)
        return PlannedMesh(key, world, 0, kind, copies, replicas_share=share, gathers="messages")

    experts = None
    if expert_parallel > 1:
        others, rest = divmod(world_size, expert_parallel)
        size = expert_fsdp_size or others
        if rest or others % size:
            raise PlanError(
                f"expert_parallel: {expert_parallel} ranks, with {size} that shard a part, do not divide {world_size}"
            )
        experts = ExpertRanks(expert_parallel, ranks_of("experts", size, others // size))
    return facts_of_plan(
        model,
        ranks_of("shards", world_size // replicas, replicas),
        auto_wrap=auto_wrap,
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy,
        ignored_params=ignored_params,
        offload=Offload(offload),
        experts=experts,
        wire=wire,
    )


def _check_wire(
    wire: Wire, device: str, transport: str, policy: MixedPrecisionPolicy | None, reshard: bool | int | None
) -> None:
    """Raises for what ``set_wire_dtype`` would reject."""
    if wire == Wire():
        return
    wire_formats_of("plan", wire.weights, wire.gradients)
    if transport != TransportKind.PROCESS_GROUP:
        raise PlanError(f"wire formats: expected transport process_group, got {transport}")
    if wire.weights is not None and reshard not in (None, True, False):
        raise PlanError(
            f"wire formats: expected reshard_after_forward true or false with encoded weights, got {reshard}"
        )
    if wire.gradients is not None and policy is not None and policy.reduce_dtype not in (None, torch.float32):
        raise PlanError(
            f"wire formats: expected reduce_dtype torch.float32 with encoded gradients, got {policy.reduce_dtype}"
        )
