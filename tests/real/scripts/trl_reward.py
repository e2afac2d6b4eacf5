"""TRL's RewardTrainer on a tiny Qwen3 with one score, FSDP version 2 through accelerate.

For a CPU: as_fsdp.py.
"""

import os

os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_USE_CPU": "true"}
os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "true"}

import as_fsdp
import tiny
import torch
from datasets import Dataset
from transformers import Qwen3ForSequenceClassification
from trl import RewardConfig, RewardTrainer

import report

del as_fsdp
sizes = tiny.qwen3().config
sizes.num_labels, sizes.pad_token_id = 1, 0
torch.manual_seed(0)
model = Qwen3ForSequenceClassification(sizes)
settings = tiny.trainer_settings(RewardConfig, bf16=False, gradient_checkpointing=False)
rows = {"chosen": tiny.TEXTS, "rejected": tiny.TEXTS[::-1]}
trainer = RewardTrainer(
    model=model, args=settings, train_dataset=Dataset.from_dict(rows), processing_class=tiny.tokenizer()
)
trainer.train()
keys = ("loss", "grad_norm", "accuracy", "margin")
values = [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]
assert len(values) >= 24, trainer.state.log_history
report.write(values, trainer.model_wrapped)
