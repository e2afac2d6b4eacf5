"""torch.func.functional_call on a sharded model: refused where a unit would ignore its tensors, right elsewhere."""

import pytest
import torch
from torch.func import functional_call

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import both_transports, grads, only_fsdp2x, same, shard

NAMES = {
    "all": list(dict(Stack().named_parameters())),
    "of the root": ["head.weight"],
    "of a unit": ["blocks.1.up.bias"],
    "of the first unit": ["blocks.0.down.weight"],
}
CUTS = {"units": STACK_UNITS, "one unit": ()}


def others(which):
    generator = torch.Generator().manual_seed(3)
    shapes = dict(Stack().named_parameters())
    return {name: torch.randn(shapes[name].shape, generator=generator) for name in NAMES[which]}


def loss_of(ctx, model, number):
    return model(inputs(ctx.rank, number)).square().mean()


def step(ctx, model, number):
    loss = loss_of(ctx, model, number)
    loss.backward()
    found = grads(model)
    model.zero_grad()
    return loss.detach(), found


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("reshard", [True, None])
@both_transports
def test_other_tensors_are_refused_by_name(ctx, cut, reshard, transport):
    """They raise before and after the first step, and do not affect the next call."""
    only_fsdp2x(ctx)
    options = {"transport": transport, "reshard_after_forward": reshard}
    twin = shard(ctx, Stack(), CUTS[cut], **options)
    expected = [step(ctx, twin, number) for number in range(3)]
    for which in NAMES:
        model = shard(ctx, Stack(), CUTS[cut], **options)
        got = []
        for number in range(3):
            for grad in (True, False):
                with pytest.raises(RuntimeError) as error, torch.set_grad_enabled(grad):
                    functional_call(model, others(which), (inputs(ctx.rank),))
                message = str(error.value)
                assert "fsdp2x.unsharded" in message and f"rank {ctx.rank}" in message, message
                assert any(f"'{name}'" in message for name in NAMES[which]), message
            got.append(step(ctx, model, number))
        same(got, expected, which)


@distributed(world_sizes=(2,))
@both_transports
def test_other_tensors_while_everything_is_gathered(ctx, transport):
    """The way out that the error names: results and gradients are the unsharded model's."""
    only_fsdp2x(ctx)
    model, plain = shard(ctx, Stack(), STACK_UNITS, transport=transport), Stack()
    expected = step(ctx, shard(ctx, Stack(), STACK_UNITS, transport=transport), 5)
    for which in NAMES:
        given = {name: value.requires_grad_() for name, value in others(which).items()}
        wanted = {name: value.detach().clone().requires_grad_() for name, value in given.items()}
        with fsdp2x.unsharded(model):
            got = functional_call(model, given, (inputs(ctx.rank),))
            got.square().mean().backward()
        reference = functional_call(plain, wanted, (inputs(ctx.rank),))
        reference.square().mean().backward()
        same(got.detach(), reference.detach(), which)
        same([one.grad for one in given.values()], [one.grad for one in wanted.values()], which)
        model.zero_grad()
        same(step(ctx, model, 5), expected, which)


@distributed(world_sizes=(2,))
@both_transports
def test_a_parameter_that_was_replaced_for_good(ctx, transport):
    """Assigned to the module after the first forward: the engine would go on with the old one."""
    only_fsdp2x(ctx)
    model = shard(ctx, Stack(), STACK_UNITS, transport=transport)
    step(ctx, model, 0)
    old = model.blocks[1].up.weight
    model.blocks[1].up.weight = torch.nn.Parameter(old.detach().clone())
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight' was replaced") as error:
        loss_of(ctx, model, 1)
    assert "full_state_dict=True)) or fsdp2x.load_hf" in str(error.value)
    model.blocks[1].up.weight = old
    step(ctx, model, 1)
    expected = loss_of(ctx, model, 2)
    # The same parameter at another place: the unit follows it.
    torch.nn.utils.parametrize.register_parametrization(model.blocks[1].up, "weight", torch.nn.Identity())
    same(loss_of(ctx, model, 2), expected, "loss")
