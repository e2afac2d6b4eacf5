"""One GPU: a few blocks of Llama and Qwen3 in the widths of 1B and 8B models, against FSDP2."""

import pytest
import torch

import one_gpu
from fsdp2x.sharding.wrap import plan_units
from harness import distributed
from one_gpu import POLICIES, hf_shapes, on_gpu
from reference import shard_auto, shard_stock

pytestmark = [one_gpu.needs_gpu, pytest.mark.shows("widths")]

LAYERS, TOKENS, STEPS = 2, 256, 3
# Weights, gradients, and moments of two models, both units, and running work.
BYTES_PER_ELEMENT = 2 * 16 * 1.5
# Allowed relative difference of gradients, because sums have another order and bf16 rounds them.
CLOSE = {"fp32": 1e-4, "bf16": 5e-2}


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the distance of two gradients, relative to the norm of the expected one."""
    return ((got - expected).norm() / expected.norm().clamp(min=1e-12)).item()


@distributed(world_sizes=(1,), timeout=300)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-1b", "llama-8b", "qwen3-8b"])
def test_steps_are_stocks(ctx, name, policy):
    mesh = on_gpu(ctx)
    shape = hf_shapes.SHAPES[name].with_layers(LAYERS)
    one_gpu.needs_memory(BYTES_PER_ELEMENT * shape.numel)
    options = {"mesh": mesh, "mp_policy": POLICIES[policy]}
    twin = hf_shapes.build(shape, "cuda")
    stock = shard_stock(twin, plan_units(twin), **options)
    ours = shard_auto(ctx, hf_shapes.build(shape, "cuda"), **options)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) for model in (stock, ours)]
    losses = []
    for step in range(STEPS):
        inputs = hf_shapes.batch(shape, TOKENS, "cuda", seed=step % 2)
        losses.append([])
        for model in (stock, ours):
            loss = model(**inputs).loss
            loss.backward()
            losses[-1].append(loss.item())
        for (path, param), other in zip(ours.named_parameters(), stock.parameters(), strict=True):
            far = distance(param.grad.to_local(), other.grad.to_local())
            assert far < CLOSE[policy], f"step {step}, {path}: {far:.1e}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1][1] == pytest.approx(losses[-1][0], rel=CLOSE[policy]), losses
    assert losses[2][1] < losses[0][1]
    del stock, ours, twin, model, optimizers, param, other
    torch.cuda.empty_cache()
