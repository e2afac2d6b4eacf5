"""One GPU: results do not depend on timing or on the allocator's addresses."""

import contextlib
import copy
import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import one_gpu
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from one_gpu import CLOSE, POLICIES, on_gpu
from reference import same, shard

pytestmark = [one_gpu.needs_gpu, pytest.mark.shows("timing")]

WIDTH = 256


@contextlib.contextmanager
def unrelated_memory(model: nn.Module, seed: int) -> Iterator[list[int]]:
    """Allocates and frees memory full of NaN before and after each module, on random streams.

    Yields a list of one number: how many blocks there were.
    """
    chosen = random.Random(seed)
    streams = [torch.cuda.Stream() for _ in range(3)]
    held: list[torch.Tensor] = []
    count = [0]

    def churn(*_) -> None:
        size = chosen.choice((1, 100, 5_000, 70_000, 300_000))
        # Dropped immediately: the allocator gives it to the next request on this stream.
        torch.full((size,), float("nan"), device="cuda")
        with torch.cuda.stream(chosen.choice(streams)):
            held.append(torch.full((chosen.randrange(1, 300_000),), float("nan"), device="cuda"))
        if len(held) > 6:
            held.pop(chosen.randrange(len(held)))
        if chosen.random() < 0.03:
            held.clear()
            torch.cuda.empty_cache()
        count[0] += 1

    def behind(module, args, output: torch.Tensor) -> None:
        churn()
        output.register_hook(churn)

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(churn))
        handles.append(module.register_forward_hook(behind))
    try:
        yield count
    finally:
        for handle in handles:
            handle.remove()


@distributed(world_sizes=(1, 2), timeout=300)
@pytest.mark.parametrize("policy", POLICIES)
def test_unrelated_allocations_change_nothing(ctx, policy):
    """A slot, buffer, or gradient that the allocator reused too early would hold NaN."""
    mesh = on_gpu(ctx)

    def run(model: nn.Module) -> list[torch.Tensor]:
        def loss_of(model, step):
            return model(inputs(ctx.rank, step, rows=64, width=WIDTH).cuda()).float().square().mean()

        return one_gpu.train(model, loss_of, num=8)

    plain = Stack(num=3, width=WIDTH, hidden=2 * WIDTH)
    stressed = copy.deepcopy(plain)
    expected = run(shard(ctx, plain, STACK_UNITS, mesh=mesh, mp_policy=POLICIES[policy]))
    ours = shard(ctx, stressed, STACK_UNITS, mesh=mesh, mp_policy=POLICIES[policy])
    with unrelated_memory(ours, seed=ctx.rank) as count:
        got = run(ours)
    assert count[0] > 200
    same(got, expected, "losses and gradients", **CLOSE[policy])


@distributed(world_sizes=(1,), timeout=300)
def test_a_slow_device_changes_nothing(ctx):
    """The host runs steps ahead of the device, so its work may only rely on events."""
    mesh = on_gpu(ctx)
    steps = [inputs(ctx.rank, step, rows=64, width=WIDTH).cuda() for step in range(6)]

    def run(model: nn.Module, cycles: int) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses = []
        for x in steps:
            if cycles:
                torch.cuda._sleep(cycles)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.cuda.synchronize()
        return [*losses, *[param.to_local().clone() for param in model.parameters()]]

    model = Stack(num=3, width=WIDTH, hidden=2 * WIDTH)
    twin = copy.deepcopy(model)
    expected = run(shard(ctx, twin, STACK_UNITS, mesh=mesh), cycles=0)
    same(run(shard(ctx, model, STACK_UNITS, mesh=mesh), cycles=100_000_000), expected, "losses and weights")
