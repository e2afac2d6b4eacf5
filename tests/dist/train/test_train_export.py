"""HuggingFace export: what plain from_pretrained loads computes the logits of the sharded model."""

import pytest
import torch
from safetensors.torch import load_file

from fsdp2x import save_hf
from fsdp2x.base.failures import CheckpointError
from fsdp2x.convert import export_checkpoint
from fsdp2x.train import Trainer, parse_config
from harness import dist_run
from reference import same
from training import MODEL, settings, write_text

MODELS = {
    "qwen3": MODEL,  # tied
    "llama": {**MODEL, "model_type": "llama", "tie_word_embeddings": False},
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "mixtral": (mixtral := {**MODEL, "model_type": "mixtral", "num_local_experts": 3, "tie_word_embeddings": False}),
    "minimax_m2": {**mixtral, "model_type": "minimax_m2", "num_experts_per_tok": 2},
}
# In files: what a conversion of the class's weights leaves out, and what it makes.
NAMES = {
    "mixtral": ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.block_sparse_moe.experts.0.w1.weight"),
    "minimax_m2": (  # a buffer
        "model.layers.0.mlp.e_score_correction_bias",
        "model.layers.0.block_sparse_moe.e_score_correction_bias",
    ),
}
TOKENS = torch.arange(24).view(2, 12) * 5


def train_and_compute(ctx, config, online):
    trainer = Trainer(parse_config(config))
    try:
        trainer.run()
        trainer.model.eval()
        if online is not None:
            save_hf(trainer.model, online)
        with torch.no_grad():
            return trainer.model(input_ids=TOKENS, use_cache=False).logits
    finally:
        trainer.close()


def load(folder):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_exports_load_and_compute_the_same(tmp_path, name):
    from transformers import AutoTokenizer

    config = settings(
        write_text(tmp_path / "text"), tmp_path / "run", model={"config": MODELS[name]}, train={"steps": 2}
    )
    outcomes = dist_run(train_and_compute, 2, config, str(tmp_path / "online"), fresh=False)
    export_checkpoint(tmp_path / "run", tmp_path / "offline")
    for folder in ("online", "offline"):
        model = load(tmp_path / folder)
        with torch.no_grad():
            logits = model(input_ids=TOKENS).logits
        torch.testing.assert_close(logits, outcomes[0].value, atol=1e-6, rtol=0)
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert tied == (name in ("qwen3", "gpt2"))
        assert type(model).__name__ in (tmp_path / folder / "config.json").read_text()
        keys = {key for file in (tmp_path / folder).glob("*.safetensors") for key in load_file(file)}
        absent, present = NAMES.get(name, ("lm_head.weight" if tied else "", ""))
        assert absent not in keys and (present or next(iter(keys))) in keys
    assert AutoTokenizer.from_pretrained(tmp_path / "offline").decode([104, 105]) == "hi"
    assert (tmp_path / "offline" / "generation_config.json").exists()
    (tmp_path / "offline" / "precious").write_text("x")
    with pytest.raises(FileExistsError, match=r"offline: exists already; .* force=True"):
        export_checkpoint(tmp_path / "run", tmp_path / "offline")
    assert (tmp_path / "offline" / "precious").exists()
    export_checkpoint(tmp_path / "run", tmp_path / "offline", force=True)
    assert not (tmp_path / "offline" / "precious").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["offline", "online", "run", "text"]
    if name == "qwen3":  # the exported folder trains again
        config = settings(tmp_path / "text", tmp_path / "again", train={"steps": 1}, optimizer={"lr": 1e-12})
        config["model"] = {"path": str(tmp_path / "offline")}
        config["data"] = {**config["data"], "tokenizer": str(tmp_path / "offline")}
        again = dist_run(train_and_compute, 2, config, None, fresh=False)
        torch.testing.assert_close(again[0].value, outcomes[0].value, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("form", ["per_rank", "full", "sharded"])
def test_checkpoints_of_adapters_are_exported_merged_and_alone(tmp_path, name, form):
    model, saves = {"config": MODELS[name]}, {"form": form}
    train = {"train": {"steps": 2}, "optimizer": {"lr": 0.05}, "checkpoint": saves, "model": model}
    config = settings(write_text(tmp_path / "text"), tmp_path / "run", **train)
    (outcome, _) = dist_run(train_and_compute, 2, {**config, "lora": {"rank": 2, "alpha": 8}}, None, fresh=False)
    with pytest.raises(CheckpointError, match="holds LoRA adapters.*lora='merge'"):
        export_checkpoint(tmp_path / "run", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    merged = load(export_checkpoint(tmp_path / "run", tmp_path / "merged", lora="merge"))
    assert not (tmp_path / "merged/adapter_config.json").exists()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=TOKENS).logits, outcome.value, atol=1e-5, rtol=0)
    export_checkpoint(tmp_path / "run", tmp_path / "adapter", lora="adapter")
    of_run, alone = (load_file(tmp_path / place / "adapter_model.safetensors") for place in ("run/adapter", "adapter"))
    same(alone, of_run)
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
        file.name for file in (tmp_path / "run/adapter").iterdir()
    }
    # The same form without adapters.
    plain = settings(tmp_path / "text", tmp_path / "plain", **{**train, "train": {"steps": 1}})
    (outcome, _) = dist_run(train_and_compute, 2, plain, None, fresh=False)
    with pytest.raises(CheckpointError, match="no LoRA adapters.*lora='merge'"):
        export_checkpoint(tmp_path / "plain", tmp_path / "whole", lora="merge")
    with torch.no_grad():
        whole = load(export_checkpoint(tmp_path / "plain", tmp_path / "whole"))(input_ids=TOKENS).logits
    torch.testing.assert_close(whole, outcome.value, atol=1e-6, rtol=0)
