"""Exceptions in forward and backward, and what is left of a model: the slot ledger, file descriptors, memory."""

import contextlib
import gc
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import both_transports, same, shard, shard_stock
from user_collectives import UserGather, UserScatter


def step(ctx, model, number):
    loss = model(inputs(ctx.rank, number)).square().mean()
    loss.backward()
    return loss.detach()


def stats(model):
    return fsdp2x.describe(model).stats


@distributed(world_sizes=(2,))
def test_the_interpreter_is_entered_for_parameter_stores_only(ctx):
    """Counted by the engine over steady steps; without user hooks nothing else may cross."""
    model = shard(ctx, Stack(), STACK_UNITS, transport="shm")
    for number in range(3):
        step(ctx, model, number)
        model.zero_grad()
    before = stats(model)
    for number in range(4):
        step(ctx, model, number)
    after = stats(model)
    stores = after["parameter_stores"] - before["parameter_stores"]
    gathers = after["gathers"] - before["gathers"]
    # 16 parameters, gathered and freed once in forward and once in backward; the root's four only once.
    assert stores == 4 * (2 * 2 * 12 + 2 * 4), stores
    assert gathers == 4 * (2 * 3 + 1), gathers
    assert after["reductions"] - before["reductions"] == 4 * 4
    assert after["python_calls"] == before["python_calls"]


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("transport", ["process_group", "streams"])
def test_a_gather_that_raises_gives_its_memory_back(ctx, transport):
    """Losses, slots and the most memory are those of a model whose gathers never raised."""

    def run(num_failures):
        model = shard(ctx, Stack(), STACK_UNITS, transport=transport)
        gather = UserGather()
        model.blocks[1].set_custom_all_gather(gather)
        losses = [step(ctx, model, 0)]
        for _ in range(num_failures):
            gather.raises = True
            with pytest.raises(RuntimeError, match="refused"):
                model(inputs(ctx.rank, 0))
            gather.raises = False
        losses += [step(ctx, model, number) for number in (1, 2)]
        found = stats(model)
        kept = ("scratch_bytes", "gather_slot_bytes", "peak_gather_bytes", "gather_slots_owned")
        return losses, [found[name] for name in kept]

    same(run(3), run(0))


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("transport", ["process_group", "streams"])
@pytest.mark.parametrize("policy", [None, fsdp2x.MixedPrecisionPolicy(reduce_dtype=torch.float64)])
def test_custom_collectives_work_in_their_own_memory(ctx, transport, policy):
    """Losses and parameters are those of a model with the transport's own collectives."""

    def run(collectives):
        options = {} if policy is None else {"mp_policy": policy}
        model = shard(ctx, Stack(), STACK_UNITS, transport=transport, **options)
        if collectives:
            for module in (model, *model.blocks):
                module.set_custom_all_gather(collectives[0])
                module.set_custom_reduce_scatter(collectives[1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for number in range(3):
            losses.append(step(ctx, model, number))
            optimizer.step()
            optimizer.zero_grad()
        return losses, [param.to_local() for param in model.parameters()]

    collectives = UserGather(), UserScatter()
    same(run(collectives), run(()))
    for one in collectives:
        assert one.used and all(one.used), one


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("transport", ["process_group", "streams"])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_memory_of_a_custom_collective_is_checked(ctx, transport, kind):
    """The next step trains, because the failed one left nothing behind."""
    model = shard(ctx, Stack(), STACK_UNITS, transport=transport)
    comm = UserGather() if kind == "all_gather" else UserScatter()
    getattr(model.blocks[0], f"set_custom_{kind}")(comm)
    good = comm.allocate
    bad = {
        "None": lambda size, **of: None,
        "float64": lambda size, *, dtype, device: torch.empty(size, dtype=torch.float64, device=device),
        r"shape \(1,\)": lambda size, **of: torch.empty(1, **of),
        r"strides \(2,\)": lambda size, **of: torch.empty(2 * size[0], **of)[::2],
    }
    for found, allocate in bad.items():
        comm.allocate = allocate
        with pytest.raises(ValueError, match=rf"set_custom_{kind}: allocate .*{found}"):
            step(ctx, model, 0)
        comm.allocate = good
        model.zero_grad()
        step(ctx, model, 1)


def mapped_bytes():
    lines = [line.split() for line in open("/proc/self/maps") if "memfd" in line]
    return sum(int(a, 16) - int(b, 16) for b, a in (line[0].split("-") for line in lines))


@distributed(world_sizes=(2,), fresh=True)
@pytest.mark.parametrize("raises", [True, False])
@both_transports
def test_nothing_is_left_after_del_model(ctx, transport, raises):
    """After the sixth model as many files, mappings, and threads as after the second one.

    Also if a backward of each raises, with or without posted reductions. Otherwise without the garbage collector. Every
    second model has a group of its own, which is destroyed.
    """
    counts = []
    gc.collect()
    gc.enable() if raises else gc.disable()
    for number in range(6):
        group = dist.new_group() if number % 2 else dist.group.WORLD
        mesh = DeviceMesh.from_group(group, "cpu")
        model = shard(ctx, Stack(), STACK_UNITS, mesh=mesh, transport=transport)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i in range(2):
            step(ctx, model, i)
            optimizer.step()
        if raises:
            model.blocks[number % 2].register_full_backward_pre_hook(lambda *_: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                step(ctx, model, 2)
        parameter = weakref.ref(model.head.weight)
        del model, optimizer, mesh
        if raises:
            gc.collect()
        assert parameter() is None, f"model {number} is alive"
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
        del group
        gc.collect()
        dist.barrier()
        counts.append((len(os.listdir("/proc/self/fd")), mapped_bytes(), len(os.listdir("/proc/self/task"))))
    assert len(set(counts[2:])) == 1, counts


@distributed(world_sizes=(2,))
def test_deleting_a_model_between_forward_and_backward(ctx):
    """The graph keeps the units alive as long as it needs them."""

    def run_with(apply):
        model = apply(Stack())
        loss = model(inputs(ctx.rank)).square().mean()
        named = dict(model.named_parameters())
        del model
        gc.collect()
        loss.backward()
        return {name: None if param.grad is None else param.grad.full_tensor() for name, param in named.items()}

    try:
        expected = run_with(lambda m: shard_stock(m, STACK_UNITS))
    except (RuntimeError, AttributeError, ReferenceError) as error:
        expected = str(error)
    if isinstance(expected, str):
        pytest.skip(f"stock cannot do it: {expected}")
    same(run_with(lambda m: shard(ctx, m, STACK_UNITS)), expected)
