"""Optimizers go on to the bit with states that were handed over in any form, and after a sleep."""

import pytest
import torch

import fsdp2x
from checkpoints import HANDED_OVER_BY, hand_over
from fsdp2x.optim import EMA, AdamW, Muon
from harness import distributed
from models import STACK_UNITS, Stack, train
from reference import full, params, same, shard
from training import shared_folder


def with_ema(optimizer, *arguments, **options):
    EMA(optimizer, *arguments, **options)
    return optimizer


def muon(model, **options):
    return Muon(fsdp2x.optim.muon_param_groups(model, exclude=["head.*"], lr=1e-2), lr=0.02, **options)


# Kind -> the dtype of the model, and its optimizer. Torch rounds what it loads to the dtype of the model.
KINDS = {
    "adamw": (torch.float32, lambda model: AdamW(model.parameters(), lr=1e-2, amsgrad=True)),
    "bf16 moments": (
        torch.float32,
        lambda model: AdamW(model.parameters(), lr=1e-2, moments_dtype=torch.bfloat16, stochastic_rounding=True),
    ),
    "int8 moments": (torch.bfloat16, lambda model: AdamW(model.parameters(), lr=1e-2, moments_dtype="int8")),
    "averages": (
        torch.bfloat16,
        lambda model: with_ema(AdamW(model.parameters(), lr=1e-2), 0.75, dtype=torch.float32),
    ),
    "muon": (torch.float32, muon),
    "muon, int8 moments": (torch.bfloat16, lambda model: muon(model, moments_dtype="int8")),
}
# State entries that a state dict has in float32, whatever dtype stores them.
WIDE = {"int8 moments": {"step", "exp_avg", "exp_avg_sq"}, "averages": {"step", "ema"}}
WIDE["muon, int8 moments"] = WIDE["int8 moments"]
# All forms of moments in codes, one of the others.
CASES = [
    pytest.param(kind, form, marks=() if kind == "int8 moments" or (row - column) % 5 == 0 else pytest.mark.full)
    for row, kind in enumerate(KINDS)
    for column, form in enumerate(HANDED_OVER_BY)
]


@distributed(world_sizes=(2, pytest.param(3, marks=pytest.mark.full)), only_fsdp2x=True)
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_training_goes_on_to_the_bit(ctx, kind, form):
    dtype, make = KINDS[kind]

    def pair():
        model = shard(ctx, Stack().to(dtype), STACK_UNITS)
        return model, make(model)

    first, second = pair(), pair()
    train(ctx, *first)
    held = [item for state in first[1].state_dict()["state"].values() for item in state.items()]
    wide = {name for name, value in held if value.dtype is torch.float32}
    assert wide == WIDE.get(kind, wide), "torch would round them when it loads them"
    with shared_folder(ctx) as folder:
        hand_over(first, second, folder, form, lambda: train(ctx, *second, range(1)))
    fsdp2x.sleep(*first)
    fsdp2x.wake(*first)
    for one in (first, second):
        train(ctx, *one, range(3, 5))
    same(params(second[0]), params(first[0]), "parameters")
    for one, other in zip(*(each[1].state_dict()["state"].values() for each in (second, first)), strict=True):
        same(full(dict(sorted(one.items()))), full(dict(sorted(other.items()))), "states")
