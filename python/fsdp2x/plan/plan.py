"""``plan_memory``: predicts the memory of a run from a model that is not sharded, on the meta device or not.

Units, ranks and dtypes come from the arguments of ``fully_shard`` and go to the same report as those of running models.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import ConfigError, reworded
from fsdp2x.plan.facts import ModelFacts, PlannedMesh
from fsdp2x.plan.optimizers import planned_bytes
from fsdp2x.plan.report import MemoryReport, report_of
from fsdp2x.plan.request import PlanRequest
from fsdp2x.plan.sources import ExpertRanks, facts_of_plan
from fsdp2x.sharding.transport import TransportKind


@checked
def plan_memory(model: nn.Module, world_size: int, **settings: Any) -> MemoryReport:
    """Predicts the ``memory_report`` of rank 0, which has the most rows, after ``fully_shard`` with these arguments.

        plan = fsdp2x.memory.plan_memory(model, 64, mp_policy=policy, offload="optimizer")

    Args:
        model: a model that is not sharded. It does not change, and may be on the meta device.
        world_size: number of all ranks.
        settings: the other arguments of :class:`PlanRequest`.

    Raises:
        ValueError: see :class:`PlanRequest`. Also if muon needs ``get_output_embeddings()``, or if ``fully_shard``
            would raise.
    """
    request = PlanRequest(world_size, **settings)
    return planned_report(planned_facts(model, request), request)


def planned_report(facts: ModelFacts, request: PlanRequest) -> MemoryReport:
    """Returns what ``plan_memory`` reports for units that ``planned_facts`` counted."""
    with reworded(ConfigError, f"optimizer: got {request.optimizer}", ValueError):
        state = planned_bytes(request.optimizer, facts)
    return report_of(facts, state, micro_batches=request.accumulation)


def planned_facts(model: nn.Module, request: PlanRequest) -> ModelFacts:
    """Returns the units that ``plan_memory`` counts."""
    world_size = request.world_size
    on_one_host = request.transport == TransportKind.SHM and world_size <= (request.local_world_size or world_size)

    def ranks_of(key: str, world: int, copies: int) -> PlannedMesh:
        if request.on_cuda:
            how = torch_private.gathers_of_nccl()
            return PlannedMesh(key, world, 0, TransportKind.DEVICE, copies, gathers=how)
        share = copies > 1 and on_one_host
        kind = TransportKind.LOCAL if world == 1 else TransportKind(request.transport)
        return PlannedMesh(key, world, 0, kind, copies, replicas_share=share, gathers="messages")

    experts = None
    if request.expert_parallel > 1:
        others, rest = divmod(world_size, request.expert_parallel)
        size = request.expert_fsdp_size or others
        if rest or others % size:
            raise ConfigError(
                f"expert_parallel: {request.expert_parallel} ranks, with {size} that shard a part, do not divide "
                f"{world_size}"
            )
        experts = ExpertRanks(request.expert_parallel, ranks_of("experts", size, others // size))
    ranks = ranks_of("shards", world_size // request.replicas, request.replicas)
    return facts_of_plan(model, request, ranks, experts)
