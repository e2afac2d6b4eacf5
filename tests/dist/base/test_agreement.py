"""The agreement of ranks over a process group: calls that one rank makes alone, and what a steady step costs."""

import contextlib
import io
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

import fsdp2x
from fsdp2x.base import agreement as agreements
from fsdp2x.base import torch_private
from fsdp2x.base.agreement import Agreement, make_agreement
from fsdp2x.base.collectives import Diverged
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import everyone, grads, install_streams, same, shard

SOON_S = 8.0  # a tenth of a second, on a busy machine


def step(model, ctx, number=0):
    model(inputs(ctx.rank, number)).square().mean().backward()


def attempt(function) -> str:
    try:
        function()
    except Diverged as error:
        return str(error)
    return ""


@distributed(world_sizes=(2, 3))
def test_a_steady_step_asks_nobody(ctx):
    model = shard(ctx, Stack(), STACK_UNITS, transport="process_group")
    asked = []
    original = Agreement._ask
    Agreement._ask = lambda self, mine: asked.append(mine["action"]) or original(self, mine)
    try:
        for number in range(6):
            asked.clear()
            with fsdp2x.accumulate(model, last=False):
                step(model, ctx, number)
            step(model, ctx, number)
            fsdp2x.clip_grad_norm_(model.parameters(), 1.0)
            model.zero_grad()
            if number == 0:
                assert len(asked) > 10
    finally:
        Agreement._ask = original
    assert not asked, asked


@distributed(world_sizes=(2, 3))
def test_a_rank_that_clips_alone(ctx):
    model = shard(ctx, Stack(), STACK_UNITS, transport="process_group")
    for number in range(2):
        step(model, ctx, number)

    def go_on():
        if ctx.rank == 1:
            fsdp2x.clip_grad_norm_(model.parameters(), 1.0)
        step(model, ctx, 2)

    told = everyone(ctx, attempt(go_on))
    assert len(set(told)) == 1 and "rank 1 sums the norm of gradients" in told[0] and "gathers unit" in told[0], told


@distributed(world_sizes=(2, 3))
def test_caught_divergences_leave_no_keys_in_the_store(ctx):
    model = shard(ctx, Stack(), STACK_UNITS, transport="process_group")
    store, counts = torch_private.store_of(dist.group.WORLD), []
    step(model, ctx)

    def skip_a_block():
        (model.blocks[1] if ctx.rank else model)(inputs(ctx.rank))

    def raise_in_backward():
        handle = model.blocks[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
        try:
            if ctx.rank == 0:
                handle.remove()
            step(model, ctx)
        except ZeroDivisionError:
            pass
        finally:
            handle.remove()

    def clip_alone():
        fsdp2x.clip_grad_norm_(model.parameters(), 1.0) if ctx.rank else step(model, ctx)

    for number in range(3):
        for diverge in (skip_a_block, raise_in_backward, clip_alone):
            for _ in range(2):  # the second one comes before any collective succeeds
                attempt(diverge)
            model.zero_grad()
            step(model, ctx, number)
            step(model, ctx, number)
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    assert len(set(counts[1:])) == 1, counts


@distributed(world_sizes=(3,))
def test_a_rank_that_sees_the_return_of_all_ranks_late(ctx):
    """They have diverged again when it looks. It must have begun again, too, or it counts other collectives."""
    model = shard(ctx, Stack(), STACK_UNITS, transport="process_group")
    slow = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(1.0))

    def clip_alone():
        fsdp2x.clip_grad_norm_(model.parameters(), 1.0) if ctx.rank == 2 else step(model, ctx)

    step(model, ctx)
    told = [attempt(clip_alone)]
    dist.barrier()
    with mock.patch.object(agreements, "time", slow) if ctx.rank == 0 else contextlib.nullcontext():
        if ctx.rank == 1:  # the last one to come back, so it does not wait for rank 0
            time.sleep(0.3)
        told.append(attempt(clip_alone))
    began = time.monotonic()
    step(model, ctx)
    assert all("sums the norm" in error for error in told) and time.monotonic() - began < SOON_S, told


@distributed(world_sizes=(2,))
def test_models_that_meet_in_another_order(ctx):
    """Their shapes are equal, so only their numbers tell them apart."""
    models = [shard(ctx, Stack(), STACK_UNITS, transport="process_group") for _ in range(2)]
    with pytest.raises(ValueError, match="have different models.*Stack"):
        models[ctx.rank](inputs(ctx.rank))
    fresh = [shard(ctx, Stack(), STACK_UNITS, transport="process_group") for _ in range(2)]
    for model in fresh:
        step(model, ctx)
    told = everyone(ctx, attempt(lambda: fresh[ctx.rank](inputs(ctx.rank))))
    assert len(set(told)) == 1 and "Stack 2" in told[0] or "Stack 3" in told[0], told


@distributed(world_sizes=(2,))
def test_checks_can_be_turned_off(ctx):
    """On one rank is enough."""
    twin = shard(ctx, Stack(), STACK_UNITS, transport="process_group")
    model = shard(ctx, Stack(), STACK_UNITS, transport="process_group", check_ranks=ctx.rank == 0)
    original = Agreement._ask
    step(twin, ctx)
    asked = []
    Agreement._ask = lambda self, mine: asked.append("unit" in mine["action"]) or original(self, mine)
    try:
        step(model, ctx)
    finally:
        Agreement._ask = original
    assert not any(asked), "of units"
    same(grads(model), grads(twin), "gradients")


@distributed(world_sizes=(2,), fresh=True)
def test_a_device_compares_before_it_launches(ctx):
    """On the recorded device: both sides raise, nothing was launched, and the group cannot be used again."""
    install_streams()
    model = shard(ctx, Stack(), STACK_UNITS, transport="streams")
    step(model, ctx)
    blocks = list(model.blocks)
    model.reshard()
    first, second = (blocks[0], blocks[2]) if ctx.rank == 0 else (blocks[2], blocks[0])
    told = everyone(ctx, attempt(first.unshard))
    assert len(set(told)) == 1 and "'blocks.0'" in told[0] and "'blocks.2'" in told[0], told
    told = everyone(ctx, attempt(second.unshard))
    assert all("cannot be used again" in text for text in told), told


@distributed(world_sizes=(2,), fresh=True)
def test_a_host_that_does_not_wait_is_told(ctx):
    """A rank that has posted what it expected works on. A thread answers for it, and its next collective raises."""
    agreement = make_agreement(dist.group.WORLD, "a test")
    agreement.watch()

    def post(*names):
        agreement.engine.agree(*names)
        agreement.engine.count()

    for _ in range(3):
        for kind in ("first", "second"):
            post(kind, f"does its {kind}")
    if ctx.rank == 0:
        post("first", "does its first")  # expected, so this rank asks no other rank
        end = time.monotonic() + SOON_S
        while not agreement.engine.is_broken and time.monotonic() < end:
            time.sleep(0.01)
        assert agreement.engine.is_broken
        told = attempt(lambda: post("second", "does its second"))
    else:
        told = attempt(lambda: post("third", "does its third"))
    told = everyone(ctx, told)
    assert len(set(told)) == 1, told
    assert "rank 0 does its first" in told[0] and "rank 1 does its third" in told[0], told


@distributed(world_sizes=(2,), fresh=True)
@pytest.mark.parametrize("is_blocked", [True, False])
def test_a_blocked_host_names_the_failed_peer(ctx, is_blocked):
    """A thread prints who has failed. It aborts the groups only if the host stays blocked and cannot raise."""
    agreement = agreements.make_agreement(dist.group.WORLD, "a test")
    agreement.watch()

    def post(kind):
        agreement.engine.agree(kind, f"does its {kind}")
        agreement.engine.count()

    for kind in ("first", "second", "first", "second"):
        post(kind)
    printed, aborted, told = io.StringIO(), threading.Event(), ""
    with (
        contextlib.redirect_stderr(printed),
        mock.patch.object(agreements, "_ABORT_S", 1.0),
        mock.patch.object(torch_private, "abort", lambda group: aborted.set()),
    ):
        if ctx.rank == 1:
            with pytest.raises(ZeroDivisionError), agreements.reported("evaluation"):
                raise ZeroDivisionError
        else:
            post("first")  # as rank 1 did twice, so this rank asks no other rank
            end = time.monotonic() + SOON_S
            while not printed.getvalue() and time.monotonic() < end:
                time.sleep(0.01)
            if is_blocked:
                assert aborted.wait(SOON_S)
            told = attempt(lambda: post("second"))
        dist.barrier()
        time.sleep(2.0)
    failure = "rank 1 left the evaluation, which raised ZeroDivisionError"
    assert (failure in told) == (failure in printed.getvalue()) == (ctx.rank == 0)
    assert aborted.is_set() == ("Aborting" in printed.getvalue()) == (is_blocked and ctx.rank == 0)
