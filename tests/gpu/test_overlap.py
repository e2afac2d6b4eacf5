"""One GPU: a unit's weights are gathered while other units compute, as seen in a trace.

A single rank copies its own shards into the slot, on the stream that would feed NCCL. It packs gradients directly into
their final place, on the compute stream. The overlap of transfers between GPUs needs several GPUs.
"""

import pytest
import torch
from torch import nn

import one_gpu
from harness import distributed
from one_gpu import device_work, needs_traces, on_gpu
from reference import shard

pytestmark = [one_gpu.needs_gpu, pytest.mark.shows("overlap")]

WIDTH, ROWS, NUM = 4096, 4096, 6


@distributed(world_sizes=(1,), timeout=300)
def test_gathers_run_beside_the_compute(ctx):
    mesh = on_gpu(ctx)
    one_gpu.needs_memory(16 * 2**30)
    needs_traces()
    torch.manual_seed(0)
    # Products take milliseconds, and copies tens of microseconds.
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM))).cuda()
    model = shard(ctx, model, [str(i) for i in range(NUM)], mesh=mesh)
    x = torch.randn(ROWS, WIDTH, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    work = device_work.work_of(device_work.trace_of(step))
    compute = device_work.compute_stream(work)
    products = [one for one in work if one.stream == compute]
    beside = [one for one in work if one.stream != compute]
    assert len(beside) >= 2 * NUM, "each unit gathers in forward and in backward"
    hidden = device_work.shared_us(beside, products) / device_work.busy_us(beside)
    # The first gather has no compute to overlap with.
    start = work[0].start_us
    times = [f"{one.stream}: {one.start_us - start:.0f}-{one.end_us - start:.0f} {one.name[:40]}" for one in work]
    assert hidden > 0.5, f"{hidden:.2f} of {device_work.busy_us(beside):.0f} us\n" + "\n".join(times)
    ahead = [one for one in beside if device_work.shared_us([one], products) > 0]
    assert len(ahead) >= 2 * NUM - 4, f"{len(ahead)} of {len(beside)}"
