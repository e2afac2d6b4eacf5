"""Merged adapters in deltas and other dtypes, and arguments that do not fit. All settings: test_merged_adapters.py."""

import copy

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from torch import nn

import fsdp2x
from engines import Layerwise, Store, peer
from fsdp2x.sync import InProcess
from harness import distributed
from models import build
from reference import same

KINDS = {
    "plain": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "experts": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
    "trained whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
}


def make_model(kind):
    name, settings = KINDS[kind]
    base = build(name)
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=3, **settings))
    change(model, 0)
    return model


@torch.no_grad()
def change(model, seed):
    """Other values, which depend on the parameter's name alone: the twin's are the same."""
    for name, param in sorted(model.named_parameters()):
        if seed == 0 or "lora_" in name or param.requires_grad:
            param.add_(0.01 * (seed + 1) * (1 + len(name) % 7))


def merged(twin, dtype):
    """By PEFT, of the whole model; names and layout of files."""
    found = {}
    for bucket in fsdp2x.export.stream(copy.deepcopy(twin).merge_and_unload(), transport="process_group"):
        found.update((name, tensor.clone().to(dtype)) for name, tensor in bucket.items())
    return dict(sorted(found.items()))


@pytest.mark.parametrize("kind", KINDS)
@distributed(world_sizes=(1, 2, 3))
def test_equals_merge_and_unload(ctx, kind):
    """Full and as a delta, in small buckets; the trained model stays as it is."""
    twin = make_model(kind)
    model = copy.deepcopy(twin)
    for layer in model.base_model.model.model.layers:
        fsdp2x.fully_shard(layer)
    fsdp2x.fully_shard(model)
    store = Store()
    options = {"merge_adapters": True, "dtype": torch.bfloat16}
    with peer(ctx, store) as (target, served):
        with fsdp2x.sync.connect(model, target, bucket_bytes=3000, deltas=True, **options) as sync:
            for version, mode in enumerate(["full", "full", "delta", "delta"]):
                sync.push(version=version, mode=mode)
                if served:
                    same(dict(sorted(store.weights.items())), merged(twin, torch.bfloat16))
                change(model, version + 1)
                change(twin, version + 1)
    same(dict(fsdp2x.full_tensors(model)), {n: p.detach() for n, p in twin.named_parameters()})


@distributed(world_sizes=(2,))
def test_several_adapters_and_dtypes_by_pattern(ctx):
    twin = make_model("plain")
    twin.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], lora_alpha=5))
    twin.base_model.set_adapter(["default", "second"])
    change(twin, 3)
    model = fsdp2x.fully_shard(copy.deepcopy(twin))
    engine = Layerwise()
    target, keep = InProcess(engine.load, finish=engine.finish), {"*.q_proj.weight": torch.float32}
    with fsdp2x.sync.connect(model, target, dtype=torch.bfloat16, keep=keep, merge_adapters=True) as sync:
        sync.push(version=0)
    expected = {
        name: value if name.endswith("q_proj.weight") else value.bfloat16()
        for name, value in merged(twin, torch.float32).items()
    }
    same(dict(sorted(engine.weights.items())), expected)


@distributed(world_sizes=(2,))
def test_what_cannot_be_merged(ctx):
    def connect(model, **options):
        return fsdp2x.sync.connect(model, InProcess(list), merge_adapters=True, **options)

    with pytest.raises(ValueError, match="merge_adapters=True, but .*Linear has no adapter"):
        connect(fsdp2x.fully_shard(nn.Linear(2, 2)))
    model = fsdp2x.fully_shard(make_model("plain"))
    with pytest.raises(ValueError, match='uses the names of files. Keep names="hf"'):
        connect(model, names="model")
    with pytest.raises(ValueError, match="params omits '.*lora_A.*', which the merge of '.*q_proj' needs"):
        connect(model, params=lambda name, param: "lora_" not in name)
    with pytest.raises(NotImplementedError, match="merges LoRA, not LOHA"):
        connect(fsdp2x.fully_shard(get_peft_model(build("llama"), LoHaConfig(target_modules=["q_proj"]))))
