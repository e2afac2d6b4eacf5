"""The all-reduce over replicas of one host: through shared memory, in rank order, the same bits on every replica."""

import random
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp2x.base.agreement import Agreement
from fsdp2x.base.failures import UnitNumber
from fsdp2x.lifecycle.transport_choice import TransportChoice
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import grads, mean_of_ranks, only_fsdp2x, same, shard


def all_reduce_of():
    replicas = SimpleNamespace(replicate_group=dist.group.WORLD, device=torch.device("cpu"))
    root = SimpleNamespace(
        shared=SimpleNamespace(tree=()),
        settings=SimpleNamespace(transport="shm", timeout=timedelta(seconds=20)),
        number=UnitNumber(),
    )
    return TransportChoice(root).all_reduce_of(replicas)


def values_of(rank, call, numel, dtype):
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def twin(ranks, call, numel, dtype, average):
    """In rank order, in float32 (float64 for float64), rounded once."""
    wide = torch.promote_types(dtype, torch.float32)
    total = values_of(0, call, numel, dtype).to(wide)
    for rank in range(1, ranks):
        total = total + values_of(rank, call, numel, dtype).to(wide)
    return (total / ranks if average else total).to(dtype)


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sums_in_rank_order(ctx, dtype):
    """Many calls of changing size, with ranks that sleep: scratches are used again only when all have read them."""
    all_reduce = all_reduce_of()
    draw, sleeps = random.Random(0), random.Random(ctx.rank)
    for call in range(20):
        numel, average = draw.choice((1, 7, 1000, 4096, 70_001)), draw.random() < 0.5
        values = values_of(ctx.rank, call, numel, dtype)
        if sleeps.random() < 0.3:
            time.sleep(sleeps.random() * 3e-3)
        all_reduce(values, average)
        same(values, twin(ctx.world, call, numel, dtype, average))


def counted(function, calls: list):
    return lambda *args: (calls.append(1), function(*args))[1]


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
@pytest.mark.parametrize("transport", ["auto", "process_group"])
def test_gradients_of_replicas(ctx, shape, transport):
    """The mean of all ranks; the same bits on every replica and in every run; without the process group if shared."""
    only_fsdp2x(ctx)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    runs = []
    for _ in range(2):
        model, plain = Stack(), Stack()
        shard(ctx, model, STACK_UNITS, mesh=mesh, transport=transport)
        calls: list = []
        with torch.no_grad():
            model(inputs(ctx.rank))  # replicas compare their shards once
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Agreement, "all_reduce", counted(Agreement.all_reduce, calls))
            for step in range(2):  # accumulates
                model(inputs(ctx.rank, step)).square().mean().backward()
        assert bool(calls) == (transport == "process_group")
        mean_of_ranks(plain, lambda one, rank: sum(one(inputs(rank, step)).square().mean() for step in range(2)), 4)
        runs.append(grads(model))
        for param in model.parameters():
            mine = param.grad.to_local().contiguous()
            others = [torch.empty_like(mine) for _ in range(shape[0])]
            dist.all_gather(others, mine, group=mesh.get_group("replicate"))
            for other in others:
                same(other, mine)
        same(runs[-1], grads(plain), rtol=1e-5, atol=1e-6)
    if transport == "auto":
        same(runs[0], runs[1])
