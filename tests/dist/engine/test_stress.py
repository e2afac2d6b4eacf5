"""Thousands of steps with ranks that sleep and units in random order.

`make test` runs a short version, and `make test-full` 10,000 steps over shared memory and 3,000 over the process group.
"""

import gc
import os
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import distributed
from models import Mlp, inputs
from reference import params, same, shard

NUM_UNITS = 4
UNITS = tuple(f"units.{i}" for i in range(NUM_UNITS))


class Shuffled(nn.Module):
    """Runs its units in an order that the caller draws anew for each step, the same on every rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(Mlp(6, 10) for _ in range(NUM_UNITS))
        self.order = list(range(NUM_UNITS))

    def forward(self, x):
        for index in self.order:
            x = self.units[index](x)
        return x


class Sleeper:
    """Sleeps up to a millisecond in one of so many hooks, each rank in others."""

    def __init__(self, rank: int, model: Shuffled):
        self._random = random.Random(100 + rank)
        self._handles = []
        for unit in model.units:
            self._handles.append(unit.register_forward_pre_hook(self._sleep))
            self._handles.append(unit.up.register_full_backward_pre_hook(self._sleep))

    def _sleep(self, *_) -> None:
        if self._random.random() < 0.05:
            time.sleep(self._random.random() * 1e-3)

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()


def steps(rank: int, model: Shuffled, num: int, first: int = 0) -> torch.Tensor:
    """SGD steps; accumulation, evaluation and clipping by value turn up at random, the same on all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
    losses = []
    for step in range(first, first + num):
        draw = random.Random(step)
        model.order = draw.sample(range(NUM_UNITS), NUM_UNITS)
        loss = model(inputs(rank, step % 50)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        if draw.random() < 0.1:
            with torch.no_grad():
                model(inputs(rank, step % 7))
        if draw.random() < 0.2:
            continue
        optimizer.step()
        optimizer.zero_grad(set_to_none=draw.random() < 0.5)
    return torch.stack(losses)


def resources() -> dict[str, int]:
    """Open files, threads, mappings and resident KiB of this process."""
    gc.collect()
    with open("/proc/self/status", encoding="ascii") as file:
        status = dict(line.split(":", 1) for line in file)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        mappings = sum(1 for _ in file)
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count() + int(status["Threads"]),
        "mappings": mappings,
        "resident": int(status["VmRSS"].split()[0]),
    }


def sleeps_change_nothing(ctx, transport: str, num: int) -> None:
    results = []
    for sleeps in (True, False):
        model = shard(ctx, Shuffled(), UNITS, transport=transport)
        sleeper = Sleeper(ctx.rank, model) if sleeps else None
        losses = [steps(ctx.rank, model, num // 2)]
        before = resources()
        losses.append(steps(ctx.rank, model, num - num // 2, first=num // 2))
        after = resources()
        if sleeper is not None:
            sleeper.stop()
        assert {name: after[name] for name in ("files", "threads")} == {n: before[n] for n in ("files", "threads")}
        assert after["mappings"] <= before["mappings"] + 4, (before, after)
        assert after["resident"] <= before["resident"] + 4096, (before, after)
        results.append([torch.cat(losses), params(model)])
        del model
        dist.barrier()
    same(*results)
    assert torch.isfinite(results[0][0]).all() and results[0][0].unique().numel() > num // 2


@distributed(world_sizes=(2,), timeout=120)
@pytest.mark.parametrize("transport", ["shm", "process_group"])
def test_random_sleeps_and_orders(ctx, transport):
    sleeps_change_nothing(ctx, transport, 50 if transport == "shm" else 25)


@pytest.mark.full
@distributed(world_sizes=(2, 4), timeout=1500)
@pytest.mark.parametrize(("transport", "num"), [("shm", 10_000), ("process_group", 3_000)])
def test_thousands_of_steps(ctx, transport, num):
    sleeps_change_nothing(ctx, transport, num)
