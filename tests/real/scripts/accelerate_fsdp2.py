"""accelerate's own loop: prepare, accumulation, clipping, save_state, load_state, the full state dict.

For a CPU: as_fsdp.py.
"""

import os
import sys
from pathlib import Path

os.environ |= {"ACCELERATE_USE_CPU": "true"}

import as_fsdp
import tiny
import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin

import report

del as_fsdp
settings = {
    "plain": {},
    "example": {},
    "cpu_ram_efficient": {"cpu_ram_efficient_loading": True},
    "no_reshard_checkpointing": {"reshard_after_forward": False, "activation_checkpointing": True},
}[sys.argv[2]]
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="SHARDED_STATE_DICT", **settings
)
accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2, cpu=True)
model = tiny.qwen3(tie_word_embeddings=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
if sys.argv[2] == "example":
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "integrations"))
    from accelerate_local_step import step_locally

    step_locally(optimizer)
values = []


def train(steps):
    for ids in tiny.batches(2 * steps, 2, accelerator.process_index):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                values.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
        values.append(loss.item())


train(4)
accelerator.save_state(sys.argv[1] + ".state")
start = len(values)
train(4)
accelerator.load_state(sys.argv[1] + ".state")
middle = len(values)
train(4)
assert values[start:middle] == values[middle:], "resumed with other numbers"
full = accelerator.get_state_dict(model)
values += [value.double().sum().item() for value in full.values()]  # on rank 0; none elsewhere
assert len(values) >= 36
report.write(values, model)
accelerator.end_training()
