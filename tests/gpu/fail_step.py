"""A rank that fails in its second step, for torchrun: `fail_step.py cuda|streams raises|killed|"skips a unit"`."""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fsdp2x

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from models import Stack, inputs

place, how = sys.argv[1:]
rank, device = int(os.environ["RANK"]), "cuda" if place == "cuda" else "cpu"
if device == "cuda":
    torch.cuda.set_device(rank)
dist.init_process_group(timeout=timedelta(seconds=60))
model: nn.Module = Stack(width=64, hidden=96)
for unit in (*model.blocks, model):
    fsdp2x.fully_shard(
        unit, auto_wrap=False, transport="process_group", mesh=dist.init_device_mesh(device, (dist.get_world_size(),))
    )
for step in range(2):
    if step and rank == dist.get_world_size() - 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "skips a unit":
            del model.blocks[1]
        else:

            def fail(*_) -> None:
                raise RuntimeError("raised on purpose")

            model.blocks[0].register_full_backward_pre_hook(fail)
    loss = model(inputs(rank, step, width=64).to(device)).square().mean()
    loss.backward()
    print(f"rank {rank}: step {step}, loss {loss.item():.4f}", flush=True)
