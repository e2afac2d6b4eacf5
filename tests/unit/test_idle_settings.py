"""Settings that mean nothing beside the others are named, and only where they mean nothing."""

import logging

import pytest
import torch
import yaml

from fsdp2x.train import parse_config
from fsdp2x.train.config import ParallelConfig
from fsdp2x.train.idle import _IDLE, idle_settings
from fsdp2x.train.load_config import load_config
from fsdp2x.train.model import build_on_meta, idle_expert_units, unit_policy
from fsdp2x.train.parse import known_keys
from training import MODEL, settings

# What makes keys mean nothing, where the defaults do not.
MAKES_IDLE = {
    "optimizer.betas": {"optimizer.name": "sgd"},
    "optimizer.eps": {"optimizer.name": "sgd"},
    "schedule.warmup_ratio": {"schedule.warmup_steps": 2},
    "schedule.warmup_start_ratio": {"schedule.warmup_steps": 0},
    "schedule.min_lr_ratio": {"schedule.min_lr": 1e-5},
    "schedule.min_lr": {"schedule.kind": "constant"},
    "schedule.decay_steps": {"schedule.kind": "constant"},
    "scaler.init_scale": {"scaler.enabled": False},
    "scaler.growth_factor": {"scaler.enabled": False},
    "scaler.backoff_factor": {"scaler.enabled": False},
    "scaler.growth_interval": {"scaler.enabled": False},
    "train.clip": {"train.mode": "evaluate"},
    "train.activation_checkpointing": {"train.mode": "evaluate"},
    "parallel.accumulate": {"train.mode": "evaluate"},
    "parallel.offload": {"train.mode": "evaluate"},
    "optimizer.lr": {"train.mode": "evaluate"},
}
# Values that differ from the default.
VALUES = {
    "lora.alpha": 3.0, "lora.dropout": 0.5, "lora.target_modules": ["q_proj"], "data.max_tokens": 32,
    "optimizer.betas": [0.5, 0.5], "optimizer.eps": 0.1, "optimizer.lr": 0.5, "schedule.warmup_ratio": 0.5,
    "schedule.warmup_start_ratio": 0.5, "schedule.min_lr_ratio": 0.5, "schedule.min_lr": 1e-4,
    "schedule.decay_steps": 3, "schedule.wsd_decay": "cosine", "schedule.wsd_decay_steps": 2,
    "parallel.expert_fsdp_size": 1, "scaler.init_scale": 2.0, "scaler.growth_factor": 3.0,
    "scaler.backoff_factor": 0.25, "scaler.growth_interval": 3, "train.compile_backend": "eager",
    "train.eval_blocks": 1, "train.eval_batch_size": 1, "train.global_eval_batch_size": 2,
    "logging.wandb_options": {"project": "x"}, "train.clip": 0.5, "train.activation_checkpointing": True,
    "parallel.accumulate": "reduce_scatter", "parallel.offload": "gradients",
}  # fmt: skip


def put(tmp_path, changes):
    config = settings(tmp_path / "text", tmp_path / "run")
    for key, value in changes.items():
        section, name = key.split(".")
        config.setdefault(section, {})[name] = value
    return config


def test_every_key_of_the_table_is_known():
    for keys in _IDLE:
        for key in keys:
            assert key in known_keys() or any(name.startswith(f"{key}.") for name in known_keys()), key


@pytest.mark.parametrize("key", VALUES)
def test_each_is_named_in_the_log_when_it_means_nothing(tmp_path, caplog, key):
    config = put(tmp_path, {**MAKES_IDLE.get(key, {}), key: VALUES[key]})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with caplog.at_level(logging.WARNING):
        load_config(tmp_path / "config.yaml")
    said = [record.getMessage() for record in caplog.records if f"{key}=" in record.getMessage()]
    assert len(said) == 1 and "has no effect: " in said[0], caplog.text


def test_what_has_effect_or_is_the_default_is_not_named(tmp_path):
    assert idle_settings(parse_config(config := put(tmp_path, {})), config) == []
    for changes in (
        {"lora.rank": 2, "lora.alpha": 3.0},
        {"train.eval_every": 1, "train.eval_blocks": 1},
        {"train.compile": True, "train.compile_backend": "eager"},
        {"lora.alpha": 16.0},
    ):
        config = put(tmp_path, changes)
        parsed = parse_config(config)
        said = idle_settings(parsed, config)
        assert not said or all(f"{key}=" not in one for key in changes for one in said if key != "lora.alpha"), said


FUSED = {"qwen3_moe": "Qwen3MoeMLP", "qwen2_moe": "Qwen2MoeExpert", "mixtral": "MixtralBlockSparseTop2MLP"}


@pytest.mark.parametrize("model_type", FUSED)
def test_experts_that_transformers_has_fused_need_no_units(model_type):
    """Their class of before is told to mean nothing; classes that are there stay units, and slips are refused."""
    sizes = {**MODEL, "model_type": model_type, "num_hidden_layers": 1, "vocab_size": 16}
    if model_type == "mixtral":
        sizes["num_local_experts"] = 4
    else:
        sizes.update(num_experts=4, moe_intermediate_size=12)
    config = parse_config({"model": {"config": sizes}, "data": {"files": ["text"]}})
    model = build_on_meta(config.model, torch.float32, tokenizer=None, attn_implementation=None)
    named = ParallelConfig(expert_units=[FUSED[model_type]])
    assert unit_policy(model, named) == unit_policy(model, ParallelConfig())
    assert "fused" in idle_expert_units(model, named)[FUSED[model_type]]
    present = type(next(m for n, m in model.named_modules() if n.endswith("experts"))).__name__
    both = ParallelConfig(expert_units=[FUSED[model_type], present])
    assert unit_policy(model, both)[-1] == present and list(idle_expert_units(model, both)) == [FUSED[model_type]]


def test_units_of_experts_in_a_model_without_any_are_refused():
    import fsdp2x.units.wrap

    config = parse_config({"model": {"config": {**MODEL, "vocab_size": 16}}, "data": {"files": ["text"]}})
    model = build_on_meta(config.model, torch.float32, tokenizer=None, attn_implementation=None)
    named = ParallelConfig(expert_units=["Qwen3MoeMLP"])
    assert idle_expert_units(model, named) == {}
    with pytest.raises(ValueError, match="Qwen3MoeMLP"):
        fsdp2x.units.wrap.plan_units(model, unit_policy(model, named))
