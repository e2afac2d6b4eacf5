"""Several GPUs, one rank each, over NCCL: steps equal FSDP2's, failures reach every rank, graphs are replayed.

`make gpu-test-8` runs it on all GPUs. The rehearsal runs the same body on two CPU ranks, on recorded streams.
"""

import contextlib
import copy
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from arrangements import CASES, WIDTH, run
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from one_gpu import CLOSE, device_of, needs_gpu
from reference import grads, mean_of_ranks, same, shard, shard_stock
from streams import Experts

NUM_GPUS = torch.cuda.device_count()
# run_parts.py sets it where NCCL takes two ranks on one GPU.
SHARES_GPU = os.environ.get("FSDP2X_RANKS_SHARE_GPU") == "1"
several = pytest.mark.skipif(NUM_GPUS < 2 and not SHARES_GPU, reason="needs several CUDA devices")
places = pytest.mark.parametrize(
    "place", [pytest.param("cuda", marks=[needs_gpu, several]), pytest.param("streams", marks=pytest.mark.full)]
)
WORLD = max(NUM_GPUS, 2)
# Settings that use other memory or another group, on a bf16 model.
SETTINGS = {
    "a group for reductions": lambda model: model.set_separate_reduce_scatter_group(),
    "memory of the process group": lambda model: model.set_allocate_memory_from_process_group_for_comm(True),
    "symmetric memory": lambda model: model.set_symm_mem_for_comm("NCCL"),
    "copy engines": lambda model: model.set_copy_engine_all_gather(True),
}
SYMMETRIC = ("symmetric memory", "copy engines")
FAILURES = {"raises": "raised on purpose", "killed": "SIGKILL|Signal 9", "skips a unit": "Error"}


@contextlib.contextmanager
def ranks_of(ctx, place: str) -> Iterator[str]:
    """Yields the device type. On GPUs, each rank has its own device, and the world uses NCCL."""
    device = device_of(place)
    if device == "cuda":
        torch.cuda.set_device(ctx.rank % NUM_GPUS)
        dist.destroy_process_group()
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ctx.world, is_master=False)
        options = {"rank": ctx.rank, "world_size": ctx.world, "timeout": timedelta(seconds=60)}
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.PrefixStore("gpus", store), **options)
    yield device


def mesh_of(device: str, sizes: tuple[int, ...]) -> DeviceMesh:
    names = ("shard",) if len(sizes) == 1 else ("replicate", "shard")
    return DeviceMesh(device, torch.arange(torch.Size(sizes).numel()).view(sizes), mesh_dim_names=names)


@distributed(world_sizes=sorted({WORLD, max(WORLD - 1, 2)}), timeout=200, fresh=True)
@places
@pytest.mark.shows("many GPUs")
def test_steps_are_stocks(ctx, place):
    """Every arrangement, also in a world that does not divide the rows."""
    wrong = {}
    with ranks_of(ctx, place) as device:
        for name, case in [*CASES.items(), *((name, CASES["bf16"]) for name in SETTINGS)]:
            if ctx.world % 2 and (len(case.sizes) == 2 or name == "kept in a smaller world"):
                continue
            if name in SYMMETRIC and place != "cuda":
                continue
            sizes = (2, ctx.world // 2) if len(case.sizes) == 2 else (ctx.world,)
            options = {"mesh": mesh_of(device, sizes), **case.options}
            model = case.make()
            stock = shard_stock(copy.deepcopy(model), case.units, **options)
            ours = shard(ctx, model, case.units, transport=place if place == "streams" else "auto", **options)
            with mock.patch.dict(os.environ, {"NCCL_CTA_POLICY": "2"} if name == "copy engines" else {}):
                SETTINGS.get(name, lambda model: None)(ours)
            for one in (ours, stock) if name in SYMMETRIC else ():
                one.set_force_sum_reduction_for_comms(True)
            got, expected = (run(one, case, device, rank=ctx.rank) for one in (ours, stock))
            try:
                same(got, expected, name, **CLOSE[case.close])
            except AssertionError as error:
                wrong[name] = str(error)[:300]
    assert wrong == {}


@distributed(world_sizes=(WORLD,), timeout=100, fresh=True)
@places
@pytest.mark.shows("many GPUs")
def test_gradients_that_one_rank_lacks_are_not_stocks(ctx, place):
    """FSDP2's ranks would wait for each other, so the unsharded model is the reference."""
    with ranks_of(ctx, place) as device:
        reference = Experts().to(device)
        model = shard(ctx, Experts().to(device), transport=place if place == "streams" else "auto")
        x = [inputs(rank, width=16).to(device) for rank in range(ctx.world)]
        mean_of_ranks(reference, lambda m, rank: m(x[rank], int(rank == 1)).square().mean(), ctx.world)
        model(x[ctx.rank], int(ctx.rank == 1)).square().mean().backward()
        same(grads(model), grads(reference), "gradients", rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", FAILURES)
@places
@pytest.mark.shows("many GPUs")
def test_a_rank_that_fails_ends_all(how, place):
    """Under torchrun, all ranks end with a message before torchrun's timeouts."""
    script = str(Path(__file__).with_name("fail_step.py"))
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={WORLD}", "--master_port=29523"]
    start = time.monotonic()
    done = subprocess.run(
        [*launch, script, place, how], capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode != 0 and time.monotonic() - start < 80, output[-3000:]
    assert any(word in output for word in FAILURES[how].split("|")), output[-3000:]


@distributed(world_sizes=(WORLD,), timeout=200, fresh=True)
@pytest.mark.parametrize("place", [pytest.param("cuda", marks=[needs_gpu, several])])
@pytest.mark.shows("many GPUs")
def test_captured_steps_over_nccl(ctx, place):
    from test_graphs import captured_steps, eager_steps

    with ranks_of(ctx, place) as device:
        model, mesh = Stack(width=WIDTH, hidden=96), mesh_of(device, (ctx.world,))
        expected = eager_steps(shard(ctx, copy.deepcopy(model), STACK_UNITS, mesh=mesh))
        same(captured_steps(shard(ctx, model, STACK_UNITS, mesh=mesh)), expected, "steps", **CLOSE["fp32"])
