"""Collectives, their bytes and copies of a step, foretold from the plan, are those that a real step makes."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import models
import moe_models
import reference
import streams
from fsdp2x.memory.facts import ModelFacts, Ranks
from fsdp2x.memory.report import trees_of
from fsdp2x.memory.sources import facts_of_model, facts_of_plan
from fsdp2x.memory.steps import Replay
from fsdp2x.runtime.transport import Transport
from fsdp2x.simulate import schedules
from fsdp2x.simulate.machines import MACHINES
from fsdp2x.simulate.schedules import PEERS, Pacing
from fsdp2x.units.wrap import plan_units
from harness import distributed
from reference import only_fsdp2x

_SPEC = importlib.util.spec_from_file_location(
    "step_trace", Path(__file__).resolve().parents[2] / "benchmarks" / "step_trace.py"
)
step_trace = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(step_trace)

NUM_EXPERTS = 128
PACING = Pacing(MACHINES["h100"], mfu=0.4)
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 sums": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


class Listed(nn.Module):
    """A layer whose experts are modules of their own, all of them used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(moe_models.WIDTH, moe_models.WIDTH)
        self.layer = moe_models.ListLayer(top_k=NUM_EXPERTS)
        self.layer.mlp = moe_models.ListBlock(num_experts=NUM_EXPERTS, top_k=NUM_EXPERTS)

    def forward(self, x):
        return self.layer(self.mix(x))


def run_text(model) -> None:
    model(**models.batch("any", seed=1)).loss.backward()


def run_rows(model) -> None:
    model(torch.randn(3, moe_models.WIDTH)).square().mean().backward()


def fused():
    return moe_models.fused(num_experts=NUM_EXPERTS, moe_intermediate_size=8)


CASES = {
    "dense": (lambda: models.build("llama"), run_text),
    "tied": (lambda: models.build("qwen3"), run_text),
    "fused": (fused, run_text),
    "listed": (Listed, run_rows),
    "lora": (models.tiny_lora, run_text),
    "hsdp": (lambda: models.build("llama"), run_text),
}


def mesh_of(ctx, case):
    if case != "hsdp":
        return None
    return init_device_mesh("cpu", (2, ctx.world // 2), mesh_dim_names=("replicate", "shard"))


def units_of(case, model):
    return ["layer"] if case == "listed" else plan_units(model)


def steady(model, run):
    for _ in range(2):
        run(model)
        model.zero_grad()


def foretold(facts: ModelFacts, schedule) -> tuple[dict[str, list[int]], int]:
    """Bytes of each collective by kind, largest first, and launches of copies."""
    found: dict[str, list[int]] = {}
    num_copies = 0
    for root, units in trees_of(facts):
        replay = Replay(root, units)
        replay.run()
        ((_, operations),) = replay.operations
        for task in schedule(operations, {}, PACING):
            num_copies += task.num_launches
            for call in task.collectives:
                if call.axis.world > 1:
                    found.setdefault(call.kind, []).append(call.num_bytes)
    return {kind: sorted(sizes, reverse=True) for kind, sizes in found.items()}, num_copies


def over_a_process_group(ctx, case) -> None:
    build, run = CASES[case]
    model = build()
    model = reference.shard(ctx, model, units_of(case, model), transport="process_group", mesh=mesh_of(ctx, case))
    expected, _ = foretold(facts_of_model(model), schedules.ours)
    steady(model, run)
    assert step_trace.collectives_of(lambda: run(model)) == expected


def on_lanes_of_a_device(ctx, case, grouped, unpacked=False) -> None:
    """And the launches of the copies around them: parameters of 512 bytes and more on their own, or all packed."""
    recorder = streams.install(512, grouped=grouped)
    build, run = CASES[case]
    model = build()
    policy = "bf16 sums" if unpacked else "fp32" if case == "lora" else "bf16"
    options = {"mesh": mesh_of(ctx, case), "mp_policy": POLICIES[policy]}
    model = reference.shard(ctx, model, units_of(case, model), transport="streams", **options)
    if unpacked:
        model.set_reduce_scatter_unpacked()
    facts = facts_of_model(model)
    groups = [group for unit in facts.units for group in unit.groups]
    has_peers = any(group.ranks.world > 1 for group in groups)
    assert (unpacked and has_peers) == any(group.direct_reduce_bytes for group in groups)
    assert grouped == any(group.direct_chunk_bytes for unit in facts.units for group in unit.groups) or case == "listed"
    expected, num_copies = foretold(facts, schedules.ours)
    steady(model, run)
    recorder.clear()
    run(model)
    assert step_trace.collectives_of_record(recorder.entries) == expected
    assert step_trace.num_copies_of_record(recorder.entries) == num_copies


def of_stock(ctx, case, policy) -> None:
    """What is compared with: its collectives over the same units, from the plan of a model that is not sharded."""
    build, run = CASES[case]
    model, mesh = build(), mesh_of(ctx, case)
    units = units_of(case, model)
    replicas = 2 if case == "hsdp" else 1
    world = ctx.world // replicas
    ranks = Ranks("shards", world, ctx.rank % world, Transport.PROCESS_GROUP, replicas, has_streams=True)
    wrap = ["ListLayer"] if case == "listed" else True
    facts = facts_of_plan(model, ranks, auto_wrap=wrap, mp_policy=POLICIES[policy])
    expected, _ = foretold(facts, lambda *arguments: schedules.theirs(PEERS["fsdp2"], *arguments))
    model = reference.shard_stock(model, units, mesh=mesh, mp_policy=POLICIES[policy])
    steady(model, run)
    assert step_trace.collectives_of(lambda: run(model)) == expected


SIDES = {
    "process group": over_a_process_group,
    "device, one by one": lambda ctx, case: on_lanes_of_a_device(ctx, case, grouped=True),
    "device, unpacked": lambda ctx, case: on_lanes_of_a_device(ctx, case, grouped=True, unpacked=case not in PACKED),
    "device, packed": lambda ctx, case: on_lanes_of_a_device(ctx, case, grouped=False),
    "stock, fp32": lambda ctx, case: of_stock(ctx, case, "fp32"),
    "stock, bf16": lambda ctx, case: of_stock(ctx, case, "bf16"),
}
# Many parameters, or small ones alone.
PACKED = ("listed", "lora")
FEW = ("device, packed", "stock, fp32", "stock, bf16")
# What is foretold of stock, and of what a device packs, needs fewer of them; replicas are below, on four ranks.
EACH = [
    pytest.param(case, side, marks=[pytest.mark.full] if case == "hsdp" or side in FEW and case != "dense" else [])
    for case in CASES
    for side in SIDES
]


@distributed(world_sizes=(2,))
@pytest.mark.parametrize(("case", "side"), EACH)
def test_two_ranks(ctx, case, side):
    only_fsdp2x(ctx)
    SIDES[side](ctx, case)


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "case", [case if case == "hsdp" else pytest.param(case, marks=pytest.mark.full) for case in CASES]
)
def test_four_ranks(ctx, case, side):
    only_fsdp2x(ctx)
    SIDES[side](ctx, case)
