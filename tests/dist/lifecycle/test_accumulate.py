"""fsdp2x.accumulate: which backwards communicate, the sum they arrive at, and that settings come back."""

import copy

import pytest
import torch

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import both_transports, full, grads, mean_of_ranks, same, shard

NUM_MICRO = 3


def micro_loss(model, rank, step):
    return model(inputs(rank, step)).square().mean() / NUM_MICRO


def reductions(model):
    return fsdp2x.describe(model).stats["reductions"]


OFF, ON = (False, False), (True, True)


def settings(model):
    states = filter(None, map(fsdp2x.fully_shard.state, model.modules()))
    return [(state.options.requires_gradient_sync, state.options.requires_all_reduce) for state in states]


@both_transports
@pytest.mark.parametrize("before_last", ["nothing", "reduce_scatter"])
@distributed(world_sizes=(2, 3))
def test_sum_of_micro_batches(ctx, transport, before_last):
    model = Stack()
    plain = copy.deepcopy(model)
    shard(ctx, model, STACK_UNITS, transport=transport)
    counts = []
    for step in range(NUM_MICRO):
        with fsdp2x.accumulate(model, last=step == NUM_MICRO - 1, before_last=before_last):
            micro_loss(model, ctx.rank, step).backward()
        counts.append(reductions(model))
    num_units = 4
    expected = [0, 0, num_units] if before_last == "nothing" else [num_units, 2 * num_units, 3 * num_units]
    assert counts == expected
    mean_of_ranks(plain, lambda m, rank: sum(micro_loss(m, rank, step) for step in range(NUM_MICRO)), ctx.world)
    same(grads(model), grads(plain), "gradients", rtol=1e-5, atol=1e-7)


@distributed(world_sizes=(2,))
def test_settings_come_back(ctx):
    model = shard(ctx, Stack(), STACK_UNITS)
    model.blocks[1].set_requires_gradient_sync(False)
    before = settings(model)
    assert sorted(before) == [OFF, ON, ON, ON]
    for ran_before in (False, True):  # the settings move into the engine at the first forward
        with pytest.raises(KeyError), fsdp2x.accumulate(model, last=False):
            assert settings(model) == [OFF] * 4
            if not ran_before:
                micro_loss(model, ctx.rank, 0).backward()
            raise KeyError
        assert settings(model) == before
        with fsdp2x.accumulate(model, last=True):
            assert settings(model) == before
    with fsdp2x.accumulate(model, last=False):
        with fsdp2x.accumulate(model, last=False):
            pass
        assert settings(model) == [OFF] * 4
    assert settings(model) == before


@distributed(world_sizes=(2,))
def test_part_of_a_model(ctx):
    """Only the units below what is passed stay local; a plain module around sharded ones will do."""
    model = shard(ctx, Stack(), STACK_UNITS)
    with fsdp2x.accumulate(model.blocks, last=False):
        micro_loss(model, ctx.rank, 0).backward()
    got = grads(model)
    assert {name for name, grad in got.items() if grad is None} == {n for n in got if n.startswith("blocks.")}
    micro_loss(model, ctx.rank, 1).backward()
    assert all(grad is not None for grad in full(grads(model)).values())


def test_mistakes():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="nothing in this Linear is sharded"), fsdp2x.accumulate(model, last=False):
        pass
    with pytest.raises(ValueError, match="before_last must be .*got 'some'"):
        with fsdp2x.accumulate(model, last=False, before_last="some"):
            pass
