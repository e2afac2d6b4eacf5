"""Muon's groups of AdamW with moments in 8 or 16 bits: the bits of that AdamW alone."""

import pytest
import torch

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, step
from reference import full, only_fsdp2x, params, same, shard

ROUNDED = {
    "int8": {"moments_dtype": "int8"},
    "bfloat16": {"moments_dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 3},
}


def make(ctx, **options):
    model = shard(ctx, Stack(), STACK_UNITS)
    groups = fsdp2x.optim.muon_param_groups(model, exclude=["head.*"], lr=1e-2)
    return model, fsdp2x.optim.Muon(groups, lr=0.02, **options)


@distributed(world_sizes=(1, 3))
@pytest.mark.parametrize("rounded", ROUNDED)
@pytest.mark.each_value
def test_steps_are_those_of_two_optimizers(ctx, rounded):
    only_fsdp2x(ctx)
    model, optimizer = make(ctx, **ROUNDED[rounded])
    other = shard(ctx, Stack(), STACK_UNITS)
    matrices, rest = (group["params"] for group in fsdp2x.optim.muon_param_groups(other, exclude=["head.*"]))
    muon = fsdp2x.optim.Muon([param for _, param in matrices], lr=0.02)
    adamw = fsdp2x.optim.AdamW([param for _, param in rest], lr=1e-2, weight_decay=0.1, **ROUNDED[rounded])
    for number in range(4):
        step(ctx, model, optimizer, number)
        step(ctx, other, None, number)
        for one in (muon, adamw):
            one.step()
            one.zero_grad()
    same(params(model), params(other))
    for (_, param), (_, twin) in zip(optimizer_pairs(optimizer), rest, strict=True):
        same(full(optimizer.state[param]), full(adamw.state[twin]), "state")
    report = fsdp2x.memory_report(model, optimizer)
    fresh = fsdp2x.memory_report(model, make(ctx, **ROUNDED[rounded])[1])
    assert report.optimizer_bytes == fresh.optimizer_bytes, "what the first step makes was foretold"


def optimizer_pairs(optimizer):
    return [(name, param) for group in optimizer.param_groups if not group["use_muon"]
            for name, param in zip(group["param_names"], group["params"], strict=True)]  # fmt: skip


@distributed(world_sizes=(1,))
def test_settings_are_adamws(ctx):
    only_fsdp2x(ctx)
    with pytest.raises(ValueError, match="moments_dtype is 'fp8'"):
        make(ctx, moments_dtype="fp8")
    with pytest.raises(ValueError, match="stochastic_rounding needs moments_dtype"):
        make(ctx, stochastic_rounding=True)
