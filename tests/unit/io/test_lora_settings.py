"""Settings of LoRA: aliases, kinds of targets, unknown keys, and what a folder must hold."""

import json

import pytest
import torch
from torch import nn

from fsdp2x.io.hf.lora import add_lora, load_adapter, save_adapter
from models import build

pytest.importorskip("peft")


def adapted(model):
    return {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_A" in name}


def test_settings_of_other_frameworks():
    settings = {"lora_rank": 3, "lora_alpha": 6, "dropout": 0.0, "lora_target": "q_proj, v_proj"}
    model = add_lora(build("llama"), settings)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (3, 6, 0.0)
    assert adapted(model) == {"q_proj", "v_proj"}
    assert all(param.requires_grad == ("lora_" in name) for name, param in model.named_parameters())
    linears = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert adapted(add_lora(build("llama"), {"r": 2, "target_modules": "all-linear"})) == linears
    both = add_lora(build("llama"), {"r": 2, "target_modules": "all-linear,all-embedding"})
    assert adapted(both) == linears
    assert any("embed_tokens.lora_embedding_A" in name for name, _ in both.named_parameters())


def test_routers():
    class Moe(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.body = nn.Linear(4, 2), nn.Linear(4, 4)

        def forward(self, x):
            return self.body(x) * self.gate(x).sum(-1, keepdim=True)

    assert adapted(add_lora(Moe(), {"r": 2, "target_modules": ["all-router"]})) == {"gate"}
    with pytest.raises(ValueError, match="'all-router' matches nothing .*target_parameters"):
        add_lora(build("qwen3_moe"), {"target_modules": ["all-router"]})


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="'lora_ramk'; did you mean lora_rank"):
        add_lora(build("llama"), {"lora_ramk": 3})
    with pytest.raises(ValueError, match="'rank' and another setting"):
        add_lora(build("llama"), {"r": 3, "rank": 4})
    with pytest.raises(TypeError, match="LoraConfig, .*got 3"):
        add_lora(build("llama"), 3)
    with pytest.raises(ValueError, match="adapter_config.json is missing"):
        add_lora(build("llama"), tmp_path)
    with pytest.raises(ValueError, match="has no adapter.*fsdp2x.add_lora"):
        load_adapter(build("llama"), tmp_path)
    with pytest.raises(ValueError, match='weights="adapter", but .*not a PEFT model'):
        save_adapter(build("llama"), tmp_path / "out")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(ValueError, match="expected .*'LORA', got 'IA3'"):
        add_lora(build("llama"), tmp_path)


def test_a_folder_gives_the_settings_and_other_scalings_are_refused(tmp_path):
    torch.manual_seed(0)
    model = add_lora(build("llama"), {"r": 2, "alpha": 8, "target": "q_proj"})
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_()
    save_adapter(model, tmp_path / "adapter")
    twin = add_lora(build("llama"), tmp_path / "adapter")
    load_adapter(twin, tmp_path / "adapter")
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b) and a.requires_grad == b.requires_grad, name
    other = add_lora(build("llama"), {"r": 2, "alpha": 4, "target": "q_proj"})
    with pytest.raises(ValueError, match="lora_alpha is 8 in .*, but 4 in .*'default'"):
        load_adapter(other, tmp_path / "adapter")
