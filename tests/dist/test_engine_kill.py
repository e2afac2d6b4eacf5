"""A rank is killed in forward or backward: the others end within the timeout, name it, and nothing is left behind."""

import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest

from harness import dist_run
from models import STACK_UNITS, Stack, inputs
from reference import shard

TIMEOUT_S = 8.0


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(ctx, moment, victim, folder):
    tempfile.tempdir = folder
    model = shard(ctx, Stack(), STACK_UNITS, transport="shm", timeout=timedelta(seconds=TIMEOUT_S))
    model(inputs(ctx.rank)).square().mean().backward()
    if ctx.rank == victim:
        if moment == "forward":
            model.blocks[1].register_forward_pre_hook(lambda *_: die())
        elif moment == "backward":
            model.blocks[1].register_full_backward_pre_hook(lambda *_: die())
    started = time.monotonic()
    try:
        for step in range(1, 4):
            if moment == "between" and ctx.rank == victim:
                die()
            model(inputs(ctx.rank, step)).square().mean().backward()
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def in_shared_memory():
    return {path for path in Path("/dev/shm").iterdir() if "fsdp2x" in path.name}


@pytest.mark.parametrize("moment", ["forward", "backward", "between"])
@pytest.mark.parametrize(("world", "victim"), [(2, 0), (2, 1), (3, 1)])
def test_kill_with_shared_memory(tmp_path, moment, world, victim):
    before = in_shared_memory()
    died = {victim: -signal.SIGKILL}
    outcomes = dist_run(train_until_killed, world, moment, victim, str(tmp_path), timeout=60, expect_exit=died)
    for outcome in outcomes:
        if outcome.rank != victim:
            message, seconds = outcome.value
            assert f"rank {victim}" in message, message
            assert seconds < TIMEOUT_S, f"a dead process is seen at once, not after {seconds:.1f} s"
    assert in_shared_memory() <= before
    assert not list(tmp_path.iterdir())
