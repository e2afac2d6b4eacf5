"""Bytes of a device's collectives in a real step are those of the plan, and copies do not grow with parameters."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2x
import models
import moe_models
import streams
from fsdp2x.sharding.wrap import plan_units
from harness import distributed
from reference import shard

NUM_EXPERTS = 128
# Entries of a record that launch a kernel or a copy.
COPIES = ("copy", "pack", "write_rows", "divide", "add", "assign", "transfer")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


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


def moved(entries: list[tuple], world: int) -> dict[str, int]:
    """Bytes that a rank sends around rings, by the collective, and how many copies there are."""
    found = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0, "copies": 0}
    for operation, _, _, reads, writes in entries:
        kind = operation.partition(" ")[0]
        if kind in ("all_gather", "reduce_scatter"):
            found[kind] += sum(size for _, size in (writes if kind == "all_gather" else reads)) * (world - 1) // world
        elif kind == "all_reduce":  # of two replicas: twice the half
            found[kind] += sum(size for _, size in reads)
        found["copies"] += operation in COPIES
    return found


@distributed(world_sizes=(2, 4), only_fsdp2x=True)
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_steady_step_moves_what_the_plan_says(ctx, case, grouped):
    """Parameters of 512 bytes and more on their own, or all packed."""
    recorder = streams.install(512, grouped=grouped)
    build, run = CASES[case]
    model, mesh, world = build(), None, ctx.world
    if case == "hsdp":
        world //= 2
        mesh = init_device_mesh("cpu", (2, world), mesh_dim_names=("replicate", "shard"))
    units = ["layer"] if case == "listed" else plan_units(model)
    policy = MixedPrecisionPolicy() if case == "lora" else BF16
    model = shard(ctx, model, units, transport="streams", mesh=mesh, mp_policy=policy)
    for _ in range(2):
        run(model)
        model.zero_grad()
    plan = fsdp2x.memory_report(model).traffic
    recorder.clear()
    run(model)
    found = moved(recorder.entries, world)
    # Copies in and out of what is packed, and a cast; gradients are packed, and rows written.
    assert 0 < found.pop("copies") <= 3 * plan.gathers + 2 * plan.reductions
    # Segments pad each parameter to 64 bytes, a gather of its own does not.
    padding = plan.gather_bytes - found.pop("all_gather")
    assert 0 <= padding <= grouped * plan.gather_bytes // 50
    assert found == {"reduce_scatter": plan.reduce_bytes, "all_reduce": plan.all_reduce_bytes}
