"""Mixtures of experts on one process: what counts as experts, grouped product or loop, and what is refused."""

import logging

import pytest
import torch
from torch import nn

import models
from fsdp2x import moe
from moe_models import ListMoe, fused

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
SIZES |= {"vocab_size": 37, "intermediate_size": 24, "num_experts_per_tok": 2}


def gpt_oss():
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4))
    for param in model.parameters():
        nn.init.normal_(param, std=0.2)
    return model


def test_what_counts_as_experts():
    for name in ("qwen3_moe", "mixtral"):
        groups = moe.find_experts(fused(name))
        assert [(group.name, group.num_experts) for group in groups] == [
            (f"model.layers.{i}.mlp.experts", 4) for i in (0, 1)
        ]
    assert [group.num_experts for group in moe.find_experts(gpt_oss())] == [4]
    for model in (ListMoe(), models.build("llama"), models.tiny_vlm()):
        assert not moe.find_experts(model)


@pytest.mark.parametrize("make", [fused, lambda: fused("mixtral"), gpt_oss], ids=["qwen3_moe", "mixtral", "gpt_oss"])
def test_grouped_product_equals_the_loop(make):
    results = []
    for enabled, choice in ((True, "grouped_mm"), (False, "eager")):
        model = make()
        assert moe.use_grouped_gemm(model, enabled) == choice
        assert model.config._experts_implementation == choice
        ids = torch.arange(3, 24)[None] % 37
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append((loss.detach(), {name: param.grad for name, param in model.named_parameters()}))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "model, reason",
    [
        (lambda: fused(moe_intermediate_size=10), "rows of 10 x torch.float32 are not a multiple of 16 bytes"),
        (lambda: fused().bfloat16(), "rows of 12 x torch.bfloat16 are not a multiple"),
        (lambda: fused().double(), "computed in torch.float64"),
    ],
)
def test_a_loop_where_the_grouped_product_does_not_fit(caplog, model, reason):
    model = model()
    with caplog.at_level(logging.WARNING, "fsdp2x"):
        assert moe.use_grouped_gemm(model) == "eager"
    assert reason in caplog.text
    ids = torch.arange(3, 24)[None] % 37
    model(input_ids=ids, labels=ids).loss.backward()


def test_refusals():
    llama = models.build("llama")
    for call in (moe.use_grouped_gemm, moe.apply_expert_patch, moe.shard_experts):
        with pytest.raises(ValueError, match="LlamaForCausalLM has no fused experts"):
            call(llama)
