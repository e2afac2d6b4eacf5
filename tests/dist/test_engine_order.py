"""Ranks that do not do the same: the shared-memory transport says who did what instead of hanging."""

import copy
import time
from datetime import timedelta

import torch
from torch import nn

from harness import dist_run, distributed
from models import STACK_UNITS, Branches, Stack, inputs
from reference import grads, mean_of_ranks, only_fsdp2x, same, shard


class Ordered(nn.Module):
    def __init__(self, order):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.order = order

    def forward(self, x):
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def run_in_another_order(ctx, timeout_s):
    model = Ordered(("first", "second") if ctx.rank == 0 else ("second", "first"))
    model = shard(ctx, model, ("first", "second"), transport="shm", timeout=timedelta(seconds=timeout_s))
    started = time.monotonic()
    try:
        model(inputs(ctx.rank)).sum().backward()
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def test_units_in_different_order():
    for outcome in dist_run(run_in_another_order, 2, 20.0):
        message, seconds = outcome.value
        assert "first" in message and "second" in message, message
        assert "rank 0" in message and "rank 1" in message, message
        assert seconds < 10, "the mismatch is seen when it happens, not when the timeout runs out"


models = []


def stay_away(ctx, timeout_s):
    model = shard(ctx, Stack(), STACK_UNITS, transport="shm", timeout=timedelta(seconds=timeout_s))
    model(inputs(ctx.rank))
    started = time.monotonic()
    if ctx.rank == 1:
        models.append(model)  # it has not left
        return "stays away", 0.0
    try:
        model.reshard()
        model(inputs(ctx.rank)).sum().backward()
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def test_a_rank_that_does_not_come_ends_in_a_timeout():
    message, seconds = dist_run(stay_away, 2, 1.5)[0].value
    assert "rank 1" in message, message
    assert any(name in message for name in ("blocks.0", "<root>", "head", "Stack", "norm")), message
    assert 1.0 < seconds < 15.0


@distributed(world_sizes=(2, 3))
def test_gradients_of_different_parameters_on_each_rank(ctx):
    """A rank without a gradient counts as zero; where no rank has one `.grad` stays None. Upstream hangs here."""
    only_fsdp2x(ctx)
    reference = Branches()
    ours = shard(ctx, copy.deepcopy(reference), transport="shm")
    for chosen in ((0, 1, 0), (1, 1, 1)):
        mean_of_ranks(reference, lambda m, rank, of=chosen: m(inputs(rank), (of[rank], 3)).square().mean(), ctx.world)
        ours.zero_grad()
        ours(inputs(ctx.rank), (chosen[ctx.rank], 3)).square().mean().backward()
        same(grads(ours), grads(reference), "gradients", rtol=1e-5, atol=1e-6)
        assert ours.layers[2].weight.grad is None


@distributed(world_sizes=(2,))
def test_backward_on_one_output_more_on_one_rank(ctx):
    """Two heads; a rank uses both, the other one only the first: the reductions are keyed by unit, not by order."""
    only_fsdp2x(ctx)

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.a, self.b = Stack(), nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            x = self.body(x)
            return self.a(x), self.b(x)

    def loss_of(model, rank):
        a, b = model(inputs(rank))
        return a.square().mean() + (b.square().mean() if rank == 0 else 0.0)

    reference = Heads()
    # Resharded units would be gathered again in backward, and gathers are the same on every rank.
    ours = shard(ctx, Heads(), ("body", "a", "b"), transport="shm", reshard_after_forward=False)
    mean_of_ranks(reference, loss_of, ctx.world)
    loss_of(ours, ctx.rank).backward()
    same(grads(ours), grads(reference), "gradients", rtol=1e-5, atol=1e-6)
