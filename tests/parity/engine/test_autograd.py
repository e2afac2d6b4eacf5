"""Uses of autograd on a unit: checkpoints, several calls, shared weights, hooks, in-place writes, and freezing."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness import distributed
from models import STACK_UNITS, Mlp, Stack, Twice, inputs
from reference import (
    TORCH_MINOR,
    both_transports,
    full,
    grads,
    only_fsdp2x,
    params,
    parity,
    shard,
    shard_stock,
    train_alike,
    trained,
)


def steps(ctx, model, num=2, loss_of=None):
    loss_of = loss_of or (lambda m, x: m(x).square().mean())
    return trained(model, lambda m, step: loss_of(m, inputs(ctx.rank, step)), num)


class Checkpointed(Stack):
    """Blocks recomputed in backward. outside: the checkpoint calls the unit; inside: the unit calls the checkpoint."""

    def __init__(self, where, reentrant):
        super().__init__()
        self.where, self.reentrant = where, reentrant
        if where == "inside":
            self.blocks = nn.ModuleList(CheckpointedMlp(block, reentrant) for block in self.blocks)

    def forward(self, x):
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.where == "outside" else block(x)
        return self.head(self.norm(x))


class CheckpointedMlp(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize(("where", "reentrant"), [*itertools.product(("outside", "inside"), (False, True))])
@both_transports
def test_activation_checkpointing(ctx, where, reentrant, transport):
    parity(ctx, Checkpointed(where, reentrant), lambda m: steps(ctx, m), STACK_UNITS, transport=transport)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
def test_checkpoint_around_several_units(ctx, reentrant, reshard):
    class Whole(Stack):
        def forward(self, x):
            return self.head(self.norm(checkpoint(self.chain, x.requires_grad_(), use_reentrant=reentrant)))

        def chain(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    parity(ctx, Whole(), lambda m: steps(ctx, m), STACK_UNITS, reshard_after_forward=reshard)


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("reshard", [True, False, None])
@both_transports
def test_a_unit_called_twice(ctx, reshard, transport):
    parity(
        ctx, Twice(), lambda m: steps(ctx, m), ("block", "other"), transport=transport, reshard_after_forward=reshard
    )


@distributed(world_sizes=(2,))
def test_root_called_twice_before_backward(ctx):
    parity(ctx, Stack(), lambda m: steps(ctx, m, loss_of=lambda m, x: (m(x) + m(2 * x)).square().mean()), STACK_UNITS)


@distributed(world_sizes=(2,))
def test_two_backwards_through_one_graph(ctx):
    def run(model):
        loss = model(inputs(ctx.rank)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return grads(model)

    parity(ctx, Stack(), run, STACK_UNITS, reshard_after_forward=False)


class SharedWeight(nn.Module):
    """The first block's Linear is called by the root as well: its weight is used inside and outside of its unit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(6, 6)
        self.block = Mlp()

    def forward(self, x):
        return self.shared(self.block(self.shared(x)))


@distributed(world_sizes=(2,))
@both_transports
def test_a_linear_shared_by_root_and_itself(ctx, transport):
    parity(ctx, SharedWeight(), lambda m: steps(ctx, m), ("shared", "block"), transport=transport)


class Tied(nn.Module):
    """One weight in two modules."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(6, 6), Mlp(), nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.block(self.first(x)))


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("units", [("block",), ("block", "first+last")])
@both_transports
def test_a_tied_weight_in_one_unit(ctx, units, transport):
    results = parity(ctx, Tied(), lambda m: steps(ctx, m), units, transport=transport)
    assert "last.weight" not in results[0][1]


@distributed(world_sizes=(2,))
def test_a_weight_tied_across_units_is_refused(ctx):
    stock_refuses = TORCH_MINOR >= 12
    if ctx.impl == "torch" and not stock_refuses:
        pytest.skip("this stock trains the copies of a tied weight apart")
    appliers = [lambda m, units: shard(ctx, m, units), *([shard_stock] if stock_refuses else [])]
    for apply in appliers:
        model = apply(Tied(), ("first", "last"))
        with pytest.raises((ValueError, RuntimeError), match="weight"):
            model(inputs(ctx.rank))


@distributed(world_sizes=(1, 2, 3))
@both_transports
def test_a_weight_tied_across_units_after_sharding(ctx, transport):
    """Loaders tie anew after sharding: both units see every update. Stock loses some where rows are uneven."""
    only_fsdp2x(ctx)
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


class Several(nn.Module):
    """A unit of several inputs, of which some need no gradient, and several outputs, one unused."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.join = nn.Linear(6, 6), Join()

    def forward(self, x):
        first, _ = self.join(self.before(x), x, scale=self.before(-x))
        return first


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x, y, *, scale):
        return self.a(x) * self.b(scale), self.b(y)


@distributed(world_sizes=(2,))
def test_several_inputs_and_an_unused_output(ctx):
    parity(ctx, Several(), lambda m: steps(ctx, m), ("join",))


@distributed(world_sizes=(2,))
@both_transports
def test_user_hooks_on_sharded_parameters(ctx, transport):
    """register_hook scales, register_post_accumulate_grad_hook sees the sharded gradient; both run once a step."""

    def run(model):
        seen = []
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.append((name, p.grad.to_local().clone(), p.grad.placements))
            )
        results = steps(ctx, model)
        return results, sorted(seen, key=lambda item: item[0])

    _, seen = parity(ctx, Stack(), run, STACK_UNITS, transport=transport)
    assert len(seen) == 2 * len(list(Stack().parameters()))


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


@distributed(world_sizes=(2,))
@both_transports
def test_a_branch_that_does_not_run(ctx, transport):
    """The same parameters get no gradient on any rank: `.grad` stays None."""

    class Branch(Stack):
        def forward(self, x):
            return self.head(self.norm(self.blocks[2](self.blocks[0].up(x)[:, :6])))

    parity(ctx, Branch(), lambda m: steps(ctx, m), ("blocks.0.up", "blocks.1", "blocks.2"), transport=transport)


class MaxNorm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 6, max_norm=0.5)
        self.head = nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(self.embed(ids))


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("reshard", [True, False])
@both_transports
def test_a_weight_written_in_place_in_forward(ctx, reshard, transport):
    """max_norm rescales the rows that this rank looks up: its own business, and gone after the next gather."""

    def run(model):
        ids = torch.tensor([[0, 1, 2]]) if ctx.rank == 0 else torch.tensor([[4, 5, 5]])
        results = []
        for step in range(3):
            loss = model((ids + step) % 7).square().mean()
            loss.backward()
            results.append([loss.detach(), grads(model), params(model)])
            model.zero_grad()
            model.unshard()
            model.embed.unshard()
            results.append(full(model.embed.weight))
            model.embed.reshard()
            model.reshard()
        return results

    results = parity(ctx, MaxNorm(), run, ("embed",), transport=transport, reshard_after_forward=reshard)
    assert (results[-1].norm(dim=1) > 0.6).any()


class Aside(nn.Module):
    """A unit runs without grad on the ranks of `without`."""

    def __init__(self, without):
        super().__init__()
        torch.manual_seed(0)
        self.without = without
        self.aside, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        with torch.set_grad_enabled(dist.get_rank() not in self.without):
            y = self.aside(x)
        return self.last(x + y)


@distributed(world_sizes=(2,))
@both_transports
@pytest.mark.parametrize("without", [(0,), (0, 1)])
def test_unused_parameters_as_zeros(ctx, transport, without):
    """Also of a unit that this rank ran without grad: others may have gradients of it."""

    def run(model):
        model.set_reduce_scatter_unused_params(True)
        return steps(ctx, model)

    parity(ctx, Aside(without), run, ("aside",), transport=transport)
