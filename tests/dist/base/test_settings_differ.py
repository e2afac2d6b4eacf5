"""Settings that differ between ranks over shared memory: an error on every rank names the ranks and the setting."""

import pytest

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import shard

# Name -> what one rank alone calls between two steps, and what the error names.
CALLS = {
    "divide factor": (lambda m: m.blocks[1].set_gradient_divide_factor(3.5), r"gradient_divide_factor .*3\.5"),
    "gradient sync": (lambda m: m.set_requires_gradient_sync(False), r"requires_gradient_sync \((True|False) and"),
    "sync of a unit": (lambda m: m.blocks[0].set_requires_gradient_sync(False), "requires_gradient_sync"),
    "all-reduce": (lambda m: m.set_requires_all_reduce(False), r": requires_all_reduce \("),
    "after forward": (lambda m: m.set_reshard_after_forward(False), "reshard_after_forward"),
    "after backward": (lambda m: m.set_reshard_after_backward(False), "reshard_after_backward"),
}


def step(ctx, model, number):
    model(inputs(ctx.rank, number)).square().mean().backward()


@distributed(world_sizes=(2, 3), timeout=60)
@pytest.mark.parametrize("call", CALLS)
def test_every_rank_raises(ctx, call):
    set_alone, named = CALLS[call]
    model = shard(ctx, Stack(), STACK_UNITS, transport="shm")
    step(ctx, model, 0)
    if ctx.rank == ctx.world - 1:
        set_alone(model)
    with pytest.raises(RuntimeError, match=rf"rank . and rank . have different .*{named}"):
        for number in (1, 2):
            step(ctx, model, number)


@distributed(world_sizes=(2,), timeout=60)
def test_settings_between_forward_and_backward(ctx):
    """By accumulate around the backward alone; and a factor where nothing is gathered any more."""
    model = shard(ctx, Stack(), STACK_UNITS, transport="shm")
    loss = model(inputs(ctx.rank)).square().mean()
    with pytest.raises(RuntimeError, match="requires_gradient_sync"), fsdp2x.accumulate(model, last=ctx.rank == 0):
        loss.backward()
    kept = shard(ctx, Stack(), STACK_UNITS, transport="shm", reshard_after_forward=False)
    kept.set_reshard_after_backward(False)
    step(ctx, kept, 0)
    kept.blocks[2].set_gradient_divide_factor(1.0 + ctx.rank)
    with pytest.raises(RuntimeError, match="divide factor must be the same"):
        step(ctx, kept, 1)


@distributed(world_sizes=(2,), timeout=60)
def test_a_backward_without_reductions(ctx):
    """Nothing is gathered in it, so that only the next forward shows it: the rank that waits raises, well in time."""
    model = shard(ctx, Stack(), STACK_UNITS, transport="shm", reshard_after_forward=False)
    loss = model(inputs(ctx.rank)).square().mean()
    if ctx.rank == 0:
        with pytest.raises(RuntimeError, match="rank 1 continues .*set_requires_gradient"):
            loss.backward()
        return
    with fsdp2x.accumulate(model, last=False):
        loss.backward()
    with pytest.raises(RuntimeError, match="rank 0"):
        model(inputs(ctx.rank))
