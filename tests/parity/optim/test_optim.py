"""Optimizers, clipping, accumulation and zero_grad: bit for bit what stock computes."""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from harness import distributed
from models import STACK_UNITS, Stack, inputs, train
from reference import both_transports, changes, full, grads, params, parity

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
def test_optimizer_steps(ctx, name, transport):
    def run(model):
        optimizer = OPTIMIZERS[name](model.parameters())
        losses = train(ctx, model, optimizer, (0, 1, 0, 1))
        return losses, params(model), full(optimizer.state_dict()["state"])

    losses, *_ = parity(ctx, Stack(), run, STACK_UNITS, transport=transport)
    assert changes(losses)


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
@pytest.mark.parametrize("foreign", [False, True])
def test_gradients_are_accumulated_into_the_same_tensor(ctx, foreign):
    """The same holds for a tensor that other code assigned, over backwards without zero_grad."""

    def run(model):
        if foreign:
            for param in model.parameters():
                param.grad = torch.ones_like(param)
        else:
            loss_of(model, ctx.rank, 0).backward()
        first = [param.grad for param in model.parameters()]
        loss_of(model, ctx.rank, 1).backward()
        return [a is param.grad for a, param in zip(first, model.parameters(), strict=True)], grads(model)

    identical, _ = parity(ctx, Stack(), run, STACK_UNITS)
    assert all(identical)


@distributed(world_sizes=(2, 3))
@both_transports
def test_optimizer_in_backward(ctx, transport):
    """A sharded parameter's post-accumulate hook steps and drops the gradient while backward continues."""

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
