"""Float8 training with torchao's all-gather in float8, with and without precomputed scales. No change for a CPU."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

import report

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)))
config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
model = convert_to_float8_training(model, config=config)
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
values = []
for step in range(6):
    torch.manual_seed(10 * step + dist.get_rank())
    x = torch.randn(16, 32)
    loss = (model(x) - x.roll(1, 1)).square().mean()
    loss.backward()
    values += [loss.item(), *(param.grad.full_tensor().sum().item() for param in model.parameters())]
    optimizer.step()
    optimizer.zero_grad()
    if sys.argv[2] == "precomputed":
        precompute_float8_dynamic_scale_for_fsdp(model)
report.write(values, model)
dist.destroy_process_group()
