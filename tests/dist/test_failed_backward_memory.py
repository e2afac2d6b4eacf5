"""A backward raises and the model is given up, although the process goes on: its memory file is closed."""

import gc
import os
from datetime import timedelta

from harness import dist_run
from models import STACK_UNITS, Stack, inputs
from reference import shard


def fail(*_):
    raise RuntimeError("on purpose")


def memory_files():
    return [name for name in os.listdir("/proc/self/fd") if "memfd:fsdp2x" in target_of(name)]


def target_of(name):
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        return ""


def give_up(ctx, index):
    model = shard(ctx, Stack(), STACK_UNITS, transport="shm", timeout=timedelta(seconds=8))
    model.blocks[index].register_full_backward_pre_hook(fail)
    try:
        model(inputs(ctx.rank)).square().mean().backward()
    except RuntimeError as error:
        assert "on purpose" in str(error)
    del model
    gc.collect()
    return len(memory_files())


def test_nothing_stays_open():
    for index in (1, 0):  # with reductions of the blocks behind it posted
        for outcome in dist_run(give_up, 2, index, timeout=60):
            assert outcome.value == 0, (index, outcome)
