"""HuggingFace models, wrapped by the one call: bitwise as stock at two ranks, within 1e-6 of the unsharded model."""

import copy

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import models
from fsdp2x.sharding.wrap import plan_units
from harness import distributed
from reference import (
    and_streams,
    both_transports,
    changes,
    grads,
    mean_of_ranks,
    params,
    same,
    shard_auto,
    shard_stock,
    skip_transport,
)

PAPER_MODELS = ("llama", "qwen3", "gpt2", "mixtral", "qwen3_moe")


def train(model, optimizer, name, rank, num_steps):
    losses = []
    for step in range(num_steps):
        loss = model(**models.batch(name, 10 * (step % 2) + rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)


@distributed(world_sizes=(2,), timeout=120)
@pytest.mark.parametrize("name", PAPER_MODELS)
@both_transports
@pytest.mark.parametrize("num_steps", [6, pytest.param(20, marks=pytest.mark.full)])
def test_adamw_steps_bitwise_as_stock(ctx, name, transport, num_steps):
    skip_transport(ctx, transport)
    model = models.build(name)
    twin = shard_stock(copy.deepcopy(model), plan_units(model))
    expected = train(twin, adamw(twin), name, ctx.rank, num_steps)
    ours = shard_auto(ctx, model, transport=transport)
    got = train(ours, adamw(ours), name, ctx.rank, num_steps)
    same(got, expected, "loss")
    same(params(ours), params(twin), "parameters")
    assert changes(expected) and expected[-1] < expected[0]


@distributed(world_sizes=(1, 2, 3, 4), timeout=120)
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gpt2", "qwen3_moe", pytest.param("mixtral", marks=pytest.mark.full)]
)
@both_transports
@pytest.mark.parametrize("num_steps", [6, pytest.param(20, marks=pytest.mark.full)])
def test_adamw_steps_against_the_unsharded_model(ctx, name, transport, num_steps):
    """Each rank has its own data. Sizes that no rank count divides: 37 rows of vocabulary, 16 and 24 of the rest.

    Shared memory adds the gradients in rank order, as the reference does, and is equal to it bit for bit.
    """
    skip_transport(ctx, transport)
    reference = models.build(name)
    ours = shard_auto(ctx, copy.deepcopy(reference), transport=transport)
    optimizers = adamw(reference), adamw(ours)
    bitwise = ctx.impl == "fsdp2x" and transport == "shm"
    losses = []
    for step in range(num_steps):
        expected = mean_of_ranks(
            reference, lambda m, rank, step=step: m(**models.batch(name, 10 * (step % 2) + rank)).loss, ctx.world
        )
        loss = ours(**models.batch(name, 10 * (step % 2) + ctx.rank)).loss
        loss.backward()
        exact = {} if bitwise else {"rtol": 0, "atol": 1e-6}
        same(loss.detach(), expected[ctx.rank], f"loss of step {step}", **exact)
        if step in (0, num_steps - 1):
            same(grads(ours), grads(reference), f"gradients of step {step}", **exact and {"rtol": 1e-3, "atol": 1e-5})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(expected.mean())
    if bitwise:
        same(params(ours), params(reference), "parameters after the steps")
    assert changes(losses) and losses[-1] < losses[0] - 0.1


@distributed(world_sizes=(2, 3), timeout=120)
@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe", "t5", "bert"])
@and_streams
def test_gradients_are_the_mean_of_the_ranks(ctx, name, transport):
    """Also for models whose ties join three and four modules in one unit."""
    skip_transport(ctx, transport)
    reference = models.build(name)
    ours = shard_auto(ctx, copy.deepcopy(reference), transport=transport)
    mean_of_ranks(reference, lambda m, rank: m(**models.batch(name, rank)).loss, ctx.world)
    ours(**models.batch(name, ctx.rank)).loss.backward()
    same(grads(ours), grads(reference), "gradients", rtol=1e-4, atol=1e-6)
    assert any(grad is not None and grad.abs().max() > 1e-3 for grad in grads(ours).values())


@distributed(world_sizes=(2,), timeout=120)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@both_transports
def test_bf16_compute_fp32_reduce_as_stock(ctx, name, transport):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    skip_transport(ctx, transport)
    model = models.build(name)
    twin = shard_stock(copy.deepcopy(model), plan_units(model), mp_policy=policy)
    expected = train(twin, adamw(twin), name, ctx.rank, 5)
    ours = shard_auto(ctx, model, transport=transport, mp_policy=policy)
    got = train(ours, adamw(ours), name, ctx.rank, 5)
    same(got, expected, "loss")
    same(params(ours), params(twin), "parameters")
    assert changes(expected) and all(param.dtype == torch.float32 for param in ours.parameters())


@distributed(world_sizes=(2,))
@and_streams
def test_bf16_parameters_reduce_in_fp32_as_stock(ctx, transport):
    """`.grad` has the parameter's dtype although the sum was made in fp32."""
    skip_transport(ctx, transport)
    model = models.build("qwen3", dtype=torch.bfloat16)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    twin = shard_stock(copy.deepcopy(model), plan_units(model), mp_policy=policy)
    ours = shard_auto(ctx, model, transport=transport, mp_policy=policy)
    for step in range(2):
        results = []
        for each in (twin, ours):
            each(**models.batch("qwen3", 10 * step + ctx.rank)).loss.backward()
            results.append(grads(each))
        same(results[1], results[0], f"gradients after {step + 1} backwards")
