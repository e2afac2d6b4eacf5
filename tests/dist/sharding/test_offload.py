"""CPU offload of shards and gradients with the device transport: values, copies, and waits between streams."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2x
import streams
from arrangements import optimizer_in_backward
from harness import distributed
from models import STACK_UNITS, inputs
from offloading import LOOSE, OFFLOAD, POLICIES, agree, expect, host_modes, loss_of, num_of
from reference import grads, mean_of_ranks, params, same, shard
from streams import WIDTH, Experts, wide


def pair(ctx, **options) -> tuple[nn.Module, nn.Module]:
    """The unsharded model and its offloaded twin."""
    reference = wide()
    options = {"transport": "streams", "offload_policy": OFFLOAD, **options}
    return reference, shard(ctx, copy.deepcopy(reference), STACK_UNITS, **options)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("policy", ["fp32", "bf16 sums"])
def test_one_copy_each_way(ctx, policy):
    """Each copy moves a complete flat buffer. If dtypes agree, gradients arrive in theirs without a host copy."""
    recorder = streams.install()
    _, model = pair(ctx, mp_policy=POLICIES[policy], reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_allocations, before = [], (0, 0)
    for step in range(4):
        recorder.clear()
        loss_of(model, ctx.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        stats = model._get_fsdp_state().root.stats()
        now = stats["transport_allocations"], stats["gradient_block_allocations"]
        num_allocations.append((now[0] - before[0], now[1] - before[1]))
        before = now
    entries = recorder.entries
    num_gathers = sum(entry[0] == "all_gather" for entry in entries)
    assert num_of(entries, "transfer", "copy_in") == num_gathers == 8  # three blocks and the root, twice
    assert num_of(entries, "transfer", "copy_out") == 4
    shards = {
        unit.name: group.pool
        for state in model._get_fsdp_state().shared.tree
        for group in state.groups
        for unit in (state.unit,)
    }
    uploads = [entry[3][0] for entry in entries if entry[:2] == ("transfer", "copy_in")]
    assert {address for address, _ in uploads} == {pool.data_ptr() for pool in shards.values()}
    assert {size for _, size in uploads} == {pool.nbytes for pool in shards.values()}
    landed = [entry[0] for entry in entries if entry[0].startswith("land")]
    assert landed == ["land in place" if policy == "fp32" else "land by copy"] * 4
    # The device's memory comes and goes, blocks of the host stay.
    assert num_allocations[-1] == num_allocations[-2] and num_allocations[-1][1] == 0
    assert stats["gather_slots_owned"] == stats["scratch_slots_owned"] == 0, stats["owners"]


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("accumulate", ["no_sync", "no_all_reduce", "sync"])
def test_replicas_and_accumulation(ctx, accumulate):
    recorder = streams.install()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reference, model = pair(ctx, mesh=mesh, mp_policy=POLICIES["bf16"])
    for round_ in range(2):
        expected: dict = {}
        for number, is_last in ((0, False), (1, False), (2, True)):
            if accumulate == "no_sync":
                model.set_requires_gradient_sync(is_last)
            if accumulate == "no_all_reduce":
                model.set_requires_all_reduce(is_last)
            number += 10 * round_
            loss_of(model, ctx.rank, number).backward()
            expect(reference, ctx, number)
            for name, grad in grads(reference).items():
                expected[name] = grad + expected.get(name, 0)
        same(grads(model), expected, "gradients", **LOOSE)
        model.zero_grad()
    assert num_of(recorder.entries, "transfer", "copy_out") == (24 if accumulate == "sync" else 8)
    assert streams.races(recorder.entries) == []


@distributed(world_sizes=(2,))
@host_modes
def test_a_gradient_that_somebody_keeps(ctx, offload):
    streams.install()
    reference, model = pair(ctx, offload_policy=offload)
    loss_of(model, ctx.rank, 0).backward()
    kept = {name: param.grad for name, param in model.named_parameters()}
    before = {name: grad.to_local().clone() for name, grad in kept.items()}
    model.zero_grad()
    expect(reference, ctx, 1)
    loss_of(model, ctx.rank, 1).backward()
    same({name: grad.to_local() for name, grad in kept.items()}, before, "gradients of the step before")
    same(grads(model), grads(reference), "gradients", rtol=1e-4, atol=1e-6)


@distributed(world_sizes=(2,))
@host_modes
def test_missing_gradients_and_frozen_parameters(ctx, offload):
    recorder = streams.install()
    reference, model = Experts(), Experts()
    for one in (reference, model):
        one.experts[0].bias.requires_grad_(False)
    shard(ctx, model, transport="streams", offload_policy=offload)
    for chosen in ((0, 1), (1, 1)):
        mean_of_ranks(
            reference, lambda m, rank, c=chosen: m(inputs(rank, width=WIDTH), c[rank]).square().mean(), ctx.world
        )
        model.zero_grad()
        model(inputs(ctx.rank, width=WIDTH), chosen[ctx.rank]).square().mean().backward()
        same(grads(model), grads(reference), "gradients", rtol=1e-5, atol=1e-6)
    assert streams.races(recorder.entries) == []


@distributed(world_sizes=(2,))
@host_modes
def test_optimizer_in_backward_runs_while_the_device_goes_on(ctx, offload):
    recorder = streams.install()
    names = [f"blocks.{i}" for i in range(6)]
    reference = wide(6)
    model = shard(ctx, copy.deepcopy(reference), names, transport="streams", offload_policy=offload)
    optimizer_in_backward(model, lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        recorder.clear()
        expect(reference, ctx, step)
        plain.step()
        loss_of(model, ctx.rank, step).backward()
    same(params(model), params(reference), "parameters", rtol=1e-4, atol=1e-6)
    entries = recorder.entries
    assert streams.races(entries) == []
    order = [entry[0].split()[0] for entry in entries if entry[0].startswith(("land", "reduce_scatter"))]
    assert "reduce_scatter" in order[order.index("land") :], "gradients land before backward ends"


@distributed(world_sizes=(4,))
@host_modes
def test_rows_kept_in_a_smaller_world(ctx, offload):
    recorder = streams.install(pack_below_bytes=1200)
    reference, model = pair(ctx, reshard_after_forward=2, offload_policy=offload)
    for step in range(2):
        agree(ctx, reference, model, step)
        model.zero_grad()
    assert streams.races(recorder.entries) == []
    # Backward gathers from the device.
    assert num_of(recorder.entries, "transfer", "copy_in") < num_of(recorder.entries, "all_gather", "gather")


@distributed(world_sizes=(2,))
@host_modes
def test_an_exception_leaves_nothing_owned(ctx, offload):
    recorder = streams.install()
    reference, model = pair(ctx, offload_policy=offload)
    loss_of(model, ctx.rank, 0).backward()
    model.zero_grad()

    def fail(*_):
        raise ValueError("on purpose")

    handle = model.blocks[0].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(model, ctx.rank, 0).backward()
    handle.remove()
    model.reset_iter_state()
    stats = model._get_fsdp_state().root.stats()
    assert stats["gather_slots_owned"] == stats["scratch_slots_owned"] == 0, stats["owners"]
    model.zero_grad()
    for step in range(2):
        agree(ctx, reference, model, step)
        model.zero_grad()
    assert streams.races(recorder.entries) == []


@distributed(world_sizes=(2,))
@host_modes
def test_what_cannot_be_offloaded(ctx, offload):
    streams.install()
    model = wide(2)
    for block in model.blocks:
        fsdp2x.fully_shard(block, auto_wrap=False, transport="process_group", offload_policy=offload)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    fsdp2x.fully_shard(model, auto_wrap=False, transport="process_group", offload_policy=offload)
    with pytest.raises(NotImplementedError, match=r"weight' is tied.*OffloadPolicy\(\)"):
        loss_of(model, ctx.rank, 0)
