"""One GPU: a unit's weights are gathered, and its gradients written, while other units compute; seen in a trace.

Alone a rank asks nobody: its gather is the cast of its own shards into the slot, on the lane that would feed NCCL, and
its gradients are packed where they are to lie; with a divide factor they pass through a buffer, on the lane of
reductions. How transfers between GPUs overlap takes several GPUs.
"""

import pytest
import torch
from torch import nn

import one_gpu
from harness import distributed
from one_gpu import device_work, needs_traces, on_gpu
from reference import only_fsdp2x, shard

pytestmark = [one_gpu.needs_gpu, pytest.mark.shows("overlap")]

WIDTH, ROWS, NUM = 4096, 4096, 6


@distributed(world_sizes=(1,), timeout=300)
@pytest.mark.parametrize("divides", [False, True])
def test_gathers_and_reductions_run_beside_the_compute(ctx, divides):
    only_fsdp2x(ctx)
    mesh = on_gpu(ctx)
    one_gpu.needs_memory(16 * 2**30)
    needs_traces()
    torch.manual_seed(0)
    # Products of milliseconds, copies of tens of microseconds.
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM))).cuda()
    model = shard(ctx, model, [str(i) for i in range(NUM)], mesh=mesh)
    if divides:
        model.set_gradient_divide_factor(2.0)
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
    assert len({one.stream for one in beside}) >= (2 if divides else 1), "lanes have streams of their own"
    # A gather for each unit in forward and in backward; the rows of each unit.
    assert len(beside) >= (3 if divides else 2) * NUM
    hidden = device_work.shared_us(beside, products) / device_work.busy_us(beside)
    # The first gather has nothing to hide behind, nor have the last rows.
    assert hidden > 0.5, f"{hidden:.2f} of {device_work.busy_us(beside):.0f} us"
    ahead = [one for one in beside if device_work.shared_us([one], products) > 0]
    assert len(ahead) >= 2 * NUM - 4, f"{len(ahead)} of {len(beside)}"
