"""transformers' Trainer with ``fsdp``, version 2, through accelerate: full or LoRA, checkpoint, resume, evaluation.

For a CPU: as_fsdp.py.
"""

import sys

import as_fsdp
import tiny
import torch
from transformers import Trainer, TrainingArguments

import report

del as_fsdp


def make(max_steps):
    settings = tiny.trainer_settings(
        TrainingArguments,
        max_steps=max_steps,
        lr_scheduler_type="constant",
        save_steps=4,
        save_strategy="steps",
        fsdp="full_shard auto_wrap",
        fsdp_config={"version": 2, "reshard_after_forward": True, "state_dict_type": "SHARDED_STATE_DICT"},
    )
    model = tiny.qwen3()
    if sys.argv[2] != "all":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(
            model,
            LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", use_dora=sys.argv[2] == "dora"),
        )
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.cat(tiny.batches(32, 2, 0))]
    return Trainer(model=model, args=settings, train_dataset=rows, eval_dataset=rows[:8])


trainer = make(8)
trainer.train()
resumed = make(8)
resumed.train(resume_from_checkpoint=sys.argv[1] + ".out/checkpoint-4")
keys = ("loss", "grad_norm")
values = [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]
again = [entry[key] for entry in resumed.state.log_history for key in keys if key in entry]
assert len(values) >= 16, trainer.state.log_history
assert again[-8:] == values[-8:], (values, again)
values.append(trainer.evaluate()["eval_loss"])
report.write(values, trainer.model_wrapped)
