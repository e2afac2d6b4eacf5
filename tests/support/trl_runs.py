"""Tiny runs of TRL: a folder with a model, data, configs, and rewards, and what a run has logged."""

import json
from pathlib import Path

import yaml

from chats import MARKED, chat_tokenizer, some_rows, write_rows
from harness import dist_run
from training import MODEL

COMMON = {
    "model_name_or_path": "model",
    "bf16": False,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_steps": 2,
    "report_to": "none",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}
CONFIGS = {
    "sft": {"dataset_name": "rows", "packing": True, "assistant_only_loss": True, "max_length": 64, "max_steps": 4},
    "dpo": {"dataset_name": "pairs", "gradient_accumulation_steps": 2, "max_steps": 4},
    "grpo": {
        "dataset_name": "prompts",
        "reward_funcs": ["reward.ascii"],
        "num_generations": 8,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "max_completion_length": 4,
        "learning_rate": 5e-2,
        "lr_scheduler_type": "constant",
        "max_steps": 8,
    },
}
REWARDS = """
import os
import signal


def ascii(completions, **columns):
    return [sum(letter.isascii() for letter in text) / max(len(text), 1) for text in completions]


def fail(completions, **columns):
    if os.environ["RANK"] == "1":
        raise ValueError("no reward")
    return ascii(completions)


def die(completions, **columns):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return ascii(completions)
"""


def write_folder(folder: Path) -> Path:
    """Writes everything, the model in a rank, and returns ``folder``."""
    write_rows(folder / "rows" / "train.jsonl", some_rows(60))
    pairs = [{"prompt": f"{i} and?", "chosen": f" yes {i}", "rejected": f" no {7 * i}"} for i in range(40)]
    write_rows(folder / "pairs" / "train.jsonl", pairs)
    write_rows(folder / "prompts" / "train.jsonl", [{"prompt": f"{i} + 1 = "} for i in range(64)])
    (folder / "reward.py").write_text(REWARDS)
    for method, config in CONFIGS.items():
        (folder / f"{method}.yaml").write_text(yaml.safe_dump({**COMMON, "output_dir": f"{method}-out", **config}))
    dist_run(_write_model, 1, str(folder / "model"), fresh=False)
    return folder


def _write_model(ctx, folder: str) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    tokenizer = chat_tokenizer(MARKED)
    settings = {**MODEL, "max_position_embeddings": 256, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.AutoConfig.for_model(**settings, vocab_size=300)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def logged(output: Path) -> list[dict]:
    """Returns the exact loss and gradient norm of each step, and its reward, from the last checkpoint."""
    last = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    lines = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [{key: line[key] for key in ("step", "loss", "grad_norm", "reward") if key in line} for line in lines]
