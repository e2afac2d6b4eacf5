"""LLaMA-Factory's v1 and its own FSDP2 engine, as its run_sft does it: accumulation, checkpoints, a resume from step 4.

For a CPU: its `sync` does not wait for a device.
"""

import json
import os
import sys

import tiny
from llamafactory.v1.accelerator import helper
from llamafactory.v1.accelerator.interface import DistributedInterface
from llamafactory.v1.config import get_args
from llamafactory.v1.core.data_engine import DataEngine
from llamafactory.v1.core.model_engine import ModelEngine
from llamafactory.v1.trainers.sft_trainer import SFTTrainer

import report

helper.synchronize = lambda: None
answer, how = sys.argv[1:3]
folder = f"{answer}.model.{os.environ['RANK']}"
tiny.qwen3().save_pretrained(folder)
tiny.tokenizer().save_pretrained(folder)


def message(role: str, text: str, weight: float) -> dict:
    return {"role": role, "content": [{"type": "text", "value": text}], "loss_weight": weight}


rows = [{"messages": [message("user", text, 0.0), message("assistant", text, 1.0)]} for text in tiny.TEXTS]
with open(folder + ".json", "w") as file:
    json.dump(rows, file)

settings = {
    "model": folder,
    "template": "chatml",
    "train_dataset": folder + ".json",
    "output_dir": answer + ".out",
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "cutoff_len": 64,
    "learning_rate": 1e-2,
    "batching_workers": 0,
    "max_steps": 8,
    "save_steps": 4,
    "dist_config": {"name": "fsdp2"},
    "init_config": {"name": "init_on_meta" if how == "meta" else "init_on_default"},
    "bf16": how == "meta",
}
if how == "lora":
    settings["peft_config"] = {"name": "lora", "r": 4, "target_modules": ["q_proj", "v_proj"]}


def train(**changes) -> SFTTrainer:
    model_args, data_args, training_args, _ = get_args(settings | changes)
    DistributedInterface(training_args.dist_config)
    data, engine = DataEngine(data_args.train_dataset), ModelEngine(model_args, is_train=True)
    trainer = SFTTrainer(args=training_args, model=engine.model, renderer=engine.renderer, train_dataset=data)
    trainer.fit()
    return trainer


def numbers(trainer: SFTTrainer) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm")]


trainer = train()
values = numbers(trainer)
again = numbers(train(resume_from_checkpoint=f"{answer}.out/checkpoint-4", output_dir=answer + ".again"))
assert len(values) == 16 and again == values[8:], (values, again)
trainer.save_model()
values += [param.full_tensor().double().sum().item() for param in trainer.model.parameters()]
report.write(values, trainer.model)
DistributedInterface().destroy()
