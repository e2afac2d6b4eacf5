"""Optimizers whose steps cannot change the model: built before fully_shard, or from gathered parameters."""

import warnings

import pytest
import torch
from torch import nn

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import params, same, shard

OPTIMIZERS = {
    "torch.AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "torch.SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "torch.Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, foreach=False),
    "AdamW": lambda groups: fsdp2x.optim.AdamW(groups, lr=1e-2),
    "local": lambda groups: fsdp2x.local_optimizer(torch.optim.NAdam(groups, lr=1e-2)),
}
OURS = ("AdamW", "local")


def step(ctx, model, optimizer, number=0):
    def closure():
        optimizer.zero_grad()
        loss = model(inputs(ctx.rank, number)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def gathered(ctx, how):
    """A model some of whose parameters are gathered."""
    model = shard(ctx, Stack(), STACK_UNITS)
    if how == "forward":
        model(inputs(ctx.rank))
    elif how == "unshard":
        model.unshard()
    elif how == "unshard after a step":
        model(inputs(ctx.rank)).sum().backward()
        model.zero_grad()
        model.blocks[1].unshard()
    return model


GATHERED = ("forward", "unshard", "unshard after a step")


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_built_before_fully_shard(ctx, name):
    """An error at the step, as often as it is tried; rebind_optimizer mends it."""
    model = Stack()
    optimizer = OPTIMIZERS[name](model.parameters())
    shard(ctx, model, STACK_UNITS)
    before = params(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"16 parameter\(s\) from before fully_shard") as error:
            step(ctx, model, optimizer)
        assert "rebind_optimizer(optimizer, model)" in str(error.value)
        model.zero_grad()
    same(params(model), before)
    fsdp2x.rebind_optimizer(optimizer, model)
    twin = shard(ctx, Stack(), STACK_UNITS)
    expected = OPTIMIZERS[name](twin.parameters())
    for number in range(2):
        step(ctx, model, optimizer, number)
        step(ctx, twin, expected, number)
    same(params(model), params(twin))


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", GATHERED)
def test_built_while_parameters_are_gathered(ctx, name, how):
    """Ours refuse; torch's step the others, as with upstream, and warn once."""
    model = gathered(ctx, how)
    if name in OURS:
        with pytest.raises(ValueError, match="gathered parameter.*unshard") as error:
            OPTIMIZERS[name](model.parameters())
        assert "'head.weight'" in str(error.value) or "'norm.weight'" in str(error.value) or how != "forward"
        optimizer = OPTIMIZERS[name]([nn.Parameter(torch.zeros(2))])
        with pytest.raises(ValueError, match="gathered parameter") if name != "local" else warnings.catch_warnings():
            optimizer.add_param_group({"params": list(model.parameters())})
        assert len(optimizer.param_groups) == (2 if name == "local" else 1)
        return
    optimizer = OPTIMIZERS[name](model.parameters())
    model.reshard()
    model.blocks[1].reshard()
    with pytest.warns(UserWarning, match="gathered parameter") as caught:
        step(ctx, model, optimizer)
    assert "rebind_optimizer(optimizer, model)" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(ctx, model, optimizer)
    assert fsdp2x.rebind_optimizer(optimizer, model) == 4
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert held == {id(param) for param in model.parameters()}


@distributed(world_sizes=(1,))
def test_what_is_no_business_of_ours(ctx):
    """Plain parameters next to sharded ones do not warn, and neither do gathered ones with a gradient set by hand."""
    plain = nn.Linear(6, 3)
    model = shard(ctx, Stack(), STACK_UNITS)
    optimizer = torch.optim.SGD([*plain.parameters(), *model.parameters()], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (model(inputs(ctx.rank)).square().mean() + plain(inputs(0)).sum()).backward()
        optimizer.step()
        with fsdp2x.unsharded(model):
            values = list(model.parameters())
            for value in values:
                value.grad = torch.ones_like(value)
            before = values[0].detach().clone()
            torch.optim.SGD(values, lr=0.1).step()
            assert torch.equal(values[0], before - 0.1)


@distributed(world_sizes=(1,))
def test_looked_at_once_and_again_when_something_is_new(ctx):
    """A step costs one comparison; a model that is sharded later is noticed."""
    first, second = Stack(), Stack()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    shard(ctx, first, STACK_UNITS)
    fsdp2x.rebind_optimizer(optimizer, first)
    step(ctx, first, optimizer)
    shard(ctx, second, STACK_UNITS)
    with pytest.warns(UserWarning, match=r"16 parameter\(s\) from before fully_shard"):
        step(ctx, first, optimizer)
    third = gathered(ctx, "forward")
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    step(ctx, first, optimizer)
    optimizer.add_param_group({"params": [third.head.weight]})
    with pytest.warns(UserWarning, match="1 gathered parameter"):
        step(ctx, first, optimizer)
