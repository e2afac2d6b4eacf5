"""TRL's SFTTrainer on a tiny Qwen3 or an MoE model, FSDP version 2 through accelerate: (Q)LoRA, recomputation.

Changes for a CPU: as_fsdp.py, and no check of GPU memory while a model is loaded in 4 bits. QLoRA runs without
accumulation, because TRL keeps adapters in bf16. Next to frozen fp32 weights, fsdp2x sums micro-batches in fp32 and
FSDP2 in bf16.
"""

import os
import sys

os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_USE_CPU": "true"}
os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "true"}

import as_fsdp
import tiny
import torch
import transformers
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import report

del as_fsdp
what, recompute = sys.argv[2:]


def in_4_bits():
    """By bitsandbytes, from a checkpoint, as users load a base model."""
    folder = f"{sys.argv[1]}.model.{os.environ['RANK']}"
    tiny.qwen3(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    transformers.modeling_utils.caching_allocator_warmup = lambda *_, **__: None
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


if what == "qlora":
    model = in_4_bits()
else:
    model = tiny.of_experts(what) if what in tiny.OF_EXPERTS else tiny.qwen3()
tokenizer = tiny.tokenizer()
checkpointing = {"gradient_checkpointing": recompute != "kept"}
if recompute != "kept":
    checkpointing["gradient_checkpointing_kwargs"] = {"use_reentrant": recompute == "reentrant"}
accumulation = {"gradient_accumulation_steps": 1} if what == "qlora" else {}
settings = tiny.trainer_settings(SFTConfig, bf16=False, dataloader_num_workers=0, **checkpointing, **accumulation)
adapter = None
if "lora" in what:
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
