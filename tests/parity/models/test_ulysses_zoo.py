"""Architectures of transformers by the dozen: packed, over two ranks, one step against one sample at a time."""

import copy
import importlib

import pytest
import torch

import fsdp2x
import sequences
from fsdp2x.sequence import apply_ulysses, init_sequence_mesh, pack_samples
from harness import distributed
from reference import only_fsdp2x

_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dropout": 0.0, "attention_dropout": 0.0}
# Package below transformers.models -> arguments of its config beyond the usual ones.
ARCHITECTURES = {
    **{name: {} for name in ("apertus", "arcee", "bitnet", "cohere", "cohere2", "ernie4_5", "exaone4", "glm", "glm4")},
    **{name: {} for name in ("glm4_moe", "gpt_neox", "granite", "helium", "hunyuan_v1_dense", "ministral")},
    **{name: {} for name in ("olmo", "olmo3", "persimmon", "phi", "phi3", "seed_oss", "smollm3", "starcoder2")},
    **dict.fromkeys(("flex_olmo", "granitemoe", "minimax_m2", "olmoe", "phimoe", "qwen2_moe"), _EXPERTS),
    "gpt2": _GPT2,
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "vaultgemma": {},
}


def build(package):
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = CONFIG_MAPPING[package](**{**sequences.DENSE, **_DROPOUT, **ARCHITECTURES[package]})
    config._attn_implementation = "eager"
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    torch.manual_seed(0)
    model = getattr(module, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[package])(config)
    sequences.enliven(model)
    return model.eval()  # some have noise or dropout under a name of their own


@pytest.mark.full
@distributed(world_sizes=(2,), timeout=120)
@pytest.mark.parametrize("package", ARCHITECTURES)
def test_one_step(ctx, package):
    only_fsdp2x(ctx)
    reference = build(package)
    ours = copy.deepcopy(reference)
    mesh = init_sequence_mesh(2, "cpu")
    fsdp2x.fully_shard(ours, mesh=mesh.shard)
    context = apply_ulysses(ours, mesh.sequence)
    samples = sequences.make_samples(reference, [9, 5, 14, 7, 2])
    sequences.check_step(ours, [context.shard_inputs(pack_samples(samples))], reference, samples)
