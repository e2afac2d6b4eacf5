"""One rank raises in the middle of a step and lives on.

The ranks that wait for it raise soon, and their errors name the rank and the reason. If all ranks raise, or the rank
comes back, the others raise nothing.
"""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import TRANSPORTS, everyone, grads, same, shard

TIMEOUT_S = 25.0  # Limits each wait. The harness' group has a longer timeout.
SOON_S = 8.0  # It takes half a second, but more on a busy machine.
SLOW_S = 0.8  # A rank waits for less before it checks for ranks that have left.


class Raising(Stack):
    """Raises at one place."""

    place = ""

    def refuse(self, *_):
        if self.place == "memory":
            return torch.empty(1 << 60)
        raise KeyError("on purpose")

    def forward(self, x):
        if self.place == "first":
            self.refuse()
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1 and self.place in ("forward", "memory"):
                self.refuse()
            if i == 1 and self.place == "backward" and x.requires_grad:
                x.register_hook(self.refuse)
        x = self.head(self.norm(x))
        if self.place == "last":
            self.refuse()
        return x


def step(model, ctx, number=0):
    loss = model(inputs(ctx.rank, number)).square().mean()
    loss.backward()
    return loss.detach()


def attempt(function):
    """(what it raised, seconds)"""
    told, started = "", time.monotonic()
    try:
        function()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    return told, time.monotonic() - started


def sharded(ctx, transport="shm", **options):
    options = {"transport": transport, "timeout": timedelta(seconds=TIMEOUT_S)} | options
    return shard(ctx, Raising(), STACK_UNITS, **options)


def own_grads(model):
    """This rank's rows of the gradients by name, as they are now."""
    return {
        name: None if param.grad is None else param.grad.to_local().clone() for name, param in model.named_parameters()
    }


REASONS = {"memory": "allocate", "backward": "left its backward"}


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("place", ["first", "forward", "memory", "last", "backward"])
def test_a_rank_that_raises_alone_is_named(ctx, place, keeps, transport):
    model = sharded(ctx, transport, reshard_after_forward=not keeps)
    step(model, ctx)
    model.zero_grad()
    victim = ctx.world - 1
    model.place = place if ctx.rank == victim else ""
    found = everyone(ctx, attempt(lambda: step(model, ctx, 1)))
    reason = REASONS.get(place, "KeyError: 'on purpose'")
    for rank, (told, seconds) in enumerate(found):
        assert seconds < SOON_S, found
        if rank == victim:
            assert "on purpose" in told or "allocate" in told, found
        else:
            assert f"rank {victim}" in told and reason in told, found


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_replicas_are_told(ctx, place, transport):
    """Those that share no rows with the rank that raised wait for it in the sum over the replicas, and follow it. Ranks
    are called by their numbers in the whole job."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(ctx, transport, mesh=mesh)
    step(model, ctx)
    model.zero_grad()
    model.place = place if ctx.rank == 3 else ""
    found = everyone(ctx, attempt(lambda: step(model, ctx, 1)))
    assert all(told and seconds < SOON_S for told, seconds in found), found
    beside, across = found[2][0], found[1][0]
    if transport == "process_group":
        assert "rank 3 left" in beside and "rank 3 left" in across, found
        return
    assert "rank 3 (pid" in beside and "rank 2 waited for it" in beside, beside
    assert "rank 3 (pid" in across and "rank 1 waited for it" in across, across


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("place", ["first", "forward", "last", "backward"])
def test_all_raise_and_one_is_slow_to_go_on(ctx, place, grad, keeps, transport):
    """The others wait for it in the next step, whose numbers are right.

    Without zero_grad, that step adds to what the failed one has reduced, which is complete, and to nothing else.
    """
    if place == "backward" and not grad:
        pytest.skip("there is no backward without gradients")
    model, twin = (sharded(ctx, transport, reshard_after_forward=not keeps) for _ in range(2))
    for each in (model, twin):
        each.zero_grad()
        step(each, ctx)
        each.zero_grad()
    step(twin, ctx, 1)
    complete = own_grads(twin)
    twin.zero_grad()
    model.place = place
    with pytest.raises(KeyError, match="on purpose"), torch.set_grad_enabled(grad):
        step(model, ctx, 1)
    model.place = ""
    reduced = own_grads(model)
    assert place == "backward" or not any(grad is not None for grad in reduced.values()), reduced
    same(reduced, {name: None if reduced[name] is None else grad for name, grad in complete.items()}, "failed step")
    if ctx.rank == 0:
        time.sleep(SLOW_S)
    same(step(model, ctx, 2), step(twin, ctx, 2), "loss")
    expected = {name: grad if reduced[name] is None else reduced[name] + grad for name, grad in own_grads(twin).items()}
    same(own_grads(model), expected, "gradients")
    for each in (model, twin):
        each.zero_grad()
        step(each, ctx, 3)
    same(grads(model), grads(twin), "gradients after zero_grad")


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seconds", [SLOW_S, 5.0])
def test_one_rank_leaves_a_forward_that_asks_for_nothing_more(ctx, seconds, transport):
    """Its peers have ended that forward and wait in a later one: for a while, and not until the timeout."""
    if transport == "shm" and seconds < 1:
        pytest.skip("it waits half a second")
    model = sharded(ctx, transport)
    with torch.no_grad():
        model(inputs(ctx.rank))
        if ctx.rank == 0:
            model.place = "last"
            with pytest.raises(KeyError, match="on purpose"):
                model(inputs(ctx.rank, 1))
            model.place = ""
            time.sleep(seconds)
        else:
            model(inputs(ctx.rank, 1))
    found = everyone(ctx, attempt(lambda: step(model, ctx, 2)) if ctx.rank or seconds < 1 else ("", 0.0))
    for told, waited in found[1:]:
        assert waited < SOON_S, found
        assert ("rank 0" in told and "KeyError: 'on purpose'" in told) == (seconds > 1), found


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_leave_a_forward_and_come_to_a_backward(ctx, transport):
    """A forward is stopped on purpose, and its activations have a loss. The ranks wait for a slower one."""
    model = sharded(ctx, transport)
    step(model, ctx)
    model.zero_grad()
    seen = []
    handle = model.blocks[1].register_forward_hook(lambda module, args, output: seen.append(output))
    model.place = "last"
    with pytest.raises(KeyError, match="on purpose"):
        model(inputs(ctx.rank))
    handle.remove()
    if ctx.rank == 0:
        time.sleep(SLOW_S)
    seen[0].square().mean().backward()
    model.place = ""
    model.zero_grad()
    step(model, ctx, 1)
