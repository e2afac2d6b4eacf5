"""fp16 with torch's gradient scaler, where only some rows or sums overflow: skipped steps are those of stock."""

import copy
import math

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import both_transports, full, params, parity, shard


def skips(ctx, model):
    """Whether a step with a scaler changes no parameter."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(inputs(ctx.rank)).float().square().mean()).backward()
    before = params(model)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return all(torch.equal(param, before[name]) for name, param in params(model).items()), params(model)


@distributed(world_sizes=(2,))
@both_transports
def test_an_infinity_in_the_rows_of_one_rank(ctx, transport):
    """Only the first rows of one weight overflow, which lie on rank 0 alone."""

    def run(model):
        def spoil(grad):
            if not spoiling:
                return grad
            grad = grad.clone()
            grad[0] = math.inf
            return grad

        # In the first forward only: the unsharded parameter is the same object in the next one.
        handle = model.head.register_forward_pre_hook(lambda module, args: module.weight.register_hook(spoil) and None)
        spoiling = True
        first = skips(ctx, model)
        handle.remove()
        spoiling = False
        return first, skips(ctx, model)

    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    (bad, _), (good, _) = parity(
        ctx, Stack(), run, STACK_UNITS, transport=transport, mp_policy=policy, reshard_after_forward=True
    )
    assert (bad, good) == (True, False)


@distributed(world_sizes=(2,))
@both_transports
def test_overflow_of_the_reduction(ctx, transport):
    """Gradients near the end of fp16's range: their mean exists although their sum does not."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    model = Stack()
    twin = copy.deepcopy(model)
    found = []
    for one in (shard(ctx, model, STACK_UNITS, transport=transport, mp_policy=policy), twin):
        one.head.bias.requires_grad_(True)
        loss = (one(inputs(0)).float() * 12000.0).sum()  # four rows: 48,000 per element of the bias
        loss.backward()
        found.append(full(one.head.bias.grad).float())
    assert torch.isfinite(found[0]).all()
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1.0)
