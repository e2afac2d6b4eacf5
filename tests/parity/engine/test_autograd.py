"""Uses of autograd on a unit: several calls, tied weights, hooks, in-place writes, and missing gradients."""

import pytest
import torch
from torch import nn

from harness import distributed
from models import STACK_UNITS, Mlp, Stack, inputs
from reference import (
    both_transports,
    parity,
    shard,
    train_alike,
    trained,
)


def steps(ctx, model, num=2, loss_of=None):
    loss_of = loss_of or (lambda m, x: m(x).square().mean())
    return trained(model, lambda m, step: loss_of(m, inputs(ctx.rank, step)), num)


class Tied(nn.Module):
    """One weight in two modules."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(6, 6), Mlp(), nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.block(self.first(x)))


@distributed(world_sizes=(1, 2, 3), only_fsdp2x=True)
@both_transports
def test_a_weight_tied_across_units_after_sharding(ctx, transport):
    """Loaders tie anew after sharding: both units see every update. Stock loses some where rows are uneven."""
    plain, model = Tied(), Tied()
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())  # untied while it is sharded
    shard(ctx, model, ("first", "last"), transport=transport)
    model.last.weight = model.first.weight
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    train_alike(ctx, plain, model, lambda m, *of: m(inputs(*of)).square().mean(), optimizers, rtol=1e-4, atol=1e-6)


class InPlace(nn.Module):
    """Writes to its input, which the caller continues to use."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, *others):
        x.mul_(2.0)
        return self.linear(sum(others, x))


class InPlaceCaller(nn.Module):
    def __init__(self, num_inputs: int):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.inplace, self.num_inputs = nn.Linear(6, 6), InPlace(), num_inputs

    def forward(self, x):
        x = self.before(x) * 1.0
        return self.inplace(x, *(x + i for i in range(1, self.num_inputs))) + x


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("num_inputs", [1, 2])
@both_transports
def test_in_place_input_reused_by_the_caller(ctx, num_inputs, transport):
    """Either the same gradients as stock or, like stock, an error: never silently wrong ones."""

    def run(model):
        try:
            return steps(ctx, model, num=1)
        except RuntimeError as error:
            return "raised" if "in-place" in str(error) or "inplace" in str(error) else str(error)

    parity(ctx, InPlaceCaller(num_inputs), run, ("before", "inplace"), transport=transport)


@distributed(world_sizes=(2,))
@both_transports
def test_user_hooks_inside_forward(ctx, transport):
    """Hooks on unsharded parameters and activations, registered while the unit runs."""

    class Hooked(Stack):
        def forward(self, x):
            self.seen = []
            x = self.blocks[0](x)
            x.register_hook(lambda grad: grad * 2.0)
            x = self.blocks[2](self.blocks[1](x))
            if self.head.weight.requires_grad and torch.is_grad_enabled():
                self.head.weight.register_hook(lambda grad: self.seen.append(tuple(grad.shape)))
            return self.head(self.norm(x))

    def run(model):
        return steps(ctx, model, num=1), model.seen

    _, seen = parity(ctx, Hooked(), run, STACK_UNITS, transport=transport)
    assert seen == [(3, 6)]


@distributed(world_sizes=(2,))
def test_post_accumulate_hooks_inside_forward(ctx):
    """A user's post-accumulate hook on an unsharded parameter replaces none of the engine's."""

    class Hooked(Stack):
        def forward(self, x):
            if not hasattr(self, "count"):
                self.count = 0
                self.head.weight.register_post_accumulate_grad_hook(self.bump)
            return super().forward(x)

        def bump(self, param):
            self.count += 1

    def run(model):
        return steps(ctx, model), model.count

    _, count = parity(ctx, Hooked(), run, STACK_UNITS)
    assert count == 2
