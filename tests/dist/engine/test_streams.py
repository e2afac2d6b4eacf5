"""The device transport without a device: the work of each stream, its waits, and whether the events suffice."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import streams
from arrangements import optimizer_in_backward
from fsdp2x.sharding import spec
from harness import distributed
from models import STACK_UNITS, inputs
from reference import full, grads, mean_of_ranks, mesh_of, only_fsdp2x, params, same, shard
from streams import WIDTH, Experts, record_of_steps, step, wide


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("pack_below", [0, 600, 1 << 20])
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.each_pair
def test_trains_as_one_rank_would(ctx, pack_below, policy, with_kernels):
    """Direct, mixed and packed gathers, uneven rows, in two dtypes; with the twins of the kernels and without."""
    only_fsdp2x(ctx)
    recorder = streams.install(pack_below, with_kernels=with_kernels)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": mixed} if policy == "bf16" else {}
    reference = wide()
    ours = shard(ctx, copy.deepcopy(reference), STACK_UNITS, transport="streams", **options)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (reference, ours)]
    for number in range(3):
        mean_of_ranks(reference, lambda m, rank, n=number: m(inputs(rank, n, width=WIDTH)).square().mean(), ctx.world)
        step(ours, ctx, number)
        close = {"rtol": 1e-4, "atol": 1e-6} if policy == "fp32" else {"rtol": 0.2, "atol": 2e-2}
        same(grads(ours), grads(reference), f"gradients of step {number}", **close)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    num = [len(entry[4]) for entry in recorder.entries if entry[0] == "all_gather"]
    assert (max(num) > 1) == (pack_below < 1 << 20)


GATHER = [
    ("wait", "copy_in", "slot"),
    ("copy", "copy_in", ""),
    ("record", "copy_in", "slot"),
    ("wait", "gather", "slot"),
    ("all_gather", "gather", "blocks.1"),
    ("copy", "gather", ""),
    ("record", "gather", "slot"),
    ("wait", "compute", "slot"),
    ("use", "compute", "blocks.1"),
    ("use", "compute", "blocks.1"),
    ("record", "compute", "slot"),
]
REDUCE = [
    ("wait", "compute", "reduce buffer"),
    ("pack", "compute", ""),
    ("record", "compute", "compute"),
    ("wait", "reduce", "compute"),
    ("reduce_scatter (average)", "reduce", "blocks.1"),
    ("record", "reduce", "reduce buffer"),
]


def in_order(entries: list[tuple], expected: list[tuple]) -> None:
    """Each of `expected` comes after the one before it; subjects are compared by their beginning."""
    position = 0
    for operation, lane, subject in expected:
        rest = range(position, len(entries))
        found = next(
            (i for i in rest if entries[i][:2] == (operation, lane) and entries[i][2].startswith(subject)), None
        )
        assert found is not None, f"{operation} {subject} on {lane} is missing after {entries[position - 1][:3]}"
        position = found + 1


@distributed(world_sizes=(2,))
def test_lanes_of_a_unit(ctx):
    """copy-in -> grouped gather -> copy-out -> compute; compute -> pack -> reduce-scatter -> the optimizer."""
    only_fsdp2x(ctx)
    recorder = streams.install(pack_below_bytes=1200)
    model = shard(ctx, wide(), STACK_UNITS, transport="streams", reshard_after_forward=True)
    entries = record_of_steps(ctx, recorder, model, num=1)
    start = next(i for i, entry in enumerate(entries) if entry[0] == "all_gather" and entry[2] == "blocks.1")
    in_order(entries[start - 10 :], GATHER)
    in_order(entries, REDUCE)
    gathers = [entry for entry in entries if entry[0] == "all_gather"]
    assert all(entry[1] == "gather" for entry in gathers)
    # Two weights of 1280 bytes on their own, two biases packed.
    block = next(entry for entry in gathers if entry[2] == "blocks.1")
    assert sorted(size for _, size in block[4]) == [256, 1280, 1280]
    for (out, out_bytes), (source, source_bytes) in zip(block[4], block[3], strict=True):
        assert out_bytes == ctx.world * source_bytes and source == out + ctx.rank * source_bytes
        assert out % 16 == source % 16 == 0
    # The optimizer's turn comes after all reductions.
    last = max(i for i, entry in enumerate(entries) if entry[1] == "reduce" and entry[0] != "record")
    in_order(entries[last:], [("record", "reduce", "reduce"), ("wait", "compute", "reduce")])


@distributed(world_sizes=(2,))
def test_prefetch_order(ctx):
    """Forward: the next unit's gather is on its way before this unit is used. Backward: the one before it, as well."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    model = shard(ctx, wide(), STACK_UNITS, transport="streams")
    entries = record_of_steps(ctx, recorder, model, num=1)
    order = [(e[0], e[2]) for e in entries if e[0] in ("all_gather", "use") and e[2].startswith("blocks")]
    gathered = [subject for operation, subject in order if operation == "all_gather"]
    assert gathered == ["blocks.0", "blocks.1", "blocks.2", "blocks.2", "blocks.1", "blocks.0"]
    uses = [i for i, (operation, _) in enumerate(order) if operation == "use"]
    # Each unit is used from one mark to the next; between its two marks the next unit's gather was enqueued.
    for first, second in zip(uses[0:4:2], uses[1:4:2], strict=True):
        assert "all_gather" in [operation for operation, _ in order[first:second]]
    backward = order[order.index(("all_gather", "blocks.2"), uses[5]) :]
    assert backward[:3] == [("all_gather", "blocks.2"), ("use", "blocks.2"), ("all_gather", "blocks.1")]


@distributed(world_sizes=(2,))
def test_explicit_prefetch_lists(ctx):
    only_fsdp2x(ctx)
    recorder = streams.install()
    model = shard(ctx, wide(), STACK_UNITS, transport="streams")
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1], model.blocks[2]])
    for block in model.blocks:
        block.set_modules_to_forward_prefetch([])
    entries = record_of_steps(ctx, recorder, model, num=1)
    first_use = next(i for i, e in enumerate(entries) if e[0] == "use" and e[2].startswith("blocks"))
    ahead = [e[2] for e in entries[:first_use] if e[0] == "all_gather" and e[2].startswith("blocks")]
    assert ahead == ["blocks.0", "blocks.1", "blocks.2"]


KINDS = {
    # (lane, event): what a device would get wrong without that wait.
    ("copy_in", "compute"): "a slot is written while others use its memory, a shard is read before it is written",
    ("gather", "slot"): "a gather sends rows that are not copied in yet",
    ("compute", "slot"): "a unit computes before it is gathered",
    ("reduce", "compute"): "a reduction sends gradients that are not packed yet",
    ("compute", "reduce buffer"): "the memory of gradients that are still sent is taken for others",
}


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("reshard", [True, False])
def test_events_order_every_access(ctx, reshard):
    only_fsdp2x(ctx)
    recorder = streams.install(pack_below_bytes=1200)
    model = shard(ctx, wide(5), [f"blocks.{i}" for i in range(5)], transport="streams", reshard_after_forward=reshard)
    entries = record_of_steps(ctx, recorder, model, num=3)
    assert streams.races(entries) == []
    if not reshard or ctx.world == 3:
        return
    # Every wait is needed: the check finds a race in the record of an engine that forgets one kind of it.
    streams.every_wait_is_needed(entries, KINDS)
    broken = [e for e in entries if not (e[0] == "wait" and e[1] == "compute" and e[2] == "reduce")]
    assert streams.races(broken), "not found: the optimizer reads gradients that are not reduced"


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("accumulate", ["no_sync", "no_all_reduce"])
def test_replicas_and_accumulation(ctx, accumulate):
    """HSDP: the all-reduce has a lane of its own, overlaps the next unit's reduction, and follows its own."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    reference = wide()
    model = shard(ctx, copy.deepcopy(reference), STACK_UNITS, transport="streams", mesh=mesh_of("2d", ctx.world))
    micro = ((0, False), (1, False), (2, True))
    for round_ in range(2):
        recorder.clear()
        expected: dict = {}
        for number, sync in micro:
            setter = model.set_requires_gradient_sync if accumulate == "no_sync" else model.set_requires_all_reduce
            setter(sync)
            number += 10 * round_
            step(model, ctx, number)
            mean_of_ranks(
                reference, lambda m, rank, n=number: m(inputs(rank, n, width=WIDTH)).square().mean(), ctx.world
            )
            for name, grad in grads(reference).items():
                expected[name] = grad + expected.get(name, 0)
        same(grads(model), expected, "gradients", rtol=1e-4, atol=1e-6)
        model.zero_grad()
    assert streams.races(recorder.entries) == []
    num = {name: sum(e[0].startswith(name) for e in recorder.entries) for name in ("reduce_scatter", "all_reduce")}
    assert num == {"reduce_scatter": 4 if accumulate == "no_sync" else 12, "all_reduce": 4}
    reduced = [
        e[2] for e in streams.on(recorder.entries, "reduce", "all_reduce") if e[0].startswith(("reduce_", "all_"))
    ]
    last = reduced[-8:]
    assert last == [name for name in ("blocks.2", "blocks.1", "blocks.0", "<root>") for _ in range(2)]
    broken = [e for e in recorder.entries if not (e[0] == "wait" and e[1] == "all_reduce")]
    assert streams.races(broken), "not found: an all-reduce of rows that are not reduced over the shards"


@distributed(world_sizes=(1, 2))
def test_sums_for_gradients_of_others_outlive_their_lane(ctx):
    """The reduce lane works in memory of the compute lane, which is freed once compute has waited for that work."""
    only_fsdp2x(ctx)
    streams.install()
    sums, original = [], spec.add_to_foreign

    def add(param, local) -> None:
        sums.append(torch._C._WeakTensorRef(local))
        assert not any(one.expired() for one in sums)
        original(param, local)

    with mock.patch.object(spec, "add_to_foreign", add):
        model = shard(ctx, wide(), STACK_UNITS, transport="streams")
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        step(model, ctx, 0)
    assert len(sums) == len(list(model.parameters()))
    assert all(one.expired() for one in sums)


@distributed(world_sizes=(2,))
def test_a_steady_step_takes_the_same_memory_again(ctx):
    """Each step takes two gather buffers besides the root's and two reduce buffers, and owns none afterwards."""
    only_fsdp2x(ctx)
    import fsdp2x

    recorder = streams.install()
    model = shard(ctx, wide(6), [f"blocks.{i}" for i in range(6)], transport="streams")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    root = model._get_fsdp_state
    step(model, ctx, 0, optimizer)
    step(model, ctx, 1, optimizer)
    taken = []
    for number in range(3):
        before = root().root.stats()
        recorder.clear()
        step(model, ctx, number, optimizer)
        after = root().root.stats()
        taken.append([after[key] - before[key] for key in ("transport_allocations", "gradient_block_allocations")])
        assert all(after[key] == before[key] for key in ("gather_slot_bytes", "peak_gather_bytes", "scratch_bytes"))
        assert after["gather_slots_owned"] == after["scratch_slots_owned"] == 0, after["owners"]
        assert root().root.loans() == []
    # The root's gather buffer stays from forward to backward. Each step allocates the others, the packed gathers, the
    # reduce buffers, and the flat buffers again.
    assert taken == [[13 + 13 + 7, 7]] * 3
    report = fsdp2x.memory_report(model)
    of_root, of_block = (unit.slot_bytes for unit in report.units[:2])
    assert after["peak_gather_bytes"] == of_root + 2 * of_block
    two_buffers = 2 * report.units[1].scratch_bytes
    assert two_buffers <= after["scratch_bytes"] < 1.1 * two_buffers  # and what is gathered packed


@distributed(world_sizes=(2,))
def test_reductions_end_in_the_gradient_pool(ctx):
    """If dtypes agree, no copy follows the collective: its output is the gradient."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    model = shard(ctx, wide(), STACK_UNITS, transport="streams")
    entries = record_of_steps(ctx, recorder, model, num=1)
    assert not [e for e in entries if e[0] == "write_rows"]
    step(model, ctx)
    grad = model.blocks[1].up.weight.grad.to_local()
    scattered = [e for e in recorder.entries if e[0].startswith("reduce_scatter") and e[2] == "blocks.1"][-1]
    assert scattered[4][0][0] == grad.untyped_storage().data_ptr()
    # A second backward adds to it: through rows of its own.
    first = full(model.blocks[1].up.weight.grad)
    recorder.clear()
    step(model, ctx)
    assert [e for e in recorder.entries if e[0] == "write_rows"]
    same(full(model.blocks[1].up.weight.grad), 2 * first, "accumulated", rtol=1e-6, atol=1e-7)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("how", ["average", "sum", "divided by 8", "divided by the ranks"])
def test_choice_of_the_reduction(ctx, how, dtype):
    """Sums and means only: NCCL's premultiplied sums of bf16 are zero in some versions of torch."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    operations = []
    collective = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    scatter = getattr(dist, collective)

    def noted(output, source, *, op, **options):
        operations.append(op)
        return scatter(output, source, op=op, **options)

    reference = wide()
    reduce_dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    model = shard(ctx, copy.deepcopy(reference), STACK_UNITS, transport="streams", mp_policy=policy)
    for module in (model, *model.blocks):
        if how == "sum":
            module.set_force_sum_reduction_for_comms(True)
        if how.startswith("divided"):
            module.set_gradient_divide_factor(8.0 if how == "divided by 8" else float(ctx.world))
    # As a backend that can: what is asked for is asked of the process group, whichever that is.
    with mock.patch.object(dist, collective, noted), mock.patch.object(dist, "get_backend_config", lambda _: "nccl"):
        step(model, ctx)
    mean_of_ranks(reference, lambda m, rank: m(inputs(rank, 0, width=WIDTH)).square().mean(), ctx.world)
    scale = ctx.world / 8.0 if how == "divided by 8" else 1.0
    expected = {name: grad * scale for name, grad in grads(reference).items()}
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype == "fp32" else {"rtol": 2e-2, "atol": 1e-3}
    same(grads(model), expected, "gradients", **close)
    averages = how in ("average", "divided by the ranks") and dtype != "fp16"
    assert operations == [dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM] * 4
    names = {e[0] for e in recorder.entries if e[0].startswith("reduce_scatter")}
    assert names == {"reduce_scatter (average)" if averages else "reduce_scatter (sum)"}
    assert streams.races(recorder.entries) == []


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("zeros", [False, True])
def test_missing_gradients(ctx, zeros):
    """A rank that lacks one reads the flags of the reduction, unless missing ones are reduced as zeros."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    reference, model = Experts(), shard(ctx, Experts(), transport="streams")
    model.set_reduce_scatter_unused_params(zeros)
    for chosen in ((0, 1, 0), (1, 1, 1)):
        mean_of_ranks(
            reference, lambda m, rank, c=chosen: m(inputs(rank, width=WIDTH), c[rank]).square().mean(), ctx.world
        )
        model.zero_grad()
        model(inputs(ctx.rank, width=WIDTH), chosen[ctx.rank]).square().mean().backward()
        expected = grads(reference)
        if zeros:
            nothing = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
            expected = {name: nothing[name] if grad is None else grad for name, grad in expected.items()}
        same(grads(model), expected, "gradients", rtol=1e-5, atol=1e-6)
    assert any(e[0] == "read" and e[2].endswith(".flags") for e in recorder.entries) == (not zeros)
    assert streams.races(recorder.entries) == []


class TwoOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Experts(), Experts()

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.second(self.first(x, chosen), chosen)


@distributed(world_sizes=(2,))
def test_flags_of_missing_gradients_are_asked_for_at_once(ctx):
    """Their copy follows the collective directly. The host enqueues other work first and waits only for that copy."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    model = shard(ctx, TwoOfExperts(), ("first", "second"), transport="streams")
    for number in range(2):
        recorder.clear()
        model.zero_grad()
        model(inputs(ctx.rank, number, width=WIDTH), ctx.rank).square().mean().backward()
    entries = recorder.entries
    assert streams.races(entries) == []
    names = [entry[:3] for entry in entries]
    asked = [i for i, name in enumerate(names) if name[0] == "transfer"]
    assert len(asked) == 2
    for i in asked:
        assert streams.on(entries[: i + 1], "reduce")[-2][0].startswith("reduce_scatter") and names[i][1] == "reduce"
        assert names[i + 1][0] == "record" and names[i + 1][2].endswith(".flags")
        waited = names.index(("wait", "host", names[i + 1][2]))
        assert waited > i + 2 and names[waited + 1] == ("read", "host", names[i + 1][2])
    # The gradients of the first unit are on their way before the host waits for those of the second one.
    assert asked[1] < names.index(("wait", "host", names[asked[0] + 1][2]))
    streams.every_wait_is_needed(entries, {("host", ".flags"): "flags are read before they are there"})


@distributed(world_sizes=(2,))
def test_an_exception_leaves_nothing_owned(ctx):
    only_fsdp2x(ctx)
    recorder = streams.install()
    model = shard(ctx, wide(), STACK_UNITS, transport="streams")
    step(model, ctx)
    expected = params(model)
    for where in ("forward", "backward"):
        model.zero_grad()

        class Fail(torch.autograd.Function):
            @staticmethod
            def forward(_, x):
                return x.clone()

            @staticmethod
            def backward(_, grad):
                raise ValueError("on purpose")

        def hook(module, args, where=where, fail=Fail):
            if where == "forward":
                raise ValueError("on purpose")
            return (fail.apply(args[0]),)

        handle = model.blocks[1].register_forward_pre_hook(hook)
        with pytest.raises(ValueError, match="on purpose"):
            step(model, ctx)
        handle.remove()
        model.reset_iter_state()
        stats = model._get_fsdp_state().root.stats()
        assert stats["gather_slots_owned"] == stats["scratch_slots_owned"] == 0, (where, stats["owners"])
    step(model, ctx)
    step(model, ctx, 1)
    same(params(model), expected, "parameters")
    assert streams.races(recorder.entries) == []


@distributed(world_sizes=(2,))
def test_optimizer_in_backward_runs_behind_its_reduction(ctx):
    only_fsdp2x(ctx)
    recorder = streams.install()
    reference, model = wide(), None
    model = shard(ctx, copy.deepcopy(reference), STACK_UNITS, transport="streams")
    optimizer_in_backward(model, lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number in range(3):
        mean_of_ranks(reference, lambda m, rank, n=number: m(inputs(rank, n, width=WIDTH)).square().mean(), ctx.world)
        plain.step()
        step(model, ctx, number)
    same(params(model), params(reference), "parameters", rtol=1e-4, atol=1e-6)
    assert streams.races(recorder.entries) == []


@distributed(world_sizes=(4,))
def test_rows_kept_in_a_smaller_world(ctx):
    only_fsdp2x(ctx)
    recorder = streams.install(pack_below_bytes=1200)
    reference = wide()
    model = shard(ctx, copy.deepcopy(reference), STACK_UNITS, transport="streams", reshard_after_forward=2)
    for number in range(2):
        mean_of_ranks(reference, lambda m, rank, n=number: m(inputs(rank, n, width=WIDTH)).square().mean(), ctx.world)
        step(model, ctx, number)
        same(grads(model), grads(reference), "gradients", rtol=1e-4, atol=1e-6)
        model.zero_grad()
    assert streams.races(recorder.entries) == []
    # All rows of a unit in one launch.
    kept = {e[2] for e in recorder.entries if e[0] == "record" and ".pool" in e[2]}
    copies = [e for e in recorder.entries if e[:2] == ("copy", "compute")]
    assert len(copies) == 2 * len(kept) > 0


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_kernels", [True, False])
def test_nothing_that_nobody_wrote_travels(ctx, reduce_dtype, with_kernels):
    """New memory is full of NaN here, so rows, their padding, flags, and the padding after them must be written."""
    only_fsdp2x(ctx)
    streams.install(with_kernels=with_kernels)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.Linear(3, 5))
    model[1].weight.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(9))
    shard(ctx, model, transport="streams", mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    sent = []
    collective = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    scatter = getattr(dist, collective)

    def checked(output, source, **options):
        sent.append((source.numel(), torch.isfinite(source).all().item()))
        return scatter(output, source, **options)

    with mock.patch.object(dist, collective, checked):
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            model(torch.ones(2, 5)).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert sent and all(is_written for _, is_written in sent), sent
