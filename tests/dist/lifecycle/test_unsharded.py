"""fsdp2x.unsharded: one gather per unit for any number of forwards, and everything as it was afterwards."""

import copy

import pytest
import torch

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, build, inputs
from reference import both_transports, full, grads, same, shard


def states(model):
    return [unit.param_state for unit in fsdp2x.describe(model).units]


def reshards(model):
    return [unit.reshard_after_forward for unit in fsdp2x.describe(model).units]


def gathers(model):
    return fsdp2x.describe(model).stats["gathers"]


@both_transports
@pytest.mark.parametrize("ran_before", [False, True])
@distributed(world_sizes=(1, 2, 3))
@pytest.mark.each_pair
def test_ranks_run_different_numbers_of_forwards(ctx, transport, ran_before):
    model = Stack()
    plain = copy.deepcopy(model)
    shard(ctx, model, STACK_UNITS, transport=transport)
    if ran_before:
        model(inputs(ctx.rank)).sum().backward()
    found = states(model)
    with torch.no_grad(), fsdp2x.unsharded(model):
        assert states(model) == ["UNSHARDED"] * 4
        start = gathers(model)
        for number in range(1 + 2 * ctx.rank):
            same(model(inputs(ctx.rank, number)), plain(inputs(ctx.rank, number)))
        assert gathers(model) == start, "a forward gathered again"
    assert states(model) == found == ["SHARDED"] * 4
    assert reshards(model) == [False, True, True, True], "the root keeps its parameters, the others do not"


@distributed(world_sizes=(2,))
def test_training_inside(ctx):
    """Backward frees the units; the next forward gathers the new weights."""

    def run(model, optimizer):
        losses = []
        for number in range(3):
            loss = model(inputs(ctx.rank, number)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(full(loss))
        return losses

    twin, model = (shard(ctx, Stack(), STACK_UNITS) for _ in range(2))
    expected = run(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fsdp2x.unsharded(model):
        losses = run(model, optimizer)
    same(losses, expected)
    same(grads(model), grads(twin))
    assert states(model) == ["SHARDED"] * 4


@distributed(world_sizes=(2,))
def test_nests_and_survives_exceptions(ctx):
    model = shard(ctx, Stack(), STACK_UNITS)
    for _ in range(2):
        with pytest.raises(KeyError), torch.no_grad(), fsdp2x.unsharded(model):
            with fsdp2x.unsharded(model.blocks):
                model(inputs(ctx.rank))
            assert states(model) == ["UNSHARDED"] * 4, "the inner block must not free what the outer one holds"
            raise KeyError
        assert states(model) == ["SHARDED"] * 4
        assert reshards(model) == [False, True, True, True]
    with pytest.raises(ValueError, match="of the wrong shape"), fsdp2x.unsharded(model):
        model.head.register_forward_pre_hook(lambda *args: _raise(ValueError("of the wrong shape")))
        model(inputs(ctx.rank))
    assert states(model) == ["SHARDED"] * 4


def _raise(error):
    raise error


@distributed(world_sizes=(2,))
def test_units_that_were_unsharded_stay_so(ctx):
    model = shard(ctx, Stack(), STACK_UNITS)
    model.blocks[1].unshard()
    with fsdp2x.unsharded(model):
        pass
    assert states(model) == ["SHARDED", "SHARDED", "UNSHARDED", "SHARDED"]
    model.blocks[1].reshard()


@distributed(world_sizes=(2,))
def test_a_part_before_the_root_has_run(ctx):
    """The part does not permanently become a root: the model that contains it can still run first."""
    model = Stack()
    plain = copy.deepcopy(model)
    shard(ctx, model, STACK_UNITS)
    with torch.no_grad(), fsdp2x.unsharded(model.blocks):
        same(model(inputs(ctx.rank)), plain(inputs(ctx.rank)))
    assert reshards(model) == [False, True, True, True]
    model(inputs(ctx.rank)).sum().backward()


@distributed(world_sizes=(2,), timeout=120)
def test_generate(ctx):
    """HuggingFace's generate, ranks with prompts and numbers of tokens of their own."""
    model = build("qwen3")
    plain = copy.deepcopy(model).eval()
    fsdp2x.fully_shard(model).eval()
    prompt = torch.arange(3, 6 + ctx.rank)[None]
    arguments = {"max_new_tokens": 3 + 4 * ctx.rank, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = plain.generate(prompt, **arguments)
    with fsdp2x.unsharded(model):
        start = gathers(model)
        got = model.generate(prompt, synced_gpus=False, **arguments)
        assert gathers(model) == start
    assert torch.equal(got, expected)


def test_mistakes():
    with pytest.raises(ValueError, match="unsharded: nothing in this Linear"):
        with fsdp2x.unsharded(torch.nn.Linear(2, 2)):
            pass
