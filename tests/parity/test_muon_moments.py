"""Muon's groups of AdamW with moments in 8 or 16 bits: the bits of that AdamW alone, through every form of a state."""

import pytest
import torch

import fsdp2x
from checkpoints import hand_over
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import full, only_fsdp2x, params, same, shard
from training import shared_folder

ROUNDED = {
    "int8": {"moments_dtype": "int8"},
    "bfloat16": {"moments_dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 3},
}


def make(ctx, dtype=torch.float32, **options):
    model = shard(ctx, Stack().to(dtype), STACK_UNITS)
    groups = fsdp2x.optim.muon_param_groups(model, exclude=["head.*"], lr=1e-2)
    return model, fsdp2x.optim.Muon(groups, lr=0.02, **options)


def train(ctx, pairs, steps, dtype=torch.float32) -> None:
    for step in steps:
        for model, *optimizers in pairs:
            model(inputs(ctx.rank, step).to(dtype)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


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
    train(ctx, [(model, optimizer), (other, muon, adamw)], range(4))
    same(params(model), params(other))
    for (_, param), (_, twin) in zip(optimizer_pairs(optimizer), rest, strict=True):
        same(full(optimizer.state[param]), full(adamw.state[twin]), "state")
    report = fsdp2x.memory_report(model, optimizer)
    fresh = fsdp2x.memory_report(model, make(ctx, **ROUNDED[rounded])[1])
    assert report.optimizer_bytes == fresh.optimizer_bytes, "what the first step makes was foretold"


def optimizer_pairs(optimizer):
    return [(name, param) for group in optimizer.param_groups if not group["use_muon"]
            for name, param in zip(group["param_names"], group["params"], strict=True)]  # fmt: skip


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("form", ["sharded", "dcp", "pickle"])
@pytest.mark.each_value
def test_training_goes_on_to_the_bit(ctx, form):
    """Of a model in bf16, to whose dtype torch would round the float32 of a state in 8 bits."""
    only_fsdp2x(ctx)
    first, second = (make(ctx, torch.bfloat16, moments_dtype="int8") for _ in range(2))
    train(ctx, [first], range(3), torch.bfloat16)
    names = {name for state in first[1].state_dict()["state"].values() for name in state}
    assert names == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}
    with shared_folder(ctx) as folder:
        hand_over(first, second, folder, form, lambda: train(ctx, [second], range(1), torch.bfloat16))
    train(ctx, [first, second], range(3, 6), torch.bfloat16)
    same(params(second[0]), params(first[0]), "parameters")


@distributed(world_sizes=(1,))
def test_settings_are_adamws(ctx):
    only_fsdp2x(ctx)
    with pytest.raises(ValueError, match="moments_dtype is 'fp8'"):
        make(ctx, moments_dtype="fp8")
    with pytest.raises(ValueError, match="stochastic_rounding needs moments_dtype"):
        make(ctx, stochastic_rounding=True)
