"""``fully_shard(timeout=)`` ends waits for a peer over both transports. It raises on a device, where no rank waits."""

import contextlib
import dataclasses
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch import distributed as dist

import fsdp2x
from fsdp2x.lifecycle import api
from harness import distributed
from large_gathers import everything_is_large
from models import STACK_UNITS, Stack, inputs
from reference import TRANSPORTS, shard

TIMEOUT_S = 1
# The process group has a longer timeout.
LIMIT_S = 20


@distributed(world_sizes=(2,), timeout=60, fresh=True)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("moment", ["gather", "gather in place", "reduction"])
def test_a_peer_that_stays_away(ctx, moment, transport):
    with everything_is_large() if moment == "gather in place" else contextlib.nullcontext():
        wait_in_vain(ctx, moment, transport)


def wait_in_vain(ctx, moment, transport):
    timeout = timedelta(seconds=TIMEOUT_S)
    model = shard(ctx, Stack(), STACK_UNITS, transport=transport, timeout=timeout)
    model(inputs(ctx.rank)).sum().backward()
    store = dist.distributed_c10d._get_default_store()
    if ctx.rank == 1:
        if moment == "reduction":
            model(inputs(ctx.rank))
        store.wait(["the other gave up"], timedelta(seconds=LIMIT_S))
        return
    loss = model(inputs(ctx.rank)).sum() if moment == "reduction" else None
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1" if transport == "shm" else ""):
        model(inputs(ctx.rank)) if loss is None else loss.backward()
    took = time.monotonic() - begin
    store.set("the other gave up", "")
    assert 0.9 * TIMEOUT_S < took < LIMIT_S, took


@distributed(world_sizes=(1,))
def test_on_a_device_it_is_refused(ctx):
    """On a device, the process group's own timeout ends operations that hang."""
    group = api.shard_group

    def on_cuda(*args):
        return dataclasses.replace(group(*args), device=torch.device("cuda", 0))

    with mock.patch.object(api, "shard_group", on_cuda):
        with pytest.raises(ValueError, match="timeout=0:00:09 acts on .*cuda"):
            fsdp2x.fully_shard(Stack(), timeout=timedelta(seconds=9))
    for wrong in (5, timedelta(0), timedelta(seconds=-1)):
        with pytest.raises((ValueError, TypeError), match="timeout"):
            fsdp2x.fully_shard(Stack(), timeout=wrong)
