"""TRL's SFTTrainer on a tiny Qwen3 or a model of experts, FSDP version 2 through accelerate: LoRA, recomputation.

For a CPU: as_fsdp.py.
"""

import os
import sys

os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_USE_CPU": "true"}
os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "true"}

import as_fsdp
import tiny
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import report

del as_fsdp
what, recompute = sys.argv[2:]
model, tokenizer = tiny.of_experts(what) if what in tiny.OF_EXPERTS else tiny.qwen3(), tiny.tokenizer()
checkpointing = {"gradient_checkpointing": recompute != "kept"}
if recompute != "kept":
    checkpointing["gradient_checkpointing_kwargs"] = {"use_reentrant": recompute == "reentrant"}
settings = tiny.trainer_settings(SFTConfig, bf16=False, dataloader_num_workers=0, **checkpointing)
adapter = None
if what == "lora":
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
trainer = SFTTrainer(
    model=model,
    args=settings,
    train_dataset=Dataset.from_dict({"text": tiny.TEXTS}),
    processing_class=tokenizer,
    peft_config=adapter,
)
trainer.train()
values = [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]
assert len(values) >= 16, trainer.state.log_history
report.write(values, trainer.model_wrapped)
