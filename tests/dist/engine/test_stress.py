"""Runs thousands of steps with ranks that sleep and units in random order, and looks for what they leave behind.

`make test` runs a short version, and `make test-full` 10,000 steps over shared memory and 3,000 over the process group,
and 300 steps with all that a long run does between them.
"""

import contextlib
import gc
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2x
from checkpoints import shared_folder
from engines import Store, peer
from fsdp2x.base import torch_private
from harness import distributed
from models import STACK_UNITS, Mlp, Stack, inputs
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
        assert after["files"] == before["files"], (before, after)
        # A pool of torch may start its last thread now. One of each step would be twelve or more.
        assert after["threads"] <= before["threads"] + 2, (before, after)
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


# ---- what a long run does between its steps

PERIOD = 20  # steps after which all of it has happened


class LongRun:
    """Trains a model, and now and then saves, pushes, sleeps, fails, and trains other models."""

    def __init__(self, ctx, transport, folder, stack):
        self.ctx, self.transport, self.folder = ctx, transport, folder
        self.model, self.optimizer = self.made()
        self.pushes = []
        for over in ("memory", "group"):
            target, _ = stack.enter_context(peer(ctx, Store(), over=over))
            options = {"names": "model", "transport": transport, "deltas": over == "memory", "bucket_bytes": 300}
            self.pushes.append(stack.enter_context(fsdp2x.sync.connect(self.model, target, **options)))

    def made(self, **options):
        model = shard(self.ctx, Stack(), STACK_UNITS, transport=self.transport, **options)
        return model, fsdp2x.optim.AdamW(model.parameters(), lr=1e-3)

    def train(self, model, optimizer, number):
        model(inputs(self.ctx.rank, number % 50)).square().mean().backward()
        fsdp2x.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def step(self, number):
        self.train(self.model, self.optimizer, number)
        happens = {
            self.save: number % 4 == 0,
            self.push: number % 3 == 0,
            self.train_in_own_group: number % 5 == 0,
            self.sleep: number % 10 == 1,
            self.reload: number % 10 == 6,
            self.fail: number % 10 == 3,
            self.push_once: number % PERIOD == 7,
        }
        for what, is_due in happens.items():
            if is_due:
                what(number)

    def save(self, number):
        form = ("sharded", "full")[number // 8 % 2]
        options = {"step": number, "form": form, "keep": 2, "async_save": number % 8 == 0}
        fsdp2x.checkpoint.save(self.folder / form, self.model, self.optimizer, **options)

    def push(self, number):
        for sync in self.pushes:
            sync.push(version=number)

    def push_once(self, number):
        with peer(self.ctx, Store()) as (target, _), fsdp2x.sync.connect(self.model, target, names="model") as sync:
            sync.push(version=number)
        fsdp2x.save_hf(self.model, self.folder / "hf", force=True)

    def train_in_own_group(self, number):
        group = dist.new_group()
        model, optimizer = self.made(mesh=DeviceMesh.from_group(group, "cpu"))
        for again in range(2):
            self.train(model, optimizer, number + again)
        del model, optimizer
        gc.collect()
        dist.destroy_process_group(group)

    def sleep(self, number):
        fsdp2x.sleep(self.model, self.optimizer)
        fsdp2x.wake(self.model, self.optimizer)

    def reload(self, number):
        model, optimizer = self.made()
        fsdp2x.checkpoint.wait(self.model)
        fsdp2x.checkpoint.load(self.folder / "sharded", model, optimizer)

    def fail(self, number):
        """An error of one rank that all ranks catch. Over shared memory it is in another model, which ends with it."""
        model, optimizer = self.made() if self.transport == "shm" else (self.model, self.optimizer)
        self.train(model, optimizer, number)
        handle = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
        if self.ctx.rank:
            handle.remove()
        with contextlib.suppress(ZeroDivisionError, RuntimeError):
            model(inputs(self.ctx.rank)).sum().backward()
        handle.remove()
        model.zero_grad()

    def belongings(self):
        """What must not grow: descriptors by kind, threads, files of shared memory. Also the number of store keys."""
        fsdp2x.checkpoint.wait(self.model)
        gc.collect()
        opened = Counter()
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # of the list itself
                opened[os.readlink(path).partition(":")[0]] += 1
        shared = sum("fsdp2x" in name for name in os.listdir("/dev/shm"))
        dist.barrier()
        num_keys = torch_private.store_of(dist.group.WORLD).num_keys()
        dist.barrier()
        return (opened, resources()["threads"], shared), num_keys


def leaves_nothing(ctx, transport, num_steps, most_kib):
    with shared_folder() as folder, contextlib.ExitStack() as stack:
        run, counts, resident = LongRun(ctx, transport, folder, stack), [], []
        for number in range(1, num_steps + 1):
            run.step(number)
            if number % PERIOD == 0:
                counts.append(run.belongings())
                resident.append(resources()["resident"])
        (first, keys_before), (last, keys_after) = counts[0], counts[-1]
        assert first == last, (first, last)
        # torch leaves two keys of each process group, and fsdp2x makes one more for each group, with three keys.
        num_groups = (num_steps - PERIOD) // 5
        assert keys_after - keys_before <= 7 * num_groups, counts
        assert resident[-1] <= resident[len(resident) // 3] + most_kib, resident
        fsdp2x.checkpoint.wait(run.model)
        dist.barrier()


@distributed(world_sizes=(2,), timeout=120, fresh=True)
def test_a_run_leaves_nothing_behind(ctx):
    leaves_nothing(ctx, "shm", 2 * PERIOD, most_kib=16_384)


@pytest.mark.full
@distributed(world_sizes=(2,), timeout=900, fresh=True)
@pytest.mark.parametrize("transport", ["shm", "process_group"])
def test_a_long_run_leaves_nothing_behind(ctx, transport):
    leaves_nothing(ctx, transport, 300, most_kib=8_192)
