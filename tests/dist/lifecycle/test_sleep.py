"""sleep and wake: memory is freed, values and objects stay, and training continues unchanged."""

import copy
import importlib

import pytest
import torch
from torch.distributed.tensor import DTensor

import fsdp2x
import streams
from harness import distributed
from models import STACK_UNITS, Stack, inputs, step
from reference import params, same, shard

sleeping = importlib.import_module("fsdp2x.lifecycle.sleep")  # the package has a function of that name


def train(model, optimizer, ctx, steps) -> list[torch.Tensor]:
    return [step(ctx, model, optimizer, number) for number in steps]


def locals_of(model, optimizer) -> list[torch.Tensor]:
    found = [param.to_local() for param in model.parameters()]
    for state in optimizer.state.values():
        found += [value.to_local() for value in state.values() if isinstance(value, DTensor)]
    return [tensor for tensor in found if tensor.numel()]


@distributed(world_sizes=(1, 2, 3))
@pytest.mark.parametrize("transport", ["shm", "process_group", "streams"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, fsdp2x.optim.AdamW])
def test_training_goes_on(ctx, transport, make):
    model = Stack()
    twin = shard(ctx, copy.deepcopy(model), STACK_UNITS, transport=transport)
    ours = shard(ctx, model, STACK_UNITS, transport=transport)
    awake, optimizer = make(twin.parameters(), lr=1e-2), make(ours.parameters(), lr=1e-2)
    expected = train(twin, awake, ctx, range(6))
    got = train(ours, optimizer, ctx, range(2))
    for first in (2, 4):  # twice: the memory of the first sleep is used again
        objects = [id(param) for param in ours.parameters()]
        num_bytes = sum(tensor.nbytes for tensor in locals_of(ours, optimizer))
        freed = fsdp2x.sleep(ours, optimizer)
        assert freed >= num_bytes > 0
        for tensor in (next(iter(ours.parameters())).to_local(), ours.blocks[1].up.weight.to_local()):
            with pytest.raises(RuntimeError, match="asleep"):
                tensor.data_ptr()
        with pytest.raises(RuntimeError, match="asleep"):
            ours(inputs(ctx.rank))
        fsdp2x.wake(ours, optimizer)
        ours.reset_iter_state()
        assert [id(param) for param in ours.parameters()] == objects
        got += train(ours, optimizer, ctx, range(first, first + 2))
    same(got, expected, "losses")
    same(params(ours), params(twin), "parameters")


@distributed(world_sizes=(2,))
def test_what_the_engine_keeps_goes_too(ctx):
    streams.install()
    model = shard(ctx, Stack(), STACK_UNITS, transport="streams")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, ctx, range(2))
    root = model._get_fsdp_state().root
    before = root.stats()
    assert before["gather_slot_bytes"] > 0 and before["scratch_bytes"] > 0 and root.loans() == []
    fsdp2x.sleep(model, optimizer)
    asleep = root.stats()
    assert asleep["gather_slot_bytes"] == asleep["scratch_bytes"] == 0 and root.loans() == []
    fsdp2x.wake(model)
    train(model, optimizer, ctx, range(2))
    again = root.stats()
    assert again["gather_slot_bytes"] == before["gather_slot_bytes"]


@distributed(world_sizes=(2,))
def test_mistakes(ctx):
    model = shard(ctx, Stack(), STACK_UNITS)
    with pytest.raises(ValueError, match="nothing in this Stack is sharded"):
        fsdp2x.sleep(Stack())
    with pytest.raises(ValueError, match="not asleep"):
        fsdp2x.wake(model)
    model(inputs(ctx.rank)).sum().backward()
    with pytest.raises(ValueError, match="'blocks.0.up.weight' has a gradient"):
        fsdp2x.sleep(model)
    model.zero_grad()
    fsdp2x.sleep(model)
    with pytest.raises(ValueError, match="already asleep"):
        fsdp2x.sleep(model)
    fsdp2x.wake(model)
    model(inputs(ctx.rank)).sum().backward()


@distributed(world_sizes=(2,))
def test_before_the_first_forward(ctx):
    model = Stack()
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    shard(ctx, model, STACK_UNITS)
    fsdp2x.sleep(model)
    fsdp2x.wake(model)
    same(params(model), expected, "parameters")
