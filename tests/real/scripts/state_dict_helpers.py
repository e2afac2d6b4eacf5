"""torch's state-dict helpers: full dictionaries from rank 0 into shards, back, and torch.distributed.checkpoint.

No change for a CPU.
"""

import copy
import sys

import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import report

dist.init_process_group("gloo")
rank = dist.get_rank()
whole = tiny.qwen3().state_dict() if rank == 0 else {}
with torch.device("meta"):
    model = tiny.qwen3()
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
model.to_empty(device="cpu")
with torch.no_grad():
    model.model.rotary_emb.__init__(model.config)
model.model.rotary_emb.to("cpu")
from_rank0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
to_rank0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
set_model_state_dict(model, whole, options=from_rank0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
values = []


def train(steps):
    for ids in tiny.batches(steps, 2, rank):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())


train(4)
# Copies: on a CPU the step count of the dictionary is that of the optimizer.
weights = copy.deepcopy(get_model_state_dict(model, options=to_rank0))
moments = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=to_rank0))
shards = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
dcp.save(shards, checkpoint_id=sys.argv[1] + ".dcp")
train(4)
if sys.argv[2] == "full":
    set_model_state_dict(model, weights, options=from_rank0)
    set_optimizer_state_dict(model, optimizer, moments, options=from_rank0)
else:
    shards = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(shards, checkpoint_id=sys.argv[1] + ".dcp")
    set_state_dict(model, optimizer, model_state_dict=shards["model"], optim_state_dict=shards["optimizer"])
train(4)
assert values[4:8] == values[8:12], "resumed with other numbers"
report.write(values, model)
dist.destroy_process_group()
