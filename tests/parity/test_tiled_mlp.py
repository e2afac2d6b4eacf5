"""Tiled MLPs below fully_shard: steps of one process, each parameter reduced once, checkpointing, LoRA."""

import copy

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2x
import models
from fsdp2x.models.tiled_mlp import apply_tiled_mlp
from harness import distributed
from reference import both_transports, grads, mean_of_ranks, only_fsdp2x, params, same

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def loss_of(name, step):
    return lambda model, rank: model(**models.batch(name, 10 * step + rank)).loss


def three_steps(ctx, reference, ours, name, **tolerance):
    """The sharded model on each rank's data against one process on everybody's."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=5e-3) for model in (reference, ours)]
    for step in range(3):
        expected = mean_of_ranks(reference, loss_of(name, step), ctx.world)
        loss = loss_of(name, step)(ours, ctx.rank)
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected[ctx.rank], **tolerance)
        same(grads(ours), grads(reference), f"gradients of step {step}", **tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(params(ours), params(reference), "parameters", **tolerance)


@distributed(world_sizes=(3,))
@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.full)])
@both_transports
def test_three_steps_against_one_process(ctx, name, transport):
    only_fsdp2x(ctx)
    reference = models.build(name)
    ours = copy.deepcopy(reference)
    assert apply_tiled_mlp(ours, 4) == 2
    three_steps(ctx, reference, fsdp2x.fully_shard(ours, transport=transport), name, **TOLERANCE)


@distributed(world_sizes=(2,))
def test_reduced_once_and_after_sharding(ctx):
    """Tiling a sharded model; the MLP a unit of its own; accumulation without synchronisation."""
    only_fsdp2x(ctx)
    reference = models.build("llama")
    ours = fsdp2x.fully_shard(copy.deepcopy(reference), auto_wrap=["LlamaMLP", "LlamaDecoderLayer"])
    assert apply_tiled_mlp(ours, 3) == 2
    reduced = []
    for layer in ours.model.layers:
        layer.mlp.set_all_reduce_hook(lambda rows: reduced.append(rows.numel()))
        layer.mlp.down_proj.weight.register_post_accumulate_grad_hook(lambda param: reduced.append("param"))
    three_steps(ctx, reference, ours, "llama", **TOLERANCE)
    assert len(reduced) == 3 * 2 * 2 and reduced.count("param") == 3 * 2
    mean_of_ranks(reference, lambda m, r: loss_of("llama", 0)(m, r) + loss_of("llama", 1)(m, r), ctx.world)
    reduced.clear()
    for micro in range(2):
        with fsdp2x.accumulate(ours, last=micro == 1):
            loss_of("llama", micro)(ours, ctx.rank).backward()
    same(grads(ours), grads(reference), "accumulated", **TOLERANCE)
    assert len(reduced) == 2 * 2


@distributed(world_sizes=(2,))
def test_checkpointing_mixed_precision_and_frozen_weights(ctx):
    only_fsdp2x(ctx)
    reference, ours = (models.build("llama", use_cache=False) for _ in range(2))
    for model in (reference, ours):
        model.model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
    apply_tiled_mlp(ours, 4)
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    ours.train()
    three_steps(ctx, reference, fsdp2x.fully_shard(ours), "llama", **TOLERANCE)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, tiled = (fsdp2x.fully_shard(models.build("llama"), mp_policy=policy) for _ in range(2))
    apply_tiled_mlp(tiled, 4)
    for model in (plain, tiled):
        loss_of("llama", 0)(model, ctx.rank).backward()
    same(grads(tiled), grads(plain), "bfloat16", rtol=2e-2, atol=2e-3)


@distributed(world_sizes=(2,))
def test_lora_inside_of_the_mlps(ctx):
    pytest.importorskip("peft")
    only_fsdp2x(ctx)

    def make():
        torch.manual_seed(0)
        model = fsdp2x.add_lora(models.build("llama"), {"r": 3, "target_modules": ["gate_proj", "down_proj", "q_proj"]})
        for name, param in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param, std=0.2)
        return model

    reference, ours = make(), make()
    assert apply_tiled_mlp(ours, 4) == 2
    three_steps(ctx, reference, fsdp2x.fully_shard(ours), "llama", **TOLERANCE)


@distributed(world_sizes=(2,))
def test_units_inside_of_an_mlp_are_refused(ctx):
    only_fsdp2x(ctx)
    model = fsdp2x.fully_shard(models.build("llama"), auto_wrap=lambda name, module: name.endswith("up_proj"))
    apply_tiled_mlp(model, 2)
    with pytest.raises(RuntimeError, match="Linear inside of LlamaMLP is a unit of its own|FSDPLinear inside"):
        model(**models.batch("llama", ctx.rank))
