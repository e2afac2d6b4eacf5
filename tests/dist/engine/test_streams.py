"""The device transport played on the CPU: its numbers, its record of lanes and events, and the races that it avoids.

The recorder of support/streams.py stands for the device. A test that plants a fault into a record shows that the search
for races would find it. The parts stay in one file because they share the model, the policies, and the kinds of waits.
"""

import contextlib
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2x
import streams
from fsdp2x.sharding import transport
from harness import distributed
from models import STACK_UNITS, inputs
from reference import (
    grads,
    mean_of_ranks,
    same,
    shard,
    train_alike,
)
from streams import WIDTH, Experts, races, record_of_steps, results_of_steps, same_bits, step, wide
from user_collectives import UserGather, UserScatter

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
CLOSE = {"fp32": {"rtol": 1e-4, "atol": 1e-6}, "bf16": {"rtol": 0.2, "atol": 2e-2}}
COLLECTIVE = next(name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name))


def loss_of(model, rank: int, number: int) -> torch.Tensor:
    return model(inputs(rank, number, width=WIDTH)).float().square().mean()


def sharded(ctx, num: int = 3, **options):
    return shard(ctx, wide(num), [f"blocks.{i}" for i in range(num)], transport="streams", **options)


def trained(ctx, set_up=lambda model: None, *, close="fp32", pack_below=0, with_kernels=True, recorder=None, **options):
    """Trains a model on the device transport as one rank would. Returns it with the record, which has no races."""
    recorder = recorder or streams.install(pack_below, with_kernels=with_kernels)
    reference, model = wide(), sharded(ctx, **options)
    set_up(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (reference, model)]
    train_alike(ctx, reference, model, loss_of, optimizers, **CLOSE[close])
    assert races(recorder.entries) == []
    return model, recorder.entries


def without(entries: list[tuple], operation: str, lane: str, subject: str = "") -> list[tuple]:
    """The record of an engine, or of a user, that forgets an operation of a lane."""
    kept = [e for e in entries if not (e[0] == operation and e[1] == lane and subject in e[2])]
    assert len(kept) < len(entries), (operation, lane, subject)
    return kept


# ---- numbers, in every way to gather


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("pack_below", [0, 600, 1 << 20])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.each_pair
def test_trains_as_one_rank_would(ctx, pack_below, policy, with_kernels):
    """Direct, mixed and packed gathers, uneven rows, in two dtypes; with the twins of the kernels and without."""
    options = {"close": policy, "mp_policy": POLICIES[policy]}
    _, entries = trained(ctx, pack_below=pack_below, with_kernels=with_kernels, **options)
    gathers = [entry for entry in entries if entry[0] == "all_gather"]
    assert (max(len(writes) for *_, writes in gathers) > 1) == (pack_below < 1 << 20)
    for *_, reads, writes in gathers:
        for (out, out_bytes), (source, source_bytes) in zip(writes, reads, strict=True):
            assert out_bytes == ctx.world * source_bytes and source == out + ctx.rank * source_bytes
            assert out % 16 == source % 16 == 0


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("how", ["average", "sum", "divided by 8", "divided by the ranks"])
def test_choice_of_the_reduction(ctx, how, dtype):
    """Sums and means only: NCCL's premultiplied sums of bf16 are zero in some versions of torch."""
    recorder = streams.install()
    operations, scatter = [], getattr(dist, COLLECTIVE)

    def noted(output, source, *, op, **options):
        operations.append(op)
        return scatter(output, source, op=op, **options)

    reduce_dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    reference, model = wide(), sharded(ctx, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    for module in (model, *model.blocks):
        if how == "sum":
            module.set_force_sum_reduction_for_comms(True)
        if how.startswith("divided"):
            module.set_gradient_divide_factor(8.0 if how == "divided by 8" else float(ctx.world))
    # As a backend that can: what is asked for is asked of the process group, whichever that is.
    with mock.patch.object(dist, COLLECTIVE, noted), mock.patch.object(dist, "get_backend_config", lambda _: "nccl"):
        step(model, ctx)
    mean_of_ranks(reference, lambda m, rank: loss_of(m, rank, 0), ctx.world)
    scale = ctx.world / 8.0 if how == "divided by 8" else 1.0
    expected = {name: grad * scale for name, grad in grads(reference).items()}
    same(grads(model), expected, "gradients", **(CLOSE["fp32"] if dtype == "fp32" else {"rtol": 2e-2, "atol": 1e-3}))
    averages = how in ("average", "divided by the ranks") and dtype != "fp16"
    assert operations == [dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM] * 4
    assert races(recorder.entries) == []


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_kernels", [True, False])
def test_nothing_that_nobody_wrote_travels(ctx, reduce_dtype, with_kernels):
    """New memory is full of NaN here, so rows, their padding, flags, and the padding after them must be written."""
    streams.install(with_kernels=with_kernels)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False), torch.nn.Linear(3, 5))
    model[1].weight.requires_grad_(False)
    model.unused = torch.nn.Parameter(torch.ones(9))
    shard(ctx, model, transport="streams", mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    sent, scatter = [], getattr(dist, COLLECTIVE)

    def checked(output, source, **options):
        sent.append((source.numel(), torch.isfinite(source).all().item()))
        return scatter(output, source, **options)

    with mock.patch.object(dist, COLLECTIVE, checked):
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            model(torch.ones(2, 5)).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert sent and all(is_written for _, is_written in sent), sent


# ---- order: every access of a step is ordered by events, and early enough

KINDS = {
    # (lane, event): what a device would get wrong without that wait.
    ("copy_in", "compute"): "a slot is written while others use its memory, a shard is read before it is written",
    ("gather", "slot"): "a gather sends rows that are not copied in yet",
    ("compute", "slot"): "a unit computes before it is gathered",
    ("reduce", "compute"): "a reduction sends gradients that are not packed yet",
    ("compute", "reduce buffer"): "the memory of gradients that are still sent is taken for others",
}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("reshard", [True, False])
def test_events_order_every_access(ctx, reshard):
    recorder = streams.install(pack_below_bytes=1200)
    model = sharded(ctx, 5, reshard_after_forward=reshard)
    entries = record_of_steps(ctx, recorder, model, num=3)
    assert races(entries) == []
    if reshard:
        # Every wait is needed: the check finds a race in the record of an engine that forgets one kind of it.
        streams.every_wait_is_needed(entries, KINDS)
        broken = [e for e in entries if not (e[0] == "wait" and e[1] == "compute" and e[2] == "reduce")]
        assert races(broken), "not found: the optimizer reads gradients that are not reduced"


DELAYED = {
    "fp32": {},
    "bf16": {"mp_policy": POLICIES["bf16"]},
    "kept after forward": {"reshard_after_forward": False},
}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize(
    "case", [name if name == "fp32" else pytest.param(name, marks=pytest.mark.full) for name in DELAYED]
)
def test_results_do_not_depend_on_delays(ctx, case):
    """All lanes but compute run late, at random, as far as events allow; without a kind of wait, results are others."""
    recorder = streams.install(pack_below_bytes=1200)
    expected = results_of_steps(ctx, sharded(ctx, 4, **DELAYED[case]))

    def equals_with(*delays) -> bool:
        recorder.delay(*delays)
        return same_bits(results_of_steps(ctx, sharded(ctx, 4, **DELAYED[case])), expected)

    assert all(equals_with(seed) for seed in range(5))
    for lane, event in (("gather", "slot"), ("compute", "slot"), ("compute", "reduce")):
        assert not all(equals_with(seed, lane, event) for seed in range(4)), (lane, event)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("is_explicit", [False, True])
def test_prefetch_order(ctx, is_explicit):
    """A unit's gather is on its way before the unit in front of it is used, or as early as the user's list says."""
    recorder = streams.install()
    model = sharded(ctx)
    if is_explicit:
        model.set_modules_to_forward_prefetch(list(model.blocks))
        for block in model.blocks:
            block.set_modules_to_forward_prefetch([])
    entries = record_of_steps(ctx, recorder, model, num=1)
    order = [(e[0], e[2]) for e in entries if e[0] in ("all_gather", "use") and e[2].startswith("blocks")]
    gathered = [subject for operation, subject in order if operation == "all_gather"]
    assert gathered == ["blocks.0", "blocks.1", "blocks.2", "blocks.2", "blocks.1", "blocks.0"]
    uses = [i for i, (operation, _) in enumerate(order) if operation == "use"]
    # A unit has a mark where its use begins, and one where it ends.
    in_forward = [sum(operation == "all_gather" for operation, _ in order[:i]) for i in uses[:6]]
    assert in_forward == ([3] * 6 if is_explicit else [1, 2, 2, 3, 3, 3])
    backward = order[order.index(("all_gather", "blocks.2"), uses[5]) :]
    assert backward[:3] == [("all_gather", "blocks.2"), ("use", "blocks.2"), ("all_gather", "blocks.1")]


class TwoOfExperts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Experts(), Experts()

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.second(self.first(x, chosen), chosen)


@distributed(world_sizes=(2,))
def test_flags_of_missing_gradients_are_asked_for_at_once(ctx):
    """Their copy follows the collective directly. The host enqueues other work first and waits only for that copy."""
    recorder = streams.install()
    model = shard(ctx, TwoOfExperts(), ("first", "second"), transport="streams")
    for number in range(2):
        recorder.clear()
        model.zero_grad()
        model(inputs(ctx.rank, number, width=WIDTH), ctx.rank).square().mean().backward()
    entries = recorder.entries
    assert races(entries) == []
    names = [entry[:3] for entry in entries]
    asked = [i for i, name in enumerate(names) if name[0] == "transfer"]
    assert len(asked) == 2
    for i in asked:
        assert streams.on(entries[: i + 1], "reduce")[-2][0].startswith("reduce_scatter") and names[i][1] == "reduce"
    # The gradients of the first unit are on their way before the host waits for those of the second one.
    assert asked[1] < names.index(("wait", "host", names[asked[0] + 1][2]))
    streams.every_wait_is_needed(entries, {("host", ".flags"): "flags are read before they are there"})


@distributed(world_sizes=(2,))
def test_gathers_wait_for_the_optimizers_event(ctx):
    """set_post_optim_event: the event, and nothing else that the compute lane does before the forward."""
    recorder = streams.install()
    model, waited = sharded(ctx), []
    event = types.SimpleNamespace(wait=lambda: waited.append(None))
    for _ in range(2):  # memory that is new comes in the order of the compute lane
        model.set_post_optim_event(event)
        recorder.clear()
        step(model, ctx)
    assert len(waited) == 2
    entries = recorder.entries
    gathered = next(i for i, entry in enumerate(entries) if entry[0].startswith("all_gather"))
    waits = [entry[2] for entry in entries[:gathered] if entry[0] == "wait" and entry[1] == "copy_in"]
    assert waits and "compute" not in waits
    # The user promises that the event comes after the optimizer.
    assert [race for race in races(entries) if "optimizer" not in race] == []
    recorder.clear()
    step(model, ctx)  # the event was for one forward
    assert len(waited) == 2
    first = next(e[:3] for e in recorder.entries if e[0] == "wait" and e[1] == "copy_in")
    assert first == ("wait", "copy_in", "compute")


@distributed(world_sizes=(2,))
def test_reductions_over_a_group_of_their_own(ctx):
    """They stay on their lane, and gathers do not go through their group."""
    groups: dict[str, set] = {"_all_gather_group": set(), "_reduce_scatter_now": set()}
    for name, seen in groups.items():
        real = getattr(transport, name)

        def note(group, *arguments, seen=seen, real=real):
            seen.add(group.group_name)
            return real(group, *arguments)

        mock.patch.object(transport, name, note).start()
    _, entries = trained(ctx, lambda model: model.set_separate_reduce_scatter_group(True))
    assert [len(seen) for seen in groups.values()] == [1, 1] and not set.intersection(*groups.values())
    assert {e[1] for e in entries if e[0].startswith("reduce_scatter")} == {"reduce"}


@distributed(world_sizes=(2,))
def test_custom_collectives_overlap(ctx):
    """A user's collectives run on the lanes of those that they replace."""
    comms = UserGather(), UserScatter()

    def set_up(model) -> None:
        for module in (model, *model.blocks):
            module.set_custom_all_gather(comms[0])
            module.set_custom_reduce_scatter(comms[1])

    _, entries = trained(ctx, set_up)
    assert all(len(comm.used) > 8 and all(comm.used) for comm in comms)
    lanes = {name: {entry[1] for entry in entries if entry[0].startswith(name)} for name in ("all_gather", "reduce_")}
    assert lanes == {"all_gather": {"gather"}, "reduce_": {"reduce"}}


@distributed(world_sizes=(2,))
def test_roots_share_streams(ctx):
    """Pipeline stages, before and after their first forward: one set of lanes, no races between the stages."""
    recorder = streams.install()
    stages = [sharded(ctx) for _ in range(3)]
    fsdp2x.share_comm_ctx(stages[:2])
    recorder.clear()
    for _ in range(2):
        losses = [stage(inputs(ctx.rank, width=WIDTH)).square().mean() for stage in stages[:2]]
        for loss in reversed(losses):
            loss.backward()
    assert races(recorder.entries) == []
    layers = [stage._get_fsdp_state().comms.layers for stage in stages]
    assert layers[0] is layers[1] and list(layers[0].values()) == [recorder] and layers[2] is None
    same(grads(stages[0]), grads(stages[1]))
    step(stages[2], ctx)
    fsdp2x.share_comm_ctx(stages)
    assert stages[2]._get_fsdp_state().comms.layers is layers[0]
    step(stages[2], ctx)


# ---- memory and launches


@distributed(world_sizes=(1,))
@pytest.mark.parametrize("policy", POLICIES)
def test_a_unit_of_one_rank_is_a_pack_and_two_casts_if_it_has_any(ctx, policy):
    """No flags, no reduction buffer, no pass from there to the gradients. Without casts, no slot."""
    recorder = streams.install()
    model = sharded(ctx, mp_policy=POLICIES[policy])
    entries = record_of_steps(ctx, recorder, model, num=1)
    marks = (*streams.MARKS, "use", "optimizer")
    count = {name: sum(entry[0] == name for entry in entries) for name in {entry[0] for entry in entries} - {*marks}}
    # The root stays gathered between forward and backward.
    casts = {"copy": 2 * len(STACK_UNITS) + 1} if policy == "bf16" else {}
    assert count == casts | {"pack": len(STACK_UNITS) + 1}
    assert {entry[1] for entry in entries if entry[0] not in marks} == (
        {"copy_in", "compute"} if casts else {"compute"}
    )
    report = fsdp2x.memory_report(model)
    assert report.scratch_bytes == report.measured["scratch_bytes"] == 0
    assert (report.gather_slot_bytes > 0) == (report.measured["gather_slot_bytes"] > 0) == bool(casts)


@distributed(world_sizes=(1,))
def test_parameters_of_one_rank_are_its_shards(ctx):
    """They have the shards' addresses, also after the pool has moved, and a forward waits for the optimizer's event."""
    recorder = streams.install()
    model, other = sharded(ctx), sharded(ctx, mp_policy=POLICIES["bf16"])
    for _ in range(2):
        with fsdp2x.unsharded(model):
            addresses = {name: param.data_ptr() for name, param in model.named_parameters()}
        assert addresses == {name: param.to_local().data_ptr() for name, param in model.named_parameters()}
        step(model, ctx)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    for one, waits in ((model, True), (other, False)):
        one.set_post_optim_event(types.SimpleNamespace(wait=lambda: None))
        recorder.clear()
        one(inputs(ctx.rank, width=WIDTH))
        joins = [entry for entry in recorder.entries if entry[:3] == ("wait", "compute", "copy_in")]
        assert bool(joins) == waits


@distributed(world_sizes=(2,))
def test_memory_of_the_process_group(ctx):
    """Slots and buffers come from the backend's allocator, and reductions end in its memory."""
    recorder, taken = streams.install(), []

    def comm_allocator(kind, group, device):
        assert kind in (None, "process_group") and device.type == "cpu"

        def allocate(num_bytes):
            taken.append(torch.empty(num_bytes, dtype=torch.uint8))
            recorder.note_work("take", [], taken[-1:])
            return taken[-1]

        return allocate if kind == "process_group" else None

    mock.patch.object(transport.torch_private, "comm_allocator", comm_allocator).start()
    ask = lambda model: model.blocks[0].set_allocate_memory_from_process_group_for_comm(True)  # noqa: E731
    _, entries = trained(ctx, ask, recorder=recorder)
    starts = {memory.data_ptr(): memory.nbytes for memory in taken}
    for operation, _, _, reads, writes in entries:
        if operation.startswith(("all_gather", "reduce_scatter")):
            for address, num_bytes in (*reads, *writes):
                assert any(start <= address and address + num_bytes <= start + size for start, size in starts.items())


@distributed(world_sizes=(1,))
def test_kept_slots_end_with_their_transport(ctx):
    """Other memory for collectives means another transport. A unit that keeps its slot then takes a new one."""
    streams.install()
    found = []
    for keeps in (False, True):
        model = sharded(ctx, mp_policy=POLICIES["bf16"])
        for block in model.blocks:
            block.set_keep_unsharded_storage(keeps)
        for number in range(2):
            loss_of(model, ctx.rank, number).backward()
            model.set_allocate_memory_from_process_group_for_comm(number == 0)
        found.append(grads(model))
    same(*found, "summed")


@distributed(world_sizes=(1, 2))
@pytest.mark.each_world
@pytest.mark.parametrize("offload", [None, "gradients", "all"])
def test_reductions_wait_for_a_manual_finalization(ctx, offload):
    """Backwards with a forward between sum to the same gradients as those that finalize themselves."""
    options = {"offload_policy": fsdp2x.HostOffloadPolicy(offload, pin_memory=False)} if offload else {}
    found = []
    for is_manual in (False, True):
        recorder = streams.install()
        model = sharded(ctx, **options)
        model.set_manual_backward_finalization(is_manual)
        for number in range(4):
            loss_of(model, ctx.rank, number).backward()
        if is_manual:
            model.finalize_backward()
        found.append(grads(model))
        assert races(recorder.entries) == []
        mock.patch.stopall()
    same(*found, "finalized", **({"rtol": 0, "atol": 1e-6} if ctx.world > 1 else {}))  # summed in another order


# ---- streams, hooks, and captures of the user


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("with_kernels", [True, False])
def test_steps_on_streams_of_the_user(ctx, with_kernels):
    """Lanes follow the stream that is current when a forward begins, whichever was in the step before."""
    recorder = streams.install(pack_below_bytes=1200, with_kernels=with_kernels)
    reference, model = wide(), sharded(ctx)
    for number, stream in enumerate((0, 1, 2, 1, 0)):
        mean_of_ranks(reference, lambda m, rank, n=number: loss_of(m, rank, n), ctx.world)
        recorder.use_stream(stream)  # ordered as users must: after the first stream and before its next work
        recorder.wait_stream(0)
        step(model, ctx, number)
        recorder.use_stream(0)
        recorder.wait_stream(stream)
        same(grads(model), grads(reference), "gradients", **CLOSE["fp32"])
        model.zero_grad()
    entries = recorder.entries
    assert {"compute", "compute1", "compute2"} <= {entry[1] for entry in entries}
    assert races(entries) == []
    # Two faults: a user forgets to order the streams, or the engine's lanes follow only the first stream.
    assert races(without(entries, "wait", "compute1", "user"))
    mistaken = ("record", "compute1", "compute")
    assert races([(e[0], "compute", *e[2:]) if e[:3] == mistaken else e for e in entries])


@distributed(world_sizes=(2,))
def test_memory_that_is_given_back_away_from_its_stream(ctx):
    """A slot that stays gathered between two streams goes back in the order of the one that took it."""
    recorder = streams.install()
    model = sharded(ctx, reshard_after_forward=False)
    step(model, ctx)
    recorder.clear()
    loss = model(inputs(ctx.rank, 1, width=WIDTH)).square().mean()
    recorder.use_stream(1)
    recorder.wait_stream(0)
    loss.backward()  # gives back what forward has taken on the first stream
    recorder.use_stream(0)
    recorder.wait_stream(1)
    entries = recorder.entries
    assert races(entries) == []
    slots = {address for e in entries if e[0] == "all_gather" for address, _ in e[4]}
    first = next(i for i, e in enumerate(entries) if e[1] == "compute1")
    taken = {e[4][0] for e in entries[:first] if e[:2] == ("take", "compute") and e[4][0][0] in slots}
    given = [e[1] for e in entries[first:] if e[0] == "give_back" and e[4][0] in taken]
    assert given and given[0] == "compute"
    # An engine that gives it back without a wait of the stream that is not current.
    broken = [e for i, e in enumerate(entries) if i < first or not (e[:2] == ("wait", "compute") and "slot" in e[2])]
    assert len(broken) < len(entries) and races(broken)


@distributed(world_sizes=(2,))
def test_plans_that_another_stream_runs(ctx):
    """A plan made on one stream and run on another is freed after the work of both."""
    recorder = streams.install()
    model = sharded(ctx)
    step(model, ctx)
    model.zero_grad()
    recorder.use_stream(1)
    recorder.wait_stream(0)
    step(model, ctx, 1)
    recorder.use_stream(0)  # without a wait, so this stream frees memory that the other one still reads
    plans = [e for e in recorder.entries if e[0] in ("hold", "read plan") or e[:2] == ("take", "host")]
    freed = [("give_back", "compute", "plan", [], e[3]) for e in plans if e[:2] == ("hold", "compute1")]
    assert freed and {"take", "read plan"} <= {e[0] for e in plans}
    assert races([*plans, *freed]) == []
    assert races([*without(plans, "hold", "compute1"), *freed])


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
    recorder = streams.install(pack_below_bytes=1200)
    model = sharded(ctx, reshard_after_forward=reshard)
    entries = capture(recorder, model, ctx)
    assert races(entries) == []
    begin = next(i for i, e in enumerate(entries) if e[0] == "begin_capture")
    end = next(i for i, e in enumerate(entries) if e[0] == "end_capture")
    assert [e for e in entries[begin:end] if e[0] == "skip"], "events of the steps before mean nothing"
    # An engine whose lanes do not follow the captured stream, and one that does not wait for them at the end.
    inside = entries[begin : end + 1]
    assert any("not in it" in race for race in races(without(inside, "wait", "copy_in")))
    assert any("not joined" in race for race in races(without(inside, "wait", "compute", "reduce")))
    # A host that waits for an event of the graph would wait for ever.
    waits = [*inside[:-1], ("wait", "host", "reduce", [], []), inside[-1]]
    assert any("host waits" in race for race in races(waits))


@distributed(world_sizes=(2,))
def test_a_capture_without_all_gradients_is_refused(ctx):
    """The host cannot read flags of a graph; where zeros are reduced it need not."""
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
    recorder = streams.install()
    model = sharded(ctx)
    calls = []

    @torch.no_grad()
    def hook(param: torch.Tensor) -> None:
        calls.append(HOOKS[what](model.blocks))

    model.blocks[2].up.weight.register_post_accumulate_grad_hook(hook)
    for number in range(3):
        step(model, ctx, number)
    assert len(calls) == 3 and races(recorder.entries) == []


@distributed(world_sizes=(2,))
def test_the_hook_has_a_stream(ctx):
    """The user's stream waits for the reduction, is current in the hook, and is waited for."""
    streams.install()
    seen = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            seen.append(f"{self.name} waits for {other.name}")

        def __enter__(self):
            seen.append("begin")

        def __exit__(self, *exception):
            seen.append("end")

    model = sharded(ctx)
    model.blocks[0].set_all_reduce_hook(lambda rows: seen.append("hook"), stream=Stream("theirs"))
    with mock.patch.object(torch.accelerator, "current_stream", lambda device: Stream("reduce")):
        step(model, ctx)
    assert seen == ["theirs waits for reduce", "begin", "hook", "end", "reduce waits for theirs"]


# ---- large reductions, in pieces


def steps_of(ctx, recorder, policy: str, **options) -> tuple[list[torch.Tensor], list[tuple]]:
    """Gradients and weights of two steps, the second one of two backwards on another stream, and their record."""
    torch.manual_seed(ctx.rank)
    model = sharded(ctx, mp_policy=POLICIES[policy], **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    recorder.clear()
    found = []
    for number, num_backwards in enumerate((1, 2)):
        recorder.use_stream(number)
        recorder.wait_stream(0)
        for backward in range(num_backwards):  # the first of two packs complete segments
            with fsdp2x.accumulate(model, last=backward + 1 == num_backwards):
                loss_of(model, ctx.rank, number).backward()
        recorder.use_stream(0)
        recorder.wait_stream(number)
        found += [param.grad.to_local().clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(param.to_local() for param in model.parameters())], recorder.entries


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("piece_bytes", [256, 900])
def test_reductions_in_pieces(ctx, piece_bytes):
    """Bits as without pieces. Each piece is packed on the lane of its collective, and gradients live until the end."""
    recorder = streams.install(pieces=(600, piece_bytes))
    found, entries = steps_of(ctx, recorder, "bf16")
    with mock.patch.object(transport, "pieces", lambda: (1 << 40, 0)):
        expected, _ = steps_of(ctx, recorder, "bf16")
    assert same_bits(found, expected)
    assert races(entries) == []
    packs = [entry for entry in entries if entry[0] == "pack" and entry[1] == "reduce"]
    scatters = [entry for entry in entries if entry[0].startswith("reduce_scatter")]
    assert len(packs) > 4 and len(scatters) >= len(packs)
    sizes = [size for entry in scatters for _, size in entry[3]]
    assert sum(size <= piece_bytes + 2 * 64 * 2 for size in sizes) >= len(packs)
    # Only these waits keep autograd's gradients in place: the others order the same lanes a little later.
    late = {("compute", "reduce buffer"): "gradients are freed while they are packed"}
    streams.every_wait_is_needed(entries, late | {("reduce", "compute"): "gradients are packed before they are there"})
