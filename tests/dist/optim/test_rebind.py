"""fsdp2x.rebind_optimizer: an optimizer built before sharding trains as one that was built after it."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, build, inputs, step
from reference import full, params, same, shard

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
}


def groups_of(model):
    decay = [param for param in model.parameters() if param.dim() > 1]
    rest = [param for param in model.parameters() if param.dim() == 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}]


def train(ctx, model, optimizer, steps=3):
    losses = [full(step(ctx, model, optimizer, number)) for number in range(steps)]
    return losses, params(model), full(list(optimizer.state.values()))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@distributed(world_sizes=(2, 3))
def test_trains_as_one_built_afterwards(ctx, name):
    after = shard(ctx, Stack(), STACK_UNITS)
    expected = train(ctx, after, OPTIMIZERS[name](groups_of(after)))
    model = Stack()
    optimizer = OPTIMIZERS[name](groups_of(model))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    num_params = len(list(model.parameters()))
    shard(ctx, model, STACK_UNITS)
    assert fsdp2x.rebind_optimizer(optimizer, model) == num_params
    assert [p for group in optimizer.param_groups for p in group["params"]] == [
        p for group in groups_of(model) for p in group["params"]
    ]
    same(train(ctx, model, optimizer), expected)
    scheduler.step()
    assert fsdp2x.rebind_optimizer(optimizer, model) == 0


@distributed(world_sizes=(2,))
def test_state_that_exists_is_cut(ctx):
    """Moments of steps on the whole model go on as if they had been sharded from the start."""

    def one_step(model, optimizer):
        model(inputs(0)).square().mean().backward()  # the same on every rank
        optimizer.step()
        optimizer.zero_grad()

    after, model = Stack(), Stack()
    shard(ctx, after, STACK_UNITS)
    expected_optimizer = OPTIMIZERS["adamw"](groups_of(after))
    one_step(after, expected_optimizer)
    optimizer = OPTIMIZERS["adamw"](groups_of(model))
    one_step(model, optimizer)
    shard(ctx, model, STACK_UNITS)
    fsdp2x.rebind_optimizer(optimizer, model)
    for param in model.parameters():
        state = optimizer.state[param]
        assert isinstance(state["exp_avg"], DTensor) and state["exp_avg"].placements == param.placements
        assert state["exp_avg"].to_local().shape == param.to_local().shape and not isinstance(state["step"], DTensor)
        assert state["exp_avg"].to_local().untyped_storage().nbytes() <= param.to_local().numel() * 4
    same(train(ctx, model, optimizer), train(ctx, after, expected_optimizer), rtol=1e-6, atol=1e-7)


@distributed(world_sizes=(2,))
def test_old_parameters_are_freed(ctx):
    model = Stack()
    optimizer = OPTIMIZERS["sgd"](groups_of(model))
    old = [weakref.ref(param) for param in model.parameters()]
    shard(ctx, model, STACK_UNITS)
    gc.collect()
    assert all(ref() is not None for ref in old), "the optimizer keeps them"
    fsdp2x.rebind_optimizer(optimizer, model)
    gc.collect()
    assert all(ref() is None for ref in old)


@distributed(world_sizes=(2,))
def test_tied_ignored_and_other_models(ctx):
    tied, other = build("qwen3"), Stack()
    ignored = tied.model.norm.weight
    optimizer = torch.optim.SGD([*tied.parameters(), *other.parameters()], lr=0.1)
    num_tied, num_other = len(list(tied.parameters())), len(list(other.parameters()))
    fsdp2x.fully_shard(tied, ignored_params={ignored})
    assert fsdp2x.rebind_optimizer(optimizer, tied) == num_tied - 1
    group = optimizer.param_groups[0]["params"]
    assert {id(p) for p in group} == {id(p) for p in (*tied.parameters(), *other.parameters())}
    assert any(p is ignored for p in group)
    shard(ctx, other, STACK_UNITS)
    assert fsdp2x.rebind_optimizer(optimizer, other) == num_other
    assert all(isinstance(p, DTensor) for p in group if p is not ignored)


@distributed(world_sizes=(2,))
def test_lbfgs_keeps_the_list_itself(ctx):
    model = Stack()
    optimizer = torch.optim.LBFGS(model.parameters())
    shard(ctx, model, STACK_UNITS)
    fsdp2x.rebind_optimizer(optimizer, model)
    assert optimizer._params is optimizer.param_groups[0]["params"]
    assert all(isinstance(param, DTensor) for param in optimizer._params)


@distributed(world_sizes=(2,))
def test_refusals_leave_the_optimizer_alone(ctx):
    model = Stack()
    optimizer = OPTIMIZERS["sgd"](groups_of(model))
    with pytest.raises(ValueError, match="rebind_optimizer: nothing in this Stack"):
        fsdp2x.rebind_optimizer(optimizer, model)
    stranger = OPTIMIZERS["sgd"](copy.deepcopy(model).parameters())
    factored = model.blocks[0].up.weight
    optimizer.state[factored]["exp_avg_sq_row"] = torch.zeros(factored.shape[0])
    held = [list(group["params"]) for group in optimizer.param_groups]
    shard(ctx, model, STACK_UNITS)
    with pytest.raises(ValueError, match="none of the parameters of this SGD"):
        fsdp2x.rebind_optimizer(stranger, model)
    with pytest.raises(ValueError, match=r"'exp_avg_sq_row' of .*'blocks.0.up.weight' has shape \(7,\)"):
        fsdp2x.rebind_optimizer(optimizer, model)
    for group, params_before in zip(optimizer.param_groups, held, strict=True):
        assert all(a is b for a, b in zip(group["params"], params_before, strict=True))


@distributed(world_sizes=(2,))
def test_a_stranger_is_not_taken_for_a_dead_parameter(ctx):
    """Ids of freed parameters are used again: the records must not go by them."""
    model = nn.Linear(64, 64)
    old = weakref.ref(model.weight)
    shard(ctx, model)
    gc.collect()
    assert old() is None
    strangers = [nn.Parameter(torch.zeros(64, 64)) for _ in range(20)]
    optimizer = torch.optim.SGD([*model.parameters(), *strangers], lr=0.1)
    assert fsdp2x.rebind_optimizer(optimizer, model) == 0
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"][2:], strangers, strict=True))
