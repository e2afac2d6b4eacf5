"""Collectives per step over the process group, counted by CommDebugMode: as many as stock on the same model, or fewer.

Equal unless a test says otherwise, and then it says why. Over shared memory there are none to be counted.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import grads, same, shard, shard_stock

KINDS = {
    "all_gather": ("all_gather", "allgather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_reduce": ("all_reduce", "allreduce"),
}
# (gradient sync, all-reduce) of the micro-batches of one optimizer step.
ACCUMULATIONS = {
    "each": ((True, True),) * 2,
    "last": ((False, False), (False, False), (True, True)),
    "scatter_only": ((True, False), (True, False), (True, True)),
}
OFF = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0, "other": 0}


def count(run: Callable[[], object]) -> dict[str, int]:
    """Collectives by kind; what is none of the three, a broadcast for example, as "other"."""
    with CommDebugMode() as comm:
        run()
    found = dict(OFF)
    for op, num in comm.get_comm_counts().items():
        kind = next((kind for kind, names in KINDS.items() if any(name in str(op) for name in names)), "other")
        found[kind] += num
    return found


def step(model: nn.Module, ctx, number: int, width: int) -> None:
    model(inputs(ctx.rank, number, width=width)).float().square().mean().backward()


def counts_of(ctx, model: nn.Module, micro=((True, True),) * 3, width: int = 6) -> list[dict[str, int]]:
    """Per micro-batch, the first one with its lazy initialization included."""
    found = []
    for number, (sync, all_reduce) in enumerate(micro):
        model.set_requires_gradient_sync(sync)
        model.set_requires_all_reduce(all_reduce)
        found.append(count(functools.partial(step, model, ctx, number, width)))
    return found


def both(ctx, make: Callable[[], nn.Module], units, run: Callable, **options) -> tuple[list, list]:
    """Returns `run`'s counts on fsdp2x and on FSDP2. Gradients must be equal, or the counts would mean nothing."""
    results = []
    for apply in (functools.partial(shard, ctx, transport="process_group"), shard_stock):
        model = apply(make(), units, **options)
        found = run(model)
        results.append((found, grads(model)))
    (ours, got), (stock, expected) = results
    same(got, expected, "gradients", rtol=1e-5, atol=1e-6)
    return ours, stock


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("how", ACCUMULATIONS)
@pytest.mark.parametrize(
    ("mesh", "reshard"), [(1, True), (1, False), (1, None), (1, 2), (2, True), (2, False), (2, None)]
)
def test_steps_and_accumulation(ctx, mesh, reshard, how):
    """In a mesh of two axes two ranks are the whole shard axis."""
    shape, names = ((4,), None) if mesh == 1 else ((2, 2), ("replicate", "shard"))
    options = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names), "reshard_after_forward": reshard}
    num_gathers = {True: 8, False: 4, None: 7, 2: 8}[reshard]
    micro = ACCUMULATIONS[how]
    ours, stock = both(ctx, Stack, STACK_UNITS, lambda model: counts_of(ctx, model, micro), **options)
    assert ours == stock
    for (sync, all_reduce), found in zip(micro, ours, strict=True):
        reduces = 4 if sync and all_reduce and mesh == 2 else 0
        assert found == {**OFF, "all_gather": num_gathers, "reduce_scatter": 4 * sync, "all_reduce": reduces}


def frozen() -> Stack:
    """A unit without a trainable parameter, and one of which a part is frozen."""
    model = Stack()
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    return model


@distributed(world_sizes=(2,))
def test_evaluation_gives_memory_back(ctx):
    def run(model):
        with torch.no_grad():
            found = [count(lambda: model(inputs(ctx.rank))) for _ in range(2)]
        model.eval()
        return [*found, count(lambda: model(inputs(ctx.rank))), *counts_of(ctx, model)]

    ours, stock = both(ctx, Stack, STACK_UNITS, run)
    # Upstream's root keeps its parameters after the first forward, of which no backward frees them; ours frees them.
    assert [found["all_gather"] for found in stock[:3]] == [4, 3, 3]
    assert [found["all_gather"] for found in ours[:3]] == [4, 4, 4]


class Checkpointed(Stack):
    """Every block is recomputed in backward, from outside of the unit."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        x = x.requires_grad_() if self.reentrant else x
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Model, options, reductions of a step.
CASES = {
    "mixed precision": (Stack, {"mp_policy": MIXED}, 4),
    "frozen units": (frozen, {}, 3),
    "checkpoints outside the units": (lambda: Checkpointed(False), {}, 4),
    "reentrant ones": (lambda: Checkpointed(True), {}, 4),
}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("case", CASES)
def test_as_many_as_stock(ctx, case):
    make, options, num_reductions = CASES[case]
    ours, stock = both(ctx, make, STACK_UNITS, lambda model: counts_of(ctx, model), **options)
    assert ours == stock
    assert all(found["reduce_scatter"] == num_reductions for found in ours)


class Alternating(Stack):
    """Another order of units in each forward: what was recorded last time does not come."""

    def forward(self, x):
        self.number = getattr(self, "number", -1) + 1
        order = ((0, 1, 2), (0, 2, 1), (1, 2), (0, 1, 2), (2, 1, 0))[self.number % 5]
        for index in order:
            x = self.blocks[index](x)
        return self.head(self.norm(x))


@distributed(world_sizes=(2,))
def test_an_order_that_changes(ctx):
    ours, stock = both(ctx, Alternating, STACK_UNITS, lambda model: counts_of(ctx, model, ((True, True),) * 6))
    for mine, theirs in zip(ours, stock, strict=True):
        assert all(mine[kind] <= theirs[kind] for kind in OFF), (ours, stock)


class FirstIsTable(Stack):
    """The backward of the first block does not read its weight."""

    def __init__(self):
        super().__init__()
        self.blocks[0] = nn.Linear(6, 6)


@distributed(world_sizes=(2,))
def test_settings_that_save_collectives(ctx):
    def run(model):
        model.set_reshard_after_backward(False)
        found = counts_of(ctx, model)
        model.set_reshard_after_backward(True)
        model.blocks[0].set_unshard_in_backward(False)
        model.set_reshard_after_forward(False, recurse=False)
        model.blocks[1].set_reshard_after_forward(False)
        return found + counts_of(ctx, model)

    ours, stock = both(ctx, FirstIsTable, STACK_UNITS, run)
    assert ours == stock
    assert [found["all_gather"] for found in ours[:3]] == [7, 3, 3]  # the root's; forward frees the others anyway


@distributed(world_sizes=(2,))
def test_explicit_prefetch_adds_none(ctx):
    def run(model):
        first, second, third = model.blocks
        model.set_modules_to_forward_prefetch([first, second])
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])
        return counts_of(ctx, model)

    ours, stock = both(ctx, Stack, STACK_UNITS, run)
    assert ours == stock


@distributed(world_sizes=(2,))
def test_shared_memory_has_no_collectives(ctx):
    """Except the exchange of who runs where, once, which is not a part of a step and is hidden from the count."""
    model = shard(ctx, Stack(), STACK_UNITS, transport="shm")
    if ctx.impl == "torch":
        pytest.skip("stock has no shared memory")
    assert counts_of(ctx, model) == [OFF] * 3
