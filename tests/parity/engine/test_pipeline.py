"""Pipeline stages whose modules are sharded: several forwards before their backwards, one reduction at the end."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

from harness import distributed
from models import Mlp
from reference import TORCH_MINOR, grads, same, shard, shard_stock

WIDTH, MICRO_BATCHES = 6, 4


def stage_module(index):
    torch.manual_seed(index)
    return nn.Sequential(Mlp(WIDTH, 7), Mlp(WIDTH, 5), nn.LayerNorm(WIDTH))


def schedule_of(name, modules, rank, group):
    num_stages = 2 * len(modules)
    stages = [
        PipelineStage(module, rank + 2 * i, num_stages, torch.device("cpu"), group=group)
        for i, module in enumerate(modules)
    ]
    schedule = getattr(schedules, name)
    loss = torch.nn.functional.mse_loss
    return schedule(stages if len(stages) > 1 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=loss)


@pytest.mark.skipif(TORCH_MINOR < 15, reason="pipeline stages finalize backward by themselves since torch 2.15")
@distributed(world_sizes=(4,))
@pytest.mark.parametrize(
    "name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"]
)
@pytest.mark.parametrize("transport", ["shm", "process_group"])
def test_schedules(ctx, name, transport):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    dp, pp = mesh["dp"], mesh["pp"]
    rank = pp.get_local_rank()
    num = 2 if "Interleaved" in name else 1
    modules = [stage_module(rank + 2 * i) for i in range(num)]
    results = []
    for apply in (shard_stock, lambda *a, **k: shard(ctx, *a, transport=transport, **k)):
        sharded = [apply(copy.deepcopy(module), ("0", "1"), mesh=dp) for module in modules]
        schedule = schedule_of(name, sharded, rank, pp.get_group())
        optimizer = torch.optim.SGD([p for module in sharded for p in module.parameters()], lr=0.1)
        seen = []
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + dp.get_local_rank())
            x, target = torch.randn(2, 2 * MICRO_BATCHES, WIDTH, generator=generator)
            losses = []
            keywords = {"target": target, "losses": losses} if rank == 1 else {}
            schedule.step(*((x,) if rank == 0 else ()), **keywords)
            seen.append([[loss.detach() for loss in losses], [grads(module) for module in sharded]])
            optimizer.step()
            optimizer.zero_grad()
        results.append(seen)
    same(results[1], results[0])
