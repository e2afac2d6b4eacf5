"""User streams and captures of a step around the device transport, played on the CPU.

Each test plants a fault into the record or into the engine, which the search for races must find.
"""

import contextlib
import copy

import pytest
import torch

import streams
from harness import distributed
from models import STACK_UNITS, inputs
from reference import grads, mean_of_ranks, only_fsdp2x, same, shard
from streams import WIDTH, Experts, step, wide


def without(entries: list[tuple], operation: str, lane: str, subject: str = "") -> list[tuple]:
    kept = [e for e in entries if not (e[0] == operation and e[1] == lane and subject in e[2])]
    assert len(kept) < len(entries), (operation, lane, subject)
    return kept


def step_on(recorder, model, ctx, number: int, stream: int) -> None:
    """Runs a step on a user stream, ordered as users must: after the first stream and before its next work."""
    recorder.use_stream(stream)
    recorder.wait_stream(0)
    step(model, ctx, number)
    recorder.use_stream(0)
    recorder.wait_stream(stream)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("with_kernels", [True, False])
def test_steps_on_streams_of_the_user(ctx, with_kernels):
    """Lanes follow the stream that is current when a forward begins, whichever was in the step before."""
    only_fsdp2x(ctx)
    recorder = streams.install(pack_below_bytes=1200, with_kernels=with_kernels)
    reference = wide()
    model = shard(ctx, copy.deepcopy(reference), STACK_UNITS, transport="streams")
    for number, stream in enumerate((0, 1, 2, 1, 0)):
        mean_of_ranks(reference, lambda m, rank, n=number: m(inputs(rank, n, width=WIDTH)).square().mean(), ctx.world)
        step_on(recorder, model, ctx, number, stream)
        same(grads(model), grads(reference), "gradients", rtol=1e-4, atol=1e-6)
        model.zero_grad()
    entries = recorder.entries
    assert {"compute", "compute1", "compute2"} <= {entry[1] for entry in entries}
    assert streams.races(entries) == []
    # Two faults: a user forgets to order the streams, or the engine's lanes follow only the first stream.
    assert streams.races(without(entries, "wait", "compute1", "user"))
    mistaken = ("record", "compute1", "compute")
    assert streams.races([(e[0], "compute", *e[2:]) if e[:3] == mistaken else e for e in entries])


@distributed(world_sizes=(2,))
def test_memory_that_is_given_back_away_from_its_stream(ctx):
    """A slot that stays gathered between two streams goes back in the order of the one that took it."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    model = shard(ctx, wide(), STACK_UNITS, transport="streams", reshard_after_forward=False)
    step(model, ctx)
    recorder.clear()
    loss = model(inputs(ctx.rank, 1, width=WIDTH)).square().mean()
    recorder.use_stream(1)
    recorder.wait_stream(0)
    loss.backward()  # gives back what forward has taken on the first stream
    recorder.use_stream(0)
    recorder.wait_stream(1)
    entries = recorder.entries
    assert streams.races(entries) == []
    slots = {address for e in entries if e[0] == "all_gather" for address, _ in e[4]}
    first = next(i for i, e in enumerate(entries) if e[1] == "compute1")
    taken = {e[4][0] for e in entries[:first] if e[:2] == ("take", "compute") and e[4][0][0] in slots}
    given = [e[1] for e in entries[first:] if e[0] == "give_back" and e[4][0] in taken]
    assert given and given[0] == "compute"
    # An engine that gives it back without a wait of the stream that is not current.
    broken = [e for i, e in enumerate(entries) if i < first or not (e[:2] == ("wait", "compute") and "slot" in e[2])]
    assert len(broken) < len(entries) and streams.races(broken)


@distributed(world_sizes=(2,))
def test_plans_that_another_stream_runs(ctx):
    """A plan made on one stream and run on another is freed after the work of both."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    model = shard(ctx, wide(), STACK_UNITS, transport="streams")
    step(model, ctx)
    model.zero_grad()
    recorder.use_stream(1)
    recorder.wait_stream(0)
    step(model, ctx, 1)
    recorder.use_stream(0)  # without a wait, so this stream frees memory that the other one still reads
    plans = [e for e in recorder.entries if e[0] in ("hold", "read plan") or e[:2] == ("take", "host")]
    freed = [("give_back", "compute", "plan", [], e[3]) for e in plans if e[:2] == ("hold", "compute1")]
    assert freed and {"take", "read plan"} <= {e[0] for e in plans}
    assert streams.races([*plans, *freed]) == []
    assert streams.races([*without(plans, "hold", "compute1"), *freed])


def capture(recorder, model, ctx) -> list[tuple]:
    for number in range(2):
        step(model, ctx, number)
    recorder.clear()
    recorder.begin_capture()
    step(model, ctx, 2)
    recorder.end_capture()
    step(model, ctx, 3)
    return recorder.entries


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("reshard", [True, False])
def test_a_step_that_is_captured(ctx, reshard):
    """Every lane is in the graph, joined at its end, and waits for nothing beyond its borders."""
    only_fsdp2x(ctx)
    recorder = streams.install(pack_below_bytes=1200)
    model = shard(ctx, wide(), STACK_UNITS, transport="streams", reshard_after_forward=reshard)
    entries = capture(recorder, model, ctx)
    assert streams.races(entries) == []
    begin = next(i for i, e in enumerate(entries) if e[0] == "begin_capture")
    end = next(i for i, e in enumerate(entries) if e[0] == "end_capture")
    assert [e for e in entries[begin:end] if e[0] == "skip"], "events of the steps before mean nothing"
    # An engine whose lanes do not follow the captured stream, and one that does not wait for them at the end.
    inside = entries[begin : end + 1]
    assert any("not in it" in race for race in streams.races(without(inside, "wait", "copy_in")))
    assert any("not joined" in race for race in streams.races(without(inside, "wait", "compute", "reduce")))
    # A host that waits for an event of the graph would wait for ever.
    waits = [*inside[:-1], ("wait", "host", "reduce", [], []), inside[-1]]
    assert any("host waits" in race for race in streams.races(waits))


@distributed(world_sizes=(2,))
def test_a_capture_without_all_gradients_is_refused(ctx):
    """The host cannot read flags of a graph; where zeros are reduced it need not."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    model = shard(ctx, Experts(), transport="streams")
    for zeros in (False, True):
        model.set_reduce_scatter_unused_params(zeros)
        loss = model(inputs(ctx.rank, width=WIDTH), 0).square().mean()
        recorder.begin_capture()
        with contextlib.nullcontext() if zeros else pytest.raises(RuntimeError, match="captured into a CUDA graph"):
            loss.backward()
        recorder.end_capture()
        model.reset_iter_state()


HOOKS = {
    "gathers": lambda blocks: blocks[0].unshard(),
    "gathers again": lambda blocks: blocks[2].unshard(),
    "computes": lambda blocks: blocks[0](torch.ones(2, WIDTH)),
}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("what", HOOKS)
def test_calls_from_a_hook_of_a_gradient(ctx, what):
    """The hook runs on the lane of the reduction: what it gathers is used there, and on the compute lane after it."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    model = shard(ctx, wide(), STACK_UNITS, transport="streams")
    calls = []

    @torch.no_grad()
    def hook(param: torch.Tensor) -> None:
        calls.append(HOOKS[what](model.blocks))

    model.blocks[2].up.weight.register_post_accumulate_grad_hook(hook)
    for number in range(3):
        step(model, ctx, number)
    assert len(calls) == 3 and streams.races(recorder.entries) == []
