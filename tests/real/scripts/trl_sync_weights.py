"""TRL's way of weights to vLLM, as its trainers walk it, with or without examples/integrations.

No change for a CPU: vLLM itself is not there, only what would go to it.
"""

import sys
import time
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from trl.generation.vllm_generation import VLLMGeneration

import report

dist.init_process_group("gloo")
model = tiny.qwen3(num_hidden_layers=8)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
sender = VLLMGeneration.__new__(VLLMGeneration)
sender.accelerator = Accelerator(cpu=True)
if sys.argv[2] == "example":
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "integrations"))
    from trl_sync_in_buckets import sync_in_buckets

    sync_in_buckets(sender)
values, seconds = [], []
for _ in range(20):
    start = time.perf_counter()
    sent = [(name, whole.double().sum().item()) for name, whole in sender._iter_fsdp2_params(model)]
    seconds.append(time.perf_counter() - start)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
assert [name for name, _ in sent] == [name for name, _ in model.named_parameters()]
report.ends[:] = [sum(seconds[:i]) for i in range(21)]
report.write([value for _, value in sent], model)
dist.destroy_process_group()
