"""verl's SFTTrainer with its FSDP engine on a tiny Qwen3: sharded, LoRA, prefetching, checkpoints on the way.

For a CPU: verl_cpu.py; `Tracking` is a recorder; sequences are split between ranks (Ulysses) around flash attention, in
whose place torch's attention is.
"""

import sys

# First: it tells verl what it runs on.
import verl_cpu

# isort: split
import pandas
import tiny
import torch
import torch.distributed as dist
import verl.trainer.sft_trainer as sft
from hydra import compose, initialize_config_module
from verl.utils.fsdp_utils import set_reshard_after_forward

import report

values = []


class Recorder:
    def __init__(self, **_):
        pass

    def log(self, data, step):
        values.extend(data[name] for name in ("train/loss", "train/grad_norm") if name in data)


def attention(query, key, value, mask, length, *_, position_ids, scaling=None, **__):
    """Causal attention ``[1, tokens, heads, width]`` inside of sequences that begin where positions are 0."""
    sequence = (position_ids[0] == 0).cumsum(0)
    seen = (sequence[:, None] == sequence[None]) & torch.ones(length, length, dtype=torch.bool).tril()
    heads = (each.transpose(1, 2) for each in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)


if sys.argv[2] == "ulysses":
    import verl.models.transformers.monkey_patch as patches
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    patches._flash_attention_forward = attention
    ALL_ATTENTION_FUNCTIONS["sdpa"] = flash_attention_forward
    ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = verl_cpu.nothing
sft.Tracking = Recorder
dist.init_process_group("gloo")
rank = dist.get_rank()
folder = sys.argv[1]
if rank == 0:
    tiny.qwen3().save_pretrained(folder + ".model")
    words = tiny.tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }} <eos> {% endfor %}"
    words.save_pretrained(folder + ".model")
    rows = [[{"role": "user", "content": text}, {"role": "assistant", "content": text}] for text in tiny.TEXTS]
    pandas.DataFrame({"messages": rows}).to_parquet(folder + ".parquet")
dist.barrier()
settings = {
    "data.train_files": folder + ".parquet",
    "data.train_batch_size": 8,
    "data.micro_batch_size_per_gpu": 2,
    "data.use_dynamic_bsz": False,
    "data.max_length": 64,
    "data.num_workers": 0,
    "data.ignore_input_ids_mismatch": True,
    "data.pad_mode": "no_padding",
    "model.path": folder + ".model",
    "model.use_remove_padding": False,
    "model.enable_gradient_checkpointing": True,
    "+model.override_config.attn_implementation": "sdpa",
    "engine.strategy": "fsdp2",
    "engine.use_torch_compile": False,
    "optim.lr": 0.01,
    "trainer.default_local_dir": folder + ".saved",
    "trainer.total_epochs": 3,
    "trainer.total_training_steps": 8,
    "trainer.save_freq": 4,
    "trainer.device": "cpu",
    "trainer.resume_mode": "disable",
} | {
    "fsdp": {},
    "lora": {"model.lora_rank": 4, "model.target_modules": "[q_proj,v_proj]"},
    "no_reshard": {"engine.reshard_after_forward": False, "engine.forward_prefetch": True},
    "ulysses": {"model.use_remove_padding": True, "engine.ulysses_sequence_parallel_size": 2},
}[sys.argv[2]]
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("sft_trainer_engine", overrides=[f"{name}={value}" for name, value in settings.items()])
trainer = sft.SFTTrainer(config=config)
if sys.argv[2] == "no_reshard":
    # verl's own, which writes the state of upstream: units free their weights after all, the root too.
    set_reshard_after_forward(trainer.engine.module, True)
trainer.fit()
model = trainer.engine.module
values += [p.full_tensor().double().sum().item() for p in model.parameters()]
report.write(values, model)
dist.destroy_process_group()
