"""`fsdp2x train` against TRL's SFTTrainer over FSDP2 on the same rows: the same losses up to rounding.

Both average over the label tokens of a step: transformers divides by `num_items_in_batch` of all ranks. TRL adds up and
reports means in float32, fsdp2x in float64, so that the last bits differ.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from environments import results_of

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from chats import CHATML, MARKED, chat_tokenizer, some_rows, write_rows
from training import MODEL, losses

KINDS = ("messages", "prompt and completion", "text")


def as_kind(row: dict, kind: str) -> dict:
    """A conversation as it is, its last answer as the completion of the rest, or these two as text."""
    messages = row["messages"]
    if kind == "messages":
        return row
    if kind == "prompt and completion":
        return {"prompt": messages[:-1], "completion": messages[-1:]}
    return {"prompt": messages[-2]["content"], "completion": " " + messages[-1]["content"]}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_trl(tmp_path, kind):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{**MODEL, "max_position_embeddings": 256}, vocab_size=300)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    chat_tokenizer(MARKED if kind == "messages" else CHATML).save_pretrained(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [as_kind(row, kind) for row in some_rows(40)])
    theirs = [
        float.fromhex(text)
        for text in results_of("trl", "trl_sft_rows", "stock", tmp_path, str(tmp_path), kind)[0]["values"]
    ]
    settings = {
        "model": {"path": str(tmp_path)},
        "data": {"files": [str(tmp_path / "rows.jsonl")], "format": "jsonl", "block_size": 200, "held_out": 0.0}
        | {"shuffle": False},
        "optimizer": {"lr": 1e-2, "betas": [0.9, 0.999], "weight_decay": 0.0},
        "schedule": {"kind": "constant"},
        "parallel": {"device": "cpu"},
        "train": {"steps": 4, "batch_size": 2, "accumulation": 2, "clip": None},
        "logging": {"output": str(tmp_path / "run")},
        "checkpoint": {"save_last": False},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command = [*launch, "-m", "fsdp2x.train", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    ours = [float.fromhex(text) for text in losses(tmp_path / "run").values()]
    print(json.dumps({"trl": theirs, "fsdp2x": ours}))
    assert ours == pytest.approx(theirs, abs=2e-6)
    assert ours[-1] < ours[0]
