"""User settings of the device transport, checked in its record: prefetch budgets, buffers, events, memory, groups."""

import contextlib
import copy
import types

import pytest
import torch

import streams
from harness import distributed
from models import STACK_UNITS, inputs
from reference import grads, mean_of_ranks, only_fsdp2x, same, shard
from streams import WIDTH, record_of_steps, step, wide


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("num", [1, 3])
def test_number_of_reduce_buffers(ctx, num):
    only_fsdp2x(ctx)
    import fsdp2x

    recorder = streams.install()
    names = [f"blocks.{i}" for i in range(6)]
    model = shard(ctx, wide(6), names, transport="streams")
    model.set_reduce_scatter_max_input_buffers(num)
    entries = record_of_steps(ctx, recorder, model, num=2)
    report = fsdp2x.memory_report(model)
    one = report.units[1].scratch_bytes
    # And what is gathered packed.
    assert num * one <= report.measured["scratch_bytes"] == report.scratch_bytes < (num + 0.2) * one
    assert streams.races(entries) == []


@distributed(world_sizes=(2,))
def test_gathers_wait_for_the_optimizers_event(ctx):
    """set_post_optim_event: the event, and nothing else that the compute lane does before the forward."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    model = shard(ctx, wide(), STACK_UNITS, transport="streams")
    step(model, ctx)

    class Event:
        waited = 0

        def wait(self):
            Event.waited += 1

    model.set_post_optim_event(Event())
    step(model, ctx)  # memory that is new comes in the order of the compute lane
    model.set_post_optim_event(Event())
    recorder.clear()
    step(model, ctx)
    assert Event.waited == 2
    entries = list(recorder.entries)
    gathered = [i for i, entry in enumerate(entries) if entry[0].startswith("all_gather")][0]
    waits = [entry[2] for entry in entries[:gathered] if entry[0] == "wait" and entry[1] == "copy_in"]
    assert waits and "compute" not in waits
    # The user promises that the event comes after the optimizer.
    assert [race for race in streams.races(entries) if "optimizer" not in race] == []
    recorder.clear()
    step(model, ctx)  # the event was for one forward
    assert Event.waited == 2
    first = [e[:3] for e in recorder.entries if e[0] == "wait" and e[1] == "copy_in"][0]
    assert first == ("wait", "copy_in", "compute")


@distributed(world_sizes=(2,))
def test_memory_of_the_process_group(ctx):
    """Slots and buffers come from the backend's allocator, and reductions end in its memory."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    taken = []

    def comm_allocator(kind, group, device):
        assert kind in (None, "process_group") and device.type == "cpu"

        def allocate(num_bytes):
            taken.append(torch.empty(num_bytes, dtype=torch.uint8))
            recorder.note_work("take", [], taken[-1:])
            return taken[-1]

        return allocate if kind == "process_group" else None

    streams.mock.patch.object(streams.transport.torch_private, "comm_allocator", comm_allocator).start()
    model = shard(ctx, wide(), STACK_UNITS, transport="streams")
    model.blocks[0].set_allocate_memory_from_process_group_for_comm(True)
    entries = record_of_steps(ctx, recorder, model, num=1)
    starts = {memory.data_ptr(): memory.nbytes for memory in taken}
    for operation, _, _, reads, writes in entries:
        if operation.startswith(("all_gather", "reduce_scatter")):
            for address, num_bytes in (*reads, *writes):
                assert any(start <= address and address + num_bytes <= start + size for start, size in starts.items())
    assert streams.races(entries) == []


@distributed(world_sizes=(2,))
def test_symmetric_memory(ctx):
    """All that the transport lends is from torch's pool, and is exchanged once; on the CPU there is no such memory."""
    only_fsdp2x(ctx)
    streams.install()
    model = shard(ctx, wide(), STACK_UNITS, transport="streams")
    with pytest.raises(NotImplementedError, match="symmetric memory needs CUDA devices"):
        model.set_symm_mem_for_comm()
    with pytest.raises(ValueError, match="expected backend 'NCCL', got 'NVSHMEM'"):
        model.set_symm_mem_for_comm("NVSHMEM")

    import torch.distributed._symmetric_memory as symmetric

    calls, in_pool, exchanged = [], [], []

    @contextlib.contextmanager
    def use_mem_pool(pool):
        in_pool.append(pool)
        yield

    module = types.SimpleNamespace(use_mem_pool=use_mem_pool)
    patch = streams.mock.patch.object
    patch(symmetric, "set_backend", lambda name: calls.append(name)).start()
    patch(symmetric, "get_mem_pool", lambda device: f"pool of {device}").start()
    patch(symmetric, "rendezvous", lambda memory, group: exchanged.append((memory.data_ptr(), group))).start()
    patch(torch, "get_device_module", lambda device: module).start()
    model.blocks[0]._get_fsdp_state().comms.memory = "symmetric"  # as the setter does on a CUDA mesh
    for number in range(3):
        step(model, ctx, number)
        model.zero_grad()
    group = model._get_fsdp_state().groups[0].ranks.group
    lent = [address for _, _, address, _ in model._get_fsdp_state().root.loans()]
    assert sorted(exchanged) == sorted((address, group.group_name) for address in lent) and len(lent) > 4
    assert calls == ["NCCL"] and in_pool == ["pool of cpu"] * len(lent)


@distributed(world_sizes=(2,))
def test_reductions_over_a_group_of_their_own(ctx):
    """They stay on their lane, and gathers do not go through their group."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    groups: dict[str, set] = {"gather": set(), "reduce": set()}
    real = {name: getattr(streams.transport, name) for name in ("_all_gather_group", "_reduce_scatter_now")}

    def gather(group, *arguments):
        groups["gather"].add(group.group_name)
        return real["_all_gather_group"](group, *arguments)

    def reduce(group, *arguments):
        groups["reduce"].add(group.group_name)
        return real["_reduce_scatter_now"](group, *arguments)

    streams.mock.patch.object(streams.transport, "_all_gather_group", gather).start()
    streams.mock.patch.object(streams.transport, "_reduce_scatter_now", reduce).start()
    reference = wide()
    model = shard(ctx, copy.deepcopy(reference), STACK_UNITS, transport="streams")
    model.set_separate_reduce_scatter_group(True)
    step(model, ctx)
    mean_of_ranks(reference, lambda m, rank: m(inputs(rank, 0, width=WIDTH)).square().mean(), ctx.world)
    same(grads(model), grads(reference), "gradients", rtol=1e-4, atol=1e-6)
    assert len(groups["gather"]) == len(groups["reduce"]) == 1 and groups["gather"] != groups["reduce"]
    assert {e[1] for e in recorder.entries if e[0].startswith("reduce_scatter")} == {"reduce"}
    assert streams.races(recorder.entries) == []


@distributed(world_sizes=(2,))
def test_storage_that_stays(ctx):
    only_fsdp2x(ctx)
    recorder = streams.install()
    model = shard(ctx, wide(), STACK_UNITS, transport="streams")
    model.set_keep_unsharded_storage(True)
    entries = record_of_steps(ctx, recorder, model)
    for name in STACK_UNITS:
        assert len({e[3][0][0] for e in entries if e[0] == "use" and e[2] == name}) == 1
    assert len({e[3][0][0] for e in entries if e[0] == "use"}) == 4, "a slot for each unit"
    assert streams.races(entries) == []
    model.set_keep_unsharded_storage(False)
    step(model, ctx)
    assert model._get_fsdp_state().root.stats()["gather_slots_owned"] == 0


@distributed(world_sizes=(2,))
def test_roots_share_streams(ctx):
    """Pipeline stages, before and after their first forward: one set of lanes, no races between the stages."""
    only_fsdp2x(ctx)
    import fsdp2x

    recorder = streams.install()
    stages = [shard(ctx, wide(), STACK_UNITS, transport="streams") for _ in range(3)]
    fsdp2x.share_comm_ctx(stages[:2])
    recorder.clear()
    for _ in range(2):
        losses = [stage(inputs(ctx.rank, width=WIDTH)).square().mean() for stage in stages[:2]]
        for loss in reversed(losses):
            loss.backward()
    assert streams.races(recorder.entries) == []
    layers = [stage._get_fsdp_state().comms.layers for stage in stages]
    assert layers[0] is layers[1] and list(layers[0].values()) == [recorder] and layers[2] is None
    same(grads(stages[0]), grads(stages[1]))
    step(stages[2], ctx)
    fsdp2x.share_comm_ctx(stages)
    assert stages[2]._get_fsdp_state().comms.layers is layers[0]
    step(stages[2], ctx)


@distributed(world_sizes=(2,))
def test_the_hook_has_a_stream(ctx):
    """The user's stream waits for the reduction, is current in the hook, and is waited for."""
    only_fsdp2x(ctx)
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

    model = shard(ctx, wide(), STACK_UNITS, transport="streams")
    model.blocks[0].set_all_reduce_hook(lambda rows: seen.append("hook"), stream=Stream("theirs"))
    with streams.mock.patch.object(torch.accelerator, "current_stream", lambda device: Stream("reduce")):
        step(model, ctx)
    assert seen == ["theirs waits for reduce", "begin", "hook", "end", "reduce waits for theirs"]
