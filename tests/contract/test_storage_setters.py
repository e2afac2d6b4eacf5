"""`set_keep_unsharded_storage` and `set_separate_reduce_scatter_group`: results of stock, and what they promise."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import both_transports, grads, only_fsdp2x, same, shard, shard_stock

NAMES = ("reduce_scatter_single", "reduce_scatter_tensor")


def step(model, ctx, number=0):
    model(inputs(ctx.rank, number)).square().mean().backward()


@distributed(world_sizes=(2, 3))
@both_transports
@pytest.mark.parametrize("reshard", [True, False])
def test_kept_storage_stays_where_it_is(ctx, transport, reshard):
    only_fsdp2x(ctx)
    import fsdp2x

    model = shard(ctx, Stack(), STACK_UNITS, transport=transport, reshard_after_forward=reshard)
    expected = shard(ctx, Stack(), STACK_UNITS, transport=transport, reshard_after_forward=reshard)
    model.set_keep_unsharded_storage(True)
    seen = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, args: seen.append(block.up.weight.data_ptr()))
    for number in range(3):
        for each in (model, expected):
            step(each, ctx, number)
    pointers = [seen[i : i + len(model.blocks)] for i in range(0, len(seen), len(model.blocks))]
    assert len(pointers) == 3 and pointers[0] == pointers[1] == pointers[2]
    assert len(set(pointers[0])) == len(model.blocks), "every unit has a place of its own"
    same(grads(model), grads(expected), "gradients", rtol=0, atol=0)
    kept = fsdp2x.describe(model).stats
    # Over shared memory a unit in its own dtype has such a place anyway.
    assert kept["gather_slots_owned"] == (0 if transport == "shm" else len(STACK_UNITS) + 1), kept
    model.set_keep_unsharded_storage(False)
    step(model, ctx, 3)
    assert fsdp2x.describe(model).stats["gather_slots_owned"] == 0


@distributed(world_sizes=(4,))
def test_kept_storage_and_a_smaller_world(ctx):
    only_fsdp2x(ctx)
    model = shard(ctx, Stack(), STACK_UNITS, reshard_after_forward=2)
    with pytest.raises(NotImplementedError, match="set_keep_unsharded_storage.*2 ranks"):
        model.set_keep_unsharded_storage(True)
    model.set_keep_unsharded_storage(False)
    step(model, ctx)


def groups_of_reductions(run) -> set:
    """The process groups over which `run` reduces."""
    found = set()
    with contextlib.ExitStack() as stack:
        for name in NAMES:
            if (original := getattr(dist, name, None)) is not None:

                def recorded(*args, original=original, group=None, **kwargs):
                    found.add(group)
                    return original(*args, group=group, **kwargs)

                stack.enter_context(mock.patch.object(dist, name, recorded))
        run()
    return found


@distributed(world_sizes=(2, 3, 4))
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.each_world
def test_a_group_for_reductions(ctx, early):
    only_fsdp2x(ctx)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp")) if ctx.world == 4 else None
    options = {"mesh": mesh} if mesh is not None else {}
    model = shard(ctx, Stack(), STACK_UNITS, transport="process_group", **options)
    stock = shard_stock(Stack(), STACK_UNITS, **options)
    own = mesh["fsdp"].get_group() if mesh is not None else dist.group.WORLD
    if not early:
        (usual,) = groups_of_reductions(lambda: step(model, ctx))
        assert dist.get_process_group_ranks(usual) == dist.get_process_group_ranks(own)
        step(stock, ctx)
    model.set_separate_reduce_scatter_group()
    (separate,) = groups_of_reductions(lambda: step(model, ctx, 1))
    assert separate is not own and (early or separate is not usual)
    assert dist.get_process_group_ranks(separate) == dist.get_process_group_ranks(own)
    step(stock, ctx, 1)
    model.set_separate_reduce_scatter_group(False)
    (again,) = groups_of_reductions(lambda: step(model, ctx, 2))
    assert again is not separate and (early or again is usual)
    step(stock, ctx, 2)
    same(grads(model), grads(stock), "gradients", rtol=1e-6, atol=1e-6)


@distributed(world_sizes=(3,))
def test_ranks_that_would_not_find_each_other(ctx):
    """Torch names a group by the number of groups before it; ranks with unlike numbers would wait for a timeout."""
    only_fsdp2x(ctx)
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu")  # for which no group of reductions has been made yet
    model = shard(ctx, Stack(), STACK_UNITS, transport="process_group", mesh=mesh)
    if ctx.rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    with pytest.raises(RuntimeError, match=r"ranks \[0, 2\] have made .* \[0, 1, 2\]"):
        model.set_separate_reduce_scatter_group()
    if ctx.rank != 1:
        dist.new_group([ctx.rank], use_local_synchronization=True)
    model.set_separate_reduce_scatter_group()
    step(model, ctx)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("order", ["memory first", "group first", "on a child"])
def test_no_group_beside_memory_that_is_registered_with_another(ctx, order):
    only_fsdp2x(ctx)
    model = shard(ctx, Stack(), STACK_UNITS, transport="process_group")
    calls = [
        lambda: model.set_allocate_memory_from_process_group_for_comm(True),
        lambda: (model.blocks[0] if order == "on a child" else model).set_separate_reduce_scatter_group(),
    ]
    first, second = calls[::-1] if order == "group first" else calls
    first()
    with pytest.raises(ValueError, match="reduces over another process group"):
        second()
        step(model, ctx)
    if order == "memory first":
        model.set_allocate_memory_from_process_group_for_comm(False)
        second()
        step(model, ctx)


@distributed(world_sizes=(2,))
def test_not_while_a_step_runs(ctx):
    only_fsdp2x(ctx)
    model = shard(ctx, Stack(), STACK_UNITS)
    model.blocks[0].register_forward_hook(lambda *args: model.set_separate_reduce_scatter_group())
    with pytest.raises(RuntimeError, match="cannot be called during"):
        model(torch.randn(2, 6))
