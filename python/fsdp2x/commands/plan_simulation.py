"""`fsdp2x plan --simulate`: what is asked of the simulator, checked, and its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from fsdp2x.memory.facts import ModelFacts
from fsdp2x.memory.plan import PlanError
from fsdp2x.memory.steps import MicroBatches
from fsdp2x.simulate.machines import MACHINES
from fsdp2x.simulate.step import Simulation, simulate

if TYPE_CHECKING:
    from fsdp2x.commands.plan_request import Request

# torchtitan reports 33 to 39 % for Llama 3.1 8B on H100s, compiled or not, Megatron-LM more.
_MFU = 0.4
_TOKENS = 8192
# What only a simulation reads.
_OPTIONS = ("node", "tokens", "sequence_length", "mfu")
_FLAGS = ("recompute", "reduce_unpacked")


def asks_for_simulation(request: Request) -> bool:
    """Whether it does, as it was given: a YAML fills in tokens later.

    Raises:
        PlanError: it does not, but has options that nothing else reads.
    """
    given = [name for name in _OPTIONS if getattr(request, name) is not None]
    given += [name for name in _FLAGS if getattr(request, name)]
    if given and not request.simulate:
        raise PlanError(f"{given[0]}: got {getattr(request, given[0])}, which --simulate alone reads; add it")
    return request.simulate


def simulation_of(model: nn.Module, facts: ModelFacts, request: Request, micro_batches: MicroBatches) -> Simulation:
    """The step of the plan, whose units are ``facts``, on the machine that is asked for.

    Raises:
        PlanError: a machine that is not known, ranks that do not fill nodes, what the schedules do not have.
    """
    node = request.node or "h100"
    if node not in MACHINES:
        raise PlanError(f"node: got {node!r}, expected one of {', '.join(MACHINES)}")
    machine = MACHINES[node]
    _refuse(request, machine.ranks_per_node)
    tokens = _TOKENS if request.tokens is None else request.tokens
    sequence_length = tokens if request.sequence_length is None else request.sequence_length
    mfu = _MFU if request.mfu is None else request.mfu
    if tokens < 1:
        raise PlanError(f"tokens: got {tokens}, expected at least 1")
    if not 1 <= sequence_length <= tokens:
        raise PlanError(f"sequence_length: got {sequence_length}, expected 1 to the {tokens} tokens of a micro-batch")
    if not 0 < mfu <= 1:
        raise PlanError(f"mfu: got {mfu}, expected a share of the peak above 0 and at most 1, such as {_MFU}")
    return simulate(
        model,
        facts,
        machine,
        tokens=tokens,
        sequence_length=sequence_length,
        mfu=mfu,
        recomputes=request.recompute,
        micro_batches=micro_batches,
    )


def _refuse(request: Request, ranks_per_node: int) -> None:
    if request.device != "cuda":
        raise PlanError(
            f"device: got {request.device}, expected cuda with --simulate: of CPUs no links are known, and "
            "benchmarks/bench_simulate.py measures them"
        )
    if request.offload != "none":
        raise PlanError(f"offload: got {request.offload}, whose copies are not simulated; expected none")
    if request.wire_weights is not None or request.wire_gradients is not None:
        raise PlanError(
            f"wire formats: got weights {request.wire_weights} and gradients {request.wire_gradients}, whose kernels "
            "are not simulated, since no device has been measured with them; leave --simulate or them out"
        )
    if request.expert_parallel > 1:
        raise PlanError(
            f"expert_parallel: got {request.expert_parallel}, whose exchange of tokens is not simulated; leave "
            "--simulate or --expert-parallel out"
        )
    for name, ranks in (("world_size", request.world_size), ("shards", request.world_size // request.replicas)):
        if ranks > ranks_per_node and ranks % ranks_per_node:
            raise PlanError(
                f"{name}: got {ranks} ranks, expected at most {ranks_per_node}, or a multiple of {ranks_per_node}: "
                f"nodes of {ranks_per_node} are simulated whole"
            )
