"""Checks that plans are their lower bound and FSDP2's tensors after real steps, plus padding."""

from functools import partial

import pytest
from torch.distributed.device_mesh import init_device_mesh

import fsdp2x
from harness import distributed
from memory_cases import CASES, POLICY, bytes_after_steps

WIDTH = 32


def padding(report) -> int:
    """Bytes that align each parameter, count its steps, and hold flags for each unit on a device."""
    return sum((64 + 4) * unit.num_params + 64 for unit in report.units)


@distributed(world_sizes=(2,), only_fsdp2x=True)
@pytest.mark.parametrize("name", CASES)
def test_between_the_bound_and_stock(ctx, name):
    report, bound = CASES[name].plan(WIDTH, ctx.world)
    stock, slack = CASES[name].stock(WIDTH), padding(report)
    for row, size in stock.items():
        lower, found = getattr(bound, row), getattr(report, row)
        assert lower <= found <= min(size, lower) + slack, f"{row}: FSDP2 has {size}\n{report.table(bound)}"
        has_its_moments = row != "optimizer_bytes" or CASES[name].optimizer == "adamw"
        assert size <= lower + slack or not has_its_moments, f"{row}: FSDP2 has {size}\n{report.table(bound)}"
    assert bound.resting_bytes <= report.resting_bytes <= bound.resting_bytes + 3 * slack
    in_flight = 4 * max(unit.slot_bytes + unit.scratch_bytes for unit in report.units)
    assert bound.peak_bytes <= report.peak_bytes <= bound.peak_bytes + 3 * slack + in_flight


@distributed(world_sizes=(2,), only_fsdp2x=True)
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("offload")])
def test_real_steps_hold_what_is_planned(ctx, name):
    case = CASES[name]
    plan, bound = case.plan(WIDTH, ctx.world, device="cpu", transport="shm")
    model = case.build(WIDTH)
    if "expert_parallel" in case.options:
        mesh = init_device_mesh("cpu", (1, ctx.world), mesh_dim_names=("efsdp", "ep"))
        fsdp2x.moe.expert_parallel(model, mesh, mp_policy=POLICY)
    fsdp2x.fully_shard(model, auto_wrap=case.options.get("auto_wrap", True), mp_policy=POLICY)
    moments_dtype = "int8" if case.optimizer == "adamw_int8" else None
    held = bytes_after_steps(model, partial(fsdp2x.optim.AdamW, moments_dtype=moments_dtype))
    report = fsdp2x.memory_report(model)
    assert (report.shard_bytes, report.gradient_bytes) == (plan.shard_bytes, plan.gradient_bytes)
    for row, size in held.items():
        found, lower = getattr(plan, row), getattr(bound, row)
        assert lower - padding(report) <= size <= found <= size + padding(report), f"{row}: {held}\n{plan.table(bound)}"
