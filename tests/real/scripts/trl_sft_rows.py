"""TRL's SFTTrainer on rows of a file and a tokenizer with a chat template, in the file's order; FSDP version 2.

For a CPU: as_fsdp.py. The rows, their order and the model are those that `fsdp2x train` gets.
"""

import os
import sys

os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_USE_CPU": "true"}
os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "true"}

import as_fsdp
import tiny
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import report

del as_fsdp
folder, kind = sys.argv[2:]
settings = tiny.trainer_settings(
    SFTConfig,
    bf16=False,
    gradient_checkpointing=False,
    max_steps=4,
    lr_scheduler_type="constant",
    max_grad_norm=0.0,
    train_sampling_strategy="sequential",
    max_length=200,
    assistant_only_loss=kind == "messages",
)
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    args=settings,
    train_dataset=load_dataset("json", data_files=f"{folder}/rows.jsonl", split="train"),
    processing_class=AutoTokenizer.from_pretrained(folder),
)
trainer.train()
report.write([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.model_wrapped)
