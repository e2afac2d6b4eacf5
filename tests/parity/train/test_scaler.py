"""fp16 with torch's gradient scaler: scales, skipped steps and parameters are those of stock."""

import copy
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import both_transports, full, params, parity, shard

POLICIES = {
    # fp16 sums are divided before and after the reduction, so that they do not overflow where stock's would not.
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16),
    "fp16_fp32": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
}
START = 2.0**12


def train(ctx, model, *, bad=(), num=5, clip=False):
    """Steps with a scaler that doubles after two good steps. `bad`: (step, rank) whose loss is infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=START, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for number in range(num):
        loss = model(inputs(ctx.rank, number)).float().square().mean()
        if (number, ctx.rank) in bad:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        norm = None
        if clip:
            scaler.unscale_(optimizer)
            norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)).nan_to_num(-1.0)
        before = params(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped = all(torch.equal(param, before[name]) for name, param in params(model).items())
        results.append([scaler.get_scale(), skipped, loss.detach().nan_to_num(), norm])
    return results, params(model), scaler.state_dict()


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("policy", POLICIES)
@both_transports
@pytest.mark.parametrize(
    ("bad", "scales"), [(set(), (1, 2, 2, 4, 4)), ({(1, 1), (3, 0)}, (1, 0.5, 0.5, 0.25, 0.25))], ids=["good", "bad"]
)
def test_scales_and_skipped_steps(ctx, policy, transport, bad, scales):
    """An infinity of step 1 on rank 1, of step 3 on rank 0: both ranks skip both steps and halve the scale."""

    def run(model):
        return train(ctx, model, bad=bad)

    results, *_ = parity(ctx, Stack(), run, STACK_UNITS, transport=transport, mp_policy=POLICIES[policy])
    assert [scale for scale, *_ in results] == [START * scale for scale in scales]
    assert [skipped for _, skipped, *_ in results] == [number in dict(bad) for number in range(5)]


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
        first = train(ctx, model, num=1)
        handle.remove()
        spoiling = False
        return first, train(ctx, model, num=1)

    bad, good = parity(
        ctx, Stack(), run, STACK_UNITS, transport=transport, mp_policy=POLICIES["fp16_fp32"], reshard_after_forward=True
    )
    assert (bad[0][0][1], good[0][0][1]) == (True, False)


@distributed(world_sizes=(2,))
@both_transports
def test_unscale_then_clip(ctx, transport):
    def run(model):
        return train(ctx, model, bad={(1, 0)}, clip=True)

    results, *_ = parity(ctx, Stack(), run, STACK_UNITS, transport=transport, mp_policy=POLICIES["fp16_fp32"])
    norms = [norm for *_, norm in results]
    assert norms[1] == -1 and all(0 < norm < 1e3 for number, norm in enumerate(norms) if number != 1), norms


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("policy", POLICIES)
@both_transports
def test_replicas(ctx, policy, transport):
    """2 x 2: the replica that has no infinity learns of it too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    loose = {"rtol": 2e-2, "atol": 2e-3} if policy == "fp16" else {"rtol": 1e-4, "atol": 1e-5}
    results, *_ = parity(
        ctx,
        Stack(),
        lambda m: train(ctx, m, bad={(1, 3)}),
        STACK_UNITS,
        transport=transport,
        mp_policy=POLICIES[policy],
        mesh=mesh,
        exact=loose,
    )
    assert [skipped for _, skipped, *_ in results] == [False, True, False, False, False]


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
