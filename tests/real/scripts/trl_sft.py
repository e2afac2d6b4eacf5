"""TRL's SFTTrainer on a tiny Qwen3, FSDP version 2 through accelerate, LoRA or not.

For a CPU: accelerate's state is told that it is FSDP, which accelerate turns on for accelerators only.
"""

import os
import sys

os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_USE_CPU": "true"}
os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "true"}

import accelerate.state
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer

import report

make = accelerate.state.AcceleratorState.__init__


def as_fsdp(self, *args, **kwargs):
    plugin = kwargs.get("fsdp_plugin")
    make(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = plugin or FullyShardedDataParallelPlugin(fsdp_version=2)


accelerate.state.AcceleratorState.__init__ = as_fsdp

words = [f"w{i}" for i in range(60)]
table = {name: i for i, name in enumerate(["<pad>", "<eos>", "<unk>", *words])}
plain = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
model = Qwen3ForCausalLM(
    Qwen3Config(**sizes, intermediate_size=24, vocab_size=len(table), max_position_embeddings=64, eos_token_id=1)
)
texts = [" ".join(words[(3 * i + 7 * j) % 60] for j in range(8 + i % 5)) for i in range(32)]
settings = SFTConfig(
    output_dir=sys.argv[1] + ".out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=4,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    disable_tqdm=True,
    dataloader_num_workers=0,
)
adapter = None
if sys.argv[2] == "lora":
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
trainer = SFTTrainer(
    model=model,
    args=settings,
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
    peft_config=adapter,
)
trainer.train()
values = [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]
assert len(values) >= 8, trainer.state.log_history
report.write(values, trainer.model_wrapped)
