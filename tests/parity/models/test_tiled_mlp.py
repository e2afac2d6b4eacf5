"""Tiled MLPs below fully_shard: steps of one process, each parameter reduced once, checkpointing, LoRA."""

import copy

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2x
import models
from fsdp2x.models.tiled_mlp import apply_tiled_mlp
from harness import distributed
from reference import both_transports, grads, mean_of_ranks, only_fsdp2x, same, train_alike

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def loss_of(model, rank, step):
    return model(**models.batch("any", 10 * step + rank)).loss


@distributed(world_sizes=(3,), only_fsdp2x=True)
@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.full)])
@both_transports
def test_three_steps_against_one_process(ctx, name, transport):
    reference = models.build(name)
    ours = copy.deepcopy(reference)
    assert apply_tiled_mlp(ours, 4) == 2
    train_alike(ctx, reference, fsdp2x.fully_shard(ours, transport=transport), loss_of, **TOLERANCE)


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_reduced_once_and_after_sharding(ctx):
    """Tiling of a sharded model, with the MLP as a separate unit, and with accumulation without synchronization."""
    reference = models.build("llama")
    ours = fsdp2x.fully_shard(copy.deepcopy(reference), auto_wrap=["LlamaMLP", "LlamaDecoderLayer"])
    assert apply_tiled_mlp(ours, 3) == 2
    reduced = []
    for layer in ours.model.layers:
        layer.mlp.set_all_reduce_hook(lambda rows: reduced.append(rows.numel()))
        layer.mlp.down_proj.weight.register_post_accumulate_grad_hook(lambda param: reduced.append("param"))
    train_alike(ctx, reference, ours, loss_of, **TOLERANCE)
    assert len(reduced) == 3 * 2 * 2 and reduced.count("param") == 3 * 2
    mean_of_ranks(reference, lambda m, r: loss_of(m, r, 0) + loss_of(m, r, 1), ctx.world)
    reduced.clear()
    for micro in range(2):
        with fsdp2x.accumulate(ours, last=micro == 1):
            loss_of(ours, ctx.rank, micro).backward()
    same(grads(ours), grads(reference), "accumulated", **TOLERANCE)
    assert len(reduced) == 2 * 2


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_checkpointing_mixed_precision_and_frozen_weights(ctx):
    reference, ours = (models.build("llama", use_cache=False) for _ in range(2))
    for model in (reference, ours):
        model.model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
    apply_tiled_mlp(ours, 4)
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    ours.train()
    train_alike(ctx, reference, fsdp2x.fully_shard(ours), loss_of, **TOLERANCE)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, tiled = (fsdp2x.fully_shard(models.build("llama"), mp_policy=policy) for _ in range(2))
    apply_tiled_mlp(tiled, 4)
    for model in (plain, tiled):
        loss_of(model, ctx.rank, 0).backward()
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
    train_alike(ctx, reference, fsdp2x.fully_shard(ours), loss_of, **TOLERANCE)


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_units_inside_of_an_mlp_are_refused(ctx):
    model = fsdp2x.fully_shard(models.build("llama"), auto_wrap=lambda name, module: name.endswith("up_proj"))
    apply_tiled_mlp(model, 2)
    with pytest.raises(RuntimeError, match="inside of LlamaMLP is a separate unit"):
        model(**models.batch("llama", ctx.rank))
