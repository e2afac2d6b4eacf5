"""Freezing by prefix: which names match, the count, and the errors of a prefix that matches nothing."""

import logging

import pytest
import torch

from fsdp2x.models.freeze import freeze_module_prefix
from models import build, tiny_lora, tiny_vlm


def frozen(model):
    return {name for name, param in model.named_parameters() if not param.requires_grad}


@pytest.mark.parametrize("prefix", ["model.visual", "visual", "visual.", ["visual"], " visual , visual.blocks"])
def test_tower(prefix):
    model = tiny_vlm()
    tower = {name: param.numel() for name, param in model.named_parameters() if name.startswith("model.visual.")}
    assert tower and freeze_module_prefix(model, prefix) == sum(tower.values())
    assert frozen(model) == set(tower)
    assert freeze_module_prefix(model, prefix) == sum(tower.values()), "frozen before counts too"


def test_the_outermost_level_counts():
    model = build("llama")
    assert freeze_module_prefix(model, "norm") == 16
    assert frozen(model) == {"model.norm.weight"}
    freeze_module_prefix(model, "model.layers.0")
    assert {name.rpartition(".")[0].split(".")[2] for name in frozen(model) if "layers" in name} == {"0"}
    assert freeze_module_prefix(tiny_lora(), "layers.1") > 0


def test_no_match_names_what_is_near_and_freezes_nothing():
    model = tiny_vlm()
    with pytest.raises(ValueError, match="begins with 'vision_model'; did you mean .*visual"):
        freeze_module_prefix(model, ["visual", "vision_model"])
    assert not frozen(model)
    with pytest.raises(ValueError, match="no parameter of Qwen2VL.* begins with 'vis'"):
        freeze_module_prefix(model, "vis")  # inside of a name is no match
    for wrong, error in (("", ValueError), ([], ValueError), ([3], TypeError)):
        with pytest.raises(error, match="freeze_module_prefix"):
            freeze_module_prefix(model, wrong)


def test_ties_and_gradients(caplog):
    model = build("qwen3")
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
    with caplog.at_level(logging.WARNING, "fsdp2x"):
        assert freeze_module_prefix(model, "embed_tokens") == 37 * 16
    assert "tied" in caplog.text and "lm_head.weight" in caplog.text
    assert model.lm_head.weight.grad is None and not model.lm_head.weight.requires_grad
    with caplog.at_level(logging.WARNING, "fsdp2x"):
        freeze_module_prefix(model, "model")
    assert "nothing in Qwen3ForCausalLM is trainable" in caplog.text
