"""Optimizers, clipping, accumulation and zero_grad: bit for bit what stock computes."""

import copy

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from harness import distributed
from models import STACK_UNITS, Stack, inputs, train
from reference import both_transports, changes, full, grads, mean_of_ranks, params, parity, same, shard

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


def loss_of(model, rank, step=0):
    return model(inputs(rank, step)).square().mean()


@distributed(world_sizes=(1, 2, 3))
@pytest.mark.parametrize("name", OPTIMIZERS)
@both_transports
@pytest.mark.each_value
def test_optimizer_steps(ctx, name, transport):
    def run(model):
        optimizer = OPTIMIZERS[name](model.parameters())
        losses = train(ctx, model, optimizer, (0, 1, 0, 1))
        return losses, params(model), full(optimizer.state_dict()["state"])

    losses, *_ = parity(ctx, Stack(), run, STACK_UNITS, transport=transport)
    assert changes(losses)


@distributed(world_sizes=(1, 2, 3, 4))
@both_transports
@pytest.mark.each_value
def test_gradients_equal_the_mean_of_the_unsharded_ones(ctx, transport):
    """Widths of 3, 6 and 7 rows: short and empty shards."""
    reference = Stack()
    ours = shard(ctx, copy.deepcopy(reference), STACK_UNITS, transport=transport)
    losses = mean_of_ranks(reference, loss_of, ctx.world)
    loss = loss_of(ours, ctx.rank)
    loss.backward()
    same(loss.detach(), losses[ctx.rank], "loss", rtol=1e-6, atol=1e-6)
    same(grads(ours), grads(reference), "gradients", rtol=1e-5, atol=1e-6)
    if ctx.world == 4:
        rows = [param.to_local().shape[0] for name, param in ours.named_parameters() if name == "head.weight"]
        assert rows == [1 if ctx.rank < 3 else 0]


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@both_transports
@pytest.mark.each_value
def test_clip_grad_norm(ctx, norm_type, transport):
    def run(model):
        loss_of(model, ctx.rank).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=norm_type)
        return full(norm), grads(model)

    norm, _ = parity(ctx, Stack(), run, STACK_UNITS, transport=transport)
    assert norm > 0.05
    reference = Stack()
    mean_of_ranks(reference, loss_of, ctx.world)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type=norm_type)
    same(norm, expected, "norm", rtol=1e-5, atol=1e-7)


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("sync", ["always", "last", "last_twice"])
@both_transports
@pytest.mark.each_value
def test_accumulation(ctx, sync, transport):
    """Four micro-batches; without sync the gradients stay unreduced until the last one."""

    def run(model):
        seen = []
        for repeat in range(2 if sync == "last_twice" else 1):
            for step in range(4):
                model.set_requires_gradient_sync(sync == "always" or step == 3)
                loss_of(model, ctx.rank, 4 * repeat + step).backward()
                seen.append([param.grad is None for param in model.parameters()])
        return seen, grads(model)

    seen, _ = parity(ctx, Stack(), run, STACK_UNITS, transport=transport)
    assert all(seen[0]) == (sync != "always") and not any(seen[3])


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("reduce", ["float32", "bfloat16"])
@both_transports
def test_accumulation_in_low_precision(ctx, reduce, transport):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, reduce))

    def run(model):
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            loss_of(model, ctx.rank, step).backward()
        return grads(model)

    # Shared memory sums bf16 gradients in fp32 and rounds once; upstream's backend rounds each addition.
    exact = {"rtol": 2e-2, "atol": 1e-3} if (reduce, transport) == ("bfloat16", "shm") else None
    parity(ctx, Stack(), run, STACK_UNITS, transport=transport, mp_policy=policy, exact=exact)


@distributed(world_sizes=(2,))
def test_foreign_gradients_are_accumulated_into(ctx):
    """A gradient tensor assigned by somebody else is added to in place, as stock does."""

    def run(model):
        foreign = []
        for param in model.parameters():
            param.grad = torch.ones_like(param)
            foreign.append(param.grad)
        loss_of(model, ctx.rank).backward()
        identical = [param.grad is grad for param, grad in zip(model.parameters(), foreign, strict=True)]
        return identical, grads(model)

    identical, _ = parity(ctx, Stack(), run, STACK_UNITS)
    assert all(identical)


@distributed(world_sizes=(2, 3))
@both_transports
@pytest.mark.each_value
def test_optimizer_in_backward(ctx, transport):
    """A sharded parameter's post-accumulate hook steps and drops the gradient while backward goes on."""

    def run(model):
        order = []
        optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
        names = {param: name for name, param in model.named_parameters()}

        def step(param):
            order.append(names[param])
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        losses = []
        for i in range(3):
            loss = loss_of(model, ctx.rank, i % 2)
            loss.backward()
            losses.append(loss.detach())
        # The root and the unit whose input needs no gradient both end with backward itself, in either order.
        return losses, sorted(order), order[:8], [param.grad is None for param in model.parameters()], params(model)

    losses, order, _, none, _ = parity(ctx, Stack(), run, STACK_UNITS, transport=transport)
    assert changes(losses) and all(none) and len(order) == 3 * len(none)


@distributed(world_sizes=(2,))
def test_sgd_with_accumulated_gradients_held_by_the_user(ctx):
    """`.grad` is the same tensor over several backwards without zero_grad, and its value the sum."""

    def run(model):
        loss_of(model, ctx.rank, 0).backward()
        first = [param.grad for param in model.parameters()]
        loss_of(model, ctx.rank, 1).backward()
        return [a is param.grad for a, param in zip(first, model.parameters(), strict=True)], grads(model)

    identical, _ = parity(ctx, Stack(), run, STACK_UNITS)
    assert all(identical)
