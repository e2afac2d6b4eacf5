"""torch's AveragedModel over shards: averages of the unsharded model, saved and loaded as any sharded model."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdp2x
import models
from checkpoints import shared_folder
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import both_transports, params, same, shard


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))


def pair(ctx, transport):
    """A sharded model, and sharded averages, whose copy was made before."""
    model, averages = Stack(), averaged(Stack())
    for one in (model, averages.module):
        shard(ctx, one, STACK_UNITS, transport=transport)
    return model, averages


@distributed(world_sizes=(1, 2, 3), only_fsdp2x=True)
@pytest.mark.parametrize("make", [torch.optim.AdamW, fsdp2x.optim.AdamW])
@both_transports
def test_averages_are_those_of_the_unsharded_model(ctx, make, transport):
    model, averages = pair(ctx, transport)
    optimizer, plain = make(model.parameters(), lr=1e-2), Stack()
    expected = averaged(copy.deepcopy(plain))
    for number in range(4):
        models.step(ctx, model, optimizer, number)
        plain.load_state_dict(params(model))
        expected.update_parameters(plain)
        averages.update_parameters(model)
        same(params(averages.module), params(expected.module), f"step {number}")
        with torch.no_grad():
            same(averages(inputs(ctx.rank)), expected(inputs(ctx.rank)), f"output {number}")
    with shared_folder() as folder:
        fsdp2x.checkpoint.save(folder / "averages", averages, step=4)
        _, again = pair(ctx, transport)
        fsdp2x.checkpoint.load(folder / "averages", again)
    for one in (averages, again):
        one.update_parameters(model)
    same(params(again.module), params(averages.module), "after a load")
