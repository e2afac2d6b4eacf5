"""One GPU: training steps against FSDP2, alone and with several gloo ranks on the same device.

gloo moves everything through the host, so two ranks check the numbers but not the speed.
"""

import copy
import functools

import pytest
import torch
from torch import nn

import fsdp2x
import one_gpu
from harness import distributed
from models import STACK_UNITS, Branches, Mlp, Stack, inputs
from one_gpu import CLOSE, POLICIES, clean_base, on_gpu, requested_bytes
from reference import same, shard, shard_stock

pytestmark = [one_gpu.needs_gpu, pytest.mark.shows("steps")]

WIDTH = 64


def loss_of(model, ctx, step: int) -> torch.Tensor:
    return model(inputs(ctx.rank, step, rows=16, width=WIDTH).cuda()).float().square().mean()


def train(model, ctx, num: int = 4, around=None) -> list[torch.Tensor]:
    return one_gpu.train(model, lambda model, step: loss_of(model, ctx, step), num, around)


def twins(ctx, **options) -> tuple[nn.Module, nn.Module]:
    mesh = on_gpu(ctx)
    model = Stack(width=WIDTH, hidden=96)
    stock = shard_stock(copy.deepcopy(model), STACK_UNITS, mesh=mesh, **options)
    return stock, shard(ctx, model, STACK_UNITS, mesh=mesh, **options)


@distributed(world_sizes=(1, 2, 4), timeout=300)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reshard", [True, False])
def test_steps_are_stocks(ctx, policy, reshard):
    stock, ours = twins(ctx, mp_policy=POLICIES[policy], reshard_after_forward=reshard)
    same(train(ours, ctx), train(stock, ctx), "losses and gradients", **CLOSE[policy])


@distributed(world_sizes=(1, 2), timeout=300)
def test_on_a_stream_of_the_user(ctx):
    stock, ours = twins(ctx)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    got = train(ours, ctx, around=functools.partial(torch.cuda.stream, stream))
    same(got, train(stock, ctx), "losses and gradients", **CLOSE["fp32"])


@distributed(world_sizes=(1, 2), timeout=300)
@pytest.mark.parametrize("keeps_graph", [False, True])
def test_after_steps_on_another_stream(ctx, keeps_graph):
    """Autograd adds up the gradients of a weight used twice on the stream of its first use, which is late."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp(WIDTH, 96)

        def forward(self, x):
            return self.mlp(self.mlp(x))

    mesh = on_gpu(ctx)
    torch.manual_seed(0)
    model = nn.Sequential(Twice(), Twice(), Twice())
    staying = shard(ctx, copy.deepcopy(model), ("0", "1", "2"), mesh=mesh)
    moving = shard(ctx, model, ("0", "1", "2"), mesh=mesh)
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    kept = []

    def gradients(model, step: int, stream) -> list[torch.Tensor]:
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            loss = loss_of(model, ctx, step)
            if keeps_graph:  # and with it the accumulation nodes
                kept.append(loss)
            if stream is not side:
                side.wait_stream(here)
                with torch.cuda.stream(side):
                    torch.cuda._sleep(50_000_000)
            loss.backward()
            found = [param.grad.to_local().clone() for param in model.parameters()]
            model.zero_grad()
        here.wait_stream(stream)
        return found

    got = [gradients(moving, step, side if step < 2 else here) for step in range(4)]
    expected = [gradients(staying, step, here) for step in range(4)]
    torch.cuda.synchronize()
    same(got, expected, "gradients", **CLOSE["fp32"])


@distributed(world_sizes=(1,), timeout=300, fresh=True)  # memory reserved by other tests counts
@pytest.mark.shows("sleep")
def test_sleep_gives_the_memory_back(ctx):
    mesh = on_gpu(ctx)
    base = clean_base()
    model = shard(
        ctx, Stack(num=4, width=1024, hidden=1024), ("blocks.0", "blocks.1", "blocks.2", "blocks.3"), mesh=mesh
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    x = inputs(ctx.rank, width=1024).cuda()
    losses = []
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
    awake = requested_bytes() - base
    fsdp2x.sleep(model, optimizer)
    asleep = requested_bytes() - base
    assert asleep < 0.05 * awake, (asleep, awake)
    # torch's allocator keeps no more than a partly used segment from other processes.
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 32 * 2**20
    fsdp2x.wake(model, optimizer)
    assert model(x).square().mean().item() < losses[-1] < losses[0]


@distributed(world_sizes=(1,), timeout=300)
@pytest.mark.shows("no waits")
def test_the_host_does_not_wait_where_each_step_lacks_other_gradients(ctx):
    """No upload blocks it. Packing has none, and the optimizer's plans upload in stream order."""
    one_gpu.needs_kernels()
    model = shard(ctx, Branches(WIDTH), mesh=on_gpu(ctx), mp_policy=POLICIES["bf16"])
    optimizer = fsdp2x.optim.AdamW(model.parameters())
    x = inputs(ctx.rank, rows=16, width=WIDTH).cuda()

    def step(chosen: tuple[int, ...]) -> None:
        model(x, chosen).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step((0, 1, 2, 3, 4))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for chosen in ((0, 1, 2), (1, 2, 3), (0, 2, 4), (0, 1, 2), (3,)):
            step(chosen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
