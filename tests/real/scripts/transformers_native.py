"""transformers shards while it loads (``distributed_config``), then a loop or its Trainer; saved and loaded again.

No change for a CPU.
"""

import os
import sys

import tiny
import torch
import torch.distributed as dist
from transformers import Qwen3ForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import report

rank = int(os.environ["RANK"])
folder = f"{sys.argv[1]}.model.{rank}"
# Rows that shards divide: where they do not, stock loses updates of a weight that is tied anew after sharding.
tied = {"tie_word_embeddings": True, "vocab_size": 64} if sys.argv[3] == "tied" else {}
tiny.qwen3(**tied).save_pretrained(folder)
sizes = {"fsdp_size": 2} if int(os.environ["WORLD_SIZE"]) == 2 else {"fsdp_size": 2, "dp_replicate_size": 2}
model = Qwen3ForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
model.train()
values = []
if sys.argv[2] == "loop":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids in tiny.batches(8, 2, rank):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        values += [loss.item(), norm.item()]
else:
    settings = tiny.trainer_settings(TrainingArguments)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.cat(tiny.batches(32, 2, 0))]
    trainer = Trainer(model=model, args=settings, train_dataset=rows)
    trainer.train()
    values += [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]
assert len(values) >= 16, values
model.save_pretrained(sys.argv[1] + ".saved")
dist.barrier()
whole = Qwen3ForCausalLM.from_pretrained(sys.argv[1] + ".saved")
values += [weight.double().sum().item() for weight in whole.state_dict().values()]
report.write(values, model)
dist.destroy_process_group()
