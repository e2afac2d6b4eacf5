"""What memory_report says of steps of several backwards, the engine's ledger says after some of them."""

import pytest
from torch.distributed.device_mesh import init_device_mesh

import fsdp2x
from fsdp2x.runtime.tree import unit_states
from harness import distributed
from memory import LEDGER, run_stack
from models import Stack
from reference import only_fsdp2x, shard

UNITS = [f"blocks.{i}" for i in range(4)]


def check(model, num: int, before_last: str, run=run_stack) -> None:
    plan = fsdp2x.memory_report(model, micro_batches=num, before_last=before_last)
    totals = []
    for _ in range(4):
        for index in range(num):
            with fsdp2x.accumulate(model, last=index == num - 1, before_last=before_last):
                run(model)
        model.zero_grad()
        totals.append(dict(fsdp2x.describe(model).stats))
    stats = totals[-1]
    planned, real = ({name: get(name) for name in LEDGER} for get in (lambda name: getattr(plan, name), stats.get))
    assert real == planned, f"{plan}\n{stats}"
    counts = {name: totals[-1][name] - totals[-2][name] for name in ("gathers", "reductions")}
    assert counts == {name: getattr(plan.traffic, name) for name in counts}, f"{plan}\n{counts}"


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("before_last", ["nothing", "reduce_scatter"])
def test_with_replicas(ctx, before_last):
    only_fsdp2x(ctx)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for transport in ("shm", "process_group"):
        model = shard(ctx, Stack(num=4, width=48, hidden=80), UNITS, mesh=mesh, transport=transport)
        check(model, 3, before_last)


@distributed(world_sizes=(2,))
def test_gradients_that_are_added_to_on_the_host(ctx):
    """What arrives there is a block of its own until it is added."""
    only_fsdp2x(ctx)
    offload = fsdp2x.CPUOffloadPolicy(pin_memory=False)
    model = shard(ctx, Stack(num=4, width=48), UNITS, transport="streams", offload_policy=offload)
    assert fsdp2x.memory_report(model).landing_bytes == 0
    plan = fsdp2x.memory_report(model, micro_batches=3, before_last="reduce_scatter")
    check(model, 3, "reduce_scatter")
    groups = [group for state in unit_states(model) for group in state.groups]
    blocks = fsdp2x.describe(model).stats["gradient_block_allocations"] - len(groups)  # beside the gradients' pools
    largest = max(group.pool.numel() for group in groups)
    assert 0 < plan.landing_bytes <= blocks * largest and blocks <= 3
