"""`fsdp2x trl` computes what TRL does on FSDP2, resumes on another number of ranks, and writes plain models."""

from pathlib import Path
from unittest import mock

import pytest

from chats import MARKED, chat_tokenizer
from frameworks import assert_sharded_by_us, fsdp_accelerator_class, launched
from harness import dist_run, distributed, programs
from models import VOCAB, build
from training import shared_folder
from trl_runs import CONFIGS, logged, write_folder

pytest.importorskip("trl")
STOCK = Path(__file__).parents[1] / "support" / "stock_trl.py"
TIMEOUT_S = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("trl"))


def run(folder, *words):
    done = programs.run(*words, cwd=folder, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout + done.stderr


def train(folder, method, *words, nproc=2):
    return run(folder, "-m", "fsdp2x", "trl", method, "--config", f"{method}.yaml", "--nproc", nproc, *words)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.full if name == "dpo" else ()) for name in CONFIGS]
)
def test_trains_as_on_fsdp2(folder, method):
    said = train(folder, method)
    assert said.count("fsdp2x: FSDPQwen3ForCausalLM on 2 rank(s), 4 units, transport shm") == 1
    words = (*programs.TORCHRUN, "--standalone", "--nproc_per_node=2", STOCK, method, "--config", f"{method}.yaml")
    run(folder, *words, "--output_dir", f"{method}-stock")
    outputs = folder / f"{method}-out", folder / f"{method}-stock"
    ours, stock = map(logged, outputs)
    assert ours == stock and len({line["loss"] for line in ours}) == CONFIGS[method]["max_steps"]
    weights, expected = (path.joinpath("model.safetensors").read_bytes() for path in outputs)
    assert weights == expected
    if method == "grpo":
        rewards = [line["reward"] for line in ours]
        assert sum(rewards[-3:]) > 0.5 + sum(rewards[:3]), rewards


def test_resumes_on_one_rank(folder):
    if not (folder / "sft-out").exists():
        train(folder, "sft")
    expected = logged(folder / "sft-out")
    words = ("--resume_from_checkpoint", "sft-out/checkpoint-2", "--per_device_train_batch_size", "4")
    train(folder, "sft", *words, "--output_dir", "resumed-out", nproc=1)
    found = logged(folder / "resumed-out")
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for line, other in zip(found, expected, strict=True):
        assert line == pytest.approx(other, rel=1e-4)
    dist_run(read_by_transformers, 1, str(folder), fresh=False)


def read_by_transformers(ctx, folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(f"{folder}/resumed-out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = AutoTokenizer.from_pretrained(f"{folder}/resumed-out")("1 and 2?", return_tensors="pt")
    before = AutoModelForCausalLM.from_pretrained(f"{folder}/model")(**tokens).logits
    assert (model(**tokens).logits - before).abs().max() > 0.1, "it was trained"


@pytest.mark.full
def test_continuous_batching_does_not_deadlock(folder):
    """Its ranks run different numbers of forwards."""
    options = '{"num_blocks": 64, "page_size": 32, "max_batch_tokens": 256}'
    words = ("--use_transformers_continuous_batching", "--transformers_continuous_batching_config", options)
    train(folder, "grpo", *words, "--max_steps", "2", "--output_dir", "batching-out")
    assert len(logged(folder / "batching-out")) == 2


@distributed(world_sizes=(2,), timeout=150)
def test_evaluation_before_training(ctx):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"input_ids": [3 + (i + j) % (VOCAB - 3) for j in range(9)]} for i in range(32)])
    data = {"train_dataset": rows, "eval_dataset": rows, "processing_class": chat_tokenizer(MARKED)}
    options = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "bf16": False}
    options |= {"fsdp": True, "fsdp_config": {}, "gradient_checkpointing": False, "max_steps": 4, "learning_rate": 1e-2}
    with shared_folder(ctx) as folder, launched(ctx):
        with mock.patch("transformers.trainer.Accelerator", fsdp_accelerator_class()):
            trainer = SFTTrainer(build("qwen3"), SFTConfig(output_dir=str(folder), **options), **data)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        assert_sharded_by_us(trainer.model)
        assert trainer.evaluate()["eval_loss"] < before - 0.1
