"""One GPU: CUDA graphs of forwards, of complete steps, and of modules between units.

A failed capture makes the process unusable, so each test has fresh processes. FSDP2's captures are no reference. The
CPU recorder decides what counts as a capture (tests/dist/engine/test_streams.py), and this test confirms it.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import one_gpu
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from one_gpu import CLOSE, on_gpu
from reference import same, shard

pytestmark = [one_gpu.needs_gpu, pytest.mark.shows("graphs")]

WIDTH = 64


def batch(step: int) -> torch.Tensor:
    return inputs(0, step, rows=16, width=WIDTH).cuda()


def warm_up(run: Callable[[], object]) -> None:
    """Runs on a side stream, as torch requires before a capture, so that the capture makes nothing new."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def captured_forwards(model: nn.Module) -> list[torch.Tensor]:
    """Returns outputs for new inputs of a forward that was captured once. Weights stay gathered."""
    x = batch(0)
    with torch.no_grad():
        warm_up(lambda: model(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = model(x)
        results = []
        for step in range(1, 4):
            x.copy_(batch(step))
            graph.replay()
            results.append(output.clone())
    torch.cuda.synchronize()
    return results


def captured_steps(model: nn.Module) -> list[torch.Tensor]:
    """Returns losses and weights of captured steps. The optimizer runs between replays."""
    x = batch(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        return loss

    warm_up(step)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = model(x).square().mean()
        loss.backward()
    results = []
    for number in range(1, 4):
        x.copy_(batch(number))
        graph.replay()
        optimizer.step()
        results.append(loss.detach().clone())
    torch.cuda.synchronize()
    return results + [param.to_local().clone() for param in model.parameters()]


def eager_forwards(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(batch(step)) for step in range(1, 4)]


def eager_steps(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    results = []
    for step in range(1, 4):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        results.append(loss.detach())
    return results + [param.to_local().clone() for param in model.parameters()]


CASES = {
    # Gathered from before the capture until after the last replay, as for generation.
    "forwards": (captured_forwards, eager_forwards, {"reshard_after_forward": False}),
    # Gathers and reductions are in the graph, and the shards change between replays.
    "steps": (captured_steps, eager_steps, {}),
}


@distributed(world_sizes=(1,), timeout=200, fresh=True)
@pytest.mark.parametrize("case", CASES)
def test_captured_and_replayed(ctx, case):
    mesh = on_gpu(ctx)
    captured, eager, options = CASES[case]
    model = Stack(width=WIDTH, hidden=96)
    expected = eager(shard(ctx, copy.deepcopy(model), STACK_UNITS, mesh=mesh, **options))
    ours = shard(ctx, model, STACK_UNITS, mesh=mesh, **options)
    same(captured(ours), expected, "fsdp2x", **CLOSE["fp32"])


class Graphed(nn.Module):
    """A part of a model without parameters, captured by torch.cuda.make_graphed_callables, between sharded units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between: Callable[[torch.Tensor], torch.Tensor] = Between()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.between(self.before(x)))


class Between(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.transpose(0, 1), dim=-1) @ x


@distributed(world_sizes=(1,), timeout=200, fresh=True)
def test_graphs_of_what_lies_between_units(ctx):
    mesh = on_gpu(ctx)
    model = Graphed()
    expected = eager_steps(shard(ctx, copy.deepcopy(model), ("before", "after"), mesh=mesh))
    ours = shard(ctx, model, ("before", "after"), mesh=mesh)
    sample = torch.randn(16, WIDTH, device="cuda", requires_grad=True)
    ours.between = torch.cuda.make_graphed_callables(Between().cuda(), (sample,))
    same(eager_steps(ours), expected, "losses and weights", **CLOSE["fp32"])
