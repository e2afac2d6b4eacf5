"""unshard() and settings before the first forward: which module is the root is still open, as with upstream."""

from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from fsdp2x.base import rendezvous
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import both_transports, grads, mean_of_ranks, only_fsdp2x, params, parity, same, shard


def sharded(model):
    return [isinstance(param, DTensor) for param in model.parameters()]


def roots(model):
    return [module._get_fsdp_state()._is_root for module in (model, *model.blocks)]


def unshard(model, early):
    """Unshards modules. "!": resharded again at once."""
    for path in early:
        module = model.get_submodule(path.strip("!"))
        module.unshard()
        if path.startswith("!"):
            module.reshard()


def train(ctx, model, num=3):
    """Returns the visible results of three steps. Builds the optimizer first, unless it would have no parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if any(sharded(model)) else None
    seen = [roots(model), sharded(model)]
    for number in range(num):
        output = model(inputs(ctx.rank, number))
        seen += [roots(model), sharded(model)]
        output.square().mean().backward()
        seen += [sharded(model), output.detach(), grads(model)]
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
    return [*seen, params(model)]


@distributed(world_sizes=(2,))
@both_transports
def test_a_later_handle_is_waited_for_behind_its_forward(ctx, transport):
    def run(model):
        seen = train(ctx, model, num=1)
        for path in ("blocks.1", ""):
            handle = model.get_submodule(path).unshard(async_op=True)
            loss = model(inputs(ctx.rank, 7)).square().mean()
            handle.wait()
            seen.append(sharded(model))
            loss.backward()
            seen += [sharded(model), grads(model)]
        return seen

    parity(ctx, Stack(), run, STACK_UNITS, transport=transport)


@distributed(world_sizes=(2,))
@both_transports
def test_gradients_of_gathered_parameters_that_were_used_before_the_first_forward(ctx, transport):
    def run(model):
        unshard(model, ["", "blocks.1"])
        regular = model.head.weight.square().sum() + model.blocks[1].up.weight.sum()
        (model(inputs(ctx.rank)).square().mean() + regular).backward()
        return grads(model)

    def loss_of(plain, rank):
        regular = plain.head.weight.square().sum() + plain.blocks[1].up.weight.sum()
        return plain(inputs(rank)).square().mean() + regular

    only_fsdp2x(ctx)  # upstream loses the whole gradient of blocks.1.up.weight
    plain = Stack()
    mean_of_ranks(plain, loss_of, ctx.world)
    same(run(shard(ctx, Stack(), STACK_UNITS, transport=transport)), grads(plain), rtol=1e-5, atol=1e-6)


@distributed(world_sizes=(2,))
@both_transports
def test_a_model_that_changes_its_dtype_behind_an_early_unshard(ctx, transport):
    only_fsdp2x(ctx)  # upstream fails
    results = []
    for early in ([], ["!", "!blocks.1"]):
        model = shard(ctx, Stack(), STACK_UNITS, transport=transport)
        unshard(model, early)
        model.to(torch.float64)
        loss = model(inputs(ctx.rank).double()).square().mean()
        loss.backward()
        results.append((loss.detach(), grads(model)))
    same(results[1], results[0])


@distributed(world_sizes=(2,))
def test_manual_finalization_of_a_unit_that_is_no_root(ctx):
    model = shard(ctx, Stack(), STACK_UNITS)
    if not hasattr(model, "set_manual_backward_finalization"):
        pytest.skip("this torch has no manual finalization")
    model.blocks[0].set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError, match="must be called on the root"):
        model(inputs(ctx.rank))


@distributed(world_sizes=(2,))
def test_a_first_forward_that_cannot_be_is_tried_again(ctx):
    """A transport that is not possible: the same error each time, and none of it stays."""
    only_fsdp2x(ctx)
    model = shard(ctx, Stack(), STACK_UNITS, transport="shm")
    with mock.patch.object(rendezvous.GroupInfo, "why_not_shared", "of this test"):
        for call in (lambda: model(inputs(ctx.rank)), lambda: model.blocks[0].unshard(), lambda: model(inputs(0))):
            with pytest.raises(ValueError, match="of this test"):
                call()
            assert roots(model) == [None] * 4 and all(sharded(model))
    twin = shard(ctx, Stack(), STACK_UNITS)
    same(train(ctx, model), train(ctx, twin))
