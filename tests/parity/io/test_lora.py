"""LoRA over sharded bases: adapter gradients and steps of one process, an untouched base, adapter-only files."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fsdp2x
import models
from fsdp2x.io.hf.lora import add_lora, load_adapter, save_adapter
from harness import distributed
from reference import grads, mean_of_ranks, only_fsdp2x, params, same, train_alike
from training import shared_folder

pytest.importorskip("peft")
SETTINGS = {"lora_rank": 3, "lora_alpha": 6, "lora_target": "q_proj,v_proj,down_proj"}


class Linear8bit(nn.Linear):
    """Weights as int8 rows with a scale each, as 8-bit libraries keep them; float32 results."""

    @classmethod
    def of(cls, linear, storage):
        made = cls(linear.in_features, linear.out_features, bias=False)
        scale = linear.weight.detach().abs().amax(1) / 127
        rows = (linear.weight.detach() / scale[:, None]).round().to(torch.int8)
        # Some libraries keep the bits in an unsigned, flat tensor.
        rows = rows.view(torch.uint8).reshape(-1) if storage == torch.uint8 else rows
        made.weight = nn.Parameter(rows, requires_grad=False)
        made.scale = nn.Parameter(scale, requires_grad=False)
        return made

    def forward(self, x):
        rows = self.weight.view(torch.int8).view(self.out_features, self.in_features)
        return nn.functional.linear(x, rows.to(x.dtype) * self.scale[:, None].to(x.dtype))


def make(base="float32", **settings):
    model = models.build("llama", dtype=torch.bfloat16 if base == "bfloat16" else torch.float32, use_cache=False)
    if base in ("int8", "uint8"):
        for layer in model.model.layers:
            for parent, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "k_proj"), (layer.mlp, "down_proj")):
                setattr(parent, name, Linear8bit.of(getattr(parent, name), getattr(torch, base)))
    torch.manual_seed(0)
    model = add_lora(model, {**SETTINGS, **settings})
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.2)
    return model


def loss_of(model, rank, step=0):
    return model(**models.batch("llama", 10 * step + rank)).loss.float()


def trainable(model):
    return [param for param in model.parameters() if param.requires_grad]


@distributed(world_sizes=(3,), only_fsdp2x=True)
@pytest.mark.parametrize(
    "base, transport",
    [
        ("float32", "shm"),
        ("bfloat16", "shm"),
        ("int8", "shm"),
        ("uint8", "process_group"),
        *(pytest.param(base, "process_group", marks=pytest.mark.full) for base in ("float32", "bfloat16", "int8")),
    ],
)
def test_three_steps_against_one_process(ctx, base, transport):
    """float32 to 1e-5; over a bfloat16 base the adapters are float32 and gradients agree as bfloat16 allows."""
    reference = make(base)
    before = {name: param.detach().clone() for name, param in reference.named_parameters()}
    ours = fsdp2x.fully_shard(copy.deepcopy(reference), transport=transport)
    assert all(isinstance(param, DTensor) for param in ours.parameters())
    assert {param.dtype for param in trainable(ours)} == {torch.float32}
    train_alike(ctx, reference, ours, loss_of, rtol=1e-5, atol=1e-6)
    after = params(ours)
    for name, value in before.items():
        assert torch.equal(after[name], value) == ("lora_" not in name), name
    assert base not in ("int8", "uint8") or getattr(torch, base) in {value.dtype for value in after.values()}


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_checkpointing_mixed_precision_and_our_optimizer(ctx):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reference = make()
    ours = copy.deepcopy(reference)
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    fsdp2x.fully_shard(ours.train(), mp_policy=policy)
    optimizer = fsdp2x.optim.AdamW(trainable(ours), lr=1e-3)
    mean_of_ranks(reference, loss_of, ctx.world)
    loss_of(ours, ctx.rank).backward()
    same(grads(ours), grads(reference), "gradients", rtol=5e-2, atol=5e-3)
    before = params(ours)
    fsdp2x.clip_grad_norm_(trainable(ours), 1.0)
    optimizer.step()
    after = params(ours)
    assert all(torch.equal(after[name], value) == ("lora_" not in name) for name, value in before.items())


@distributed(world_sizes=(3,))
@pytest.mark.parametrize("base", [pytest.param("bfloat16", marks=pytest.mark.full), "int8"])
def test_adapter_alone_is_saved_and_loaded(ctx, base):
    """Readable by plain PEFT, and PEFT's own folder by us; the base is neither written nor changed."""
    from peft import PeftModel

    only_fsdp2x(ctx)
    with shared_folder(ctx) as folder:
        ours = fsdp2x.fully_shard(make(base))
        optimizer = torch.optim.AdamW(trainable(ours), lr=5e-3)
        loss_of(ours, ctx.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = params(ours)
        save_adapter(ours, folder / "adapter")
        names = {file.name for file in (folder / "adapter").iterdir()}
        assert names == {"adapter_config.json", "adapter_model.safetensors"}
        with pytest.raises(RuntimeError, match="adapter: exists already"):
            save_adapter(ours, folder / "adapter")
        plain = PeftModel.from_pretrained(make(base).unload(), folder / "adapter", is_trainable=True)
        same(params(plain), expected)
        again = fsdp2x.fully_shard(add_lora(make(base).unload(), folder / "adapter"))
        report = load_adapter(again, folder / "adapter")
        assert not report.missing_keys and not report.unexpected_keys
        same(params(again), expected)
        if ctx.rank == 0:
            plain.save_pretrained(folder / "of_peft")
        dist.barrier()
        other = fsdp2x.fully_shard(make(base))
        load_adapter(other, folder / "of_peft")
        same(params(other), expected)
        narrow = fsdp2x.fully_shard(make(base, lora_target="q_proj,v_proj"))
        with pytest.raises(RuntimeError, match="unexpected: .*down_proj"):
            load_adapter(narrow, folder / "adapter")
