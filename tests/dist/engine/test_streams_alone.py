"""The device transport of one rank alone, played on the CPU: what it launches, and what it does without."""

import copy

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2x
import streams
from arrangements import optimizer_in_backward
from device_reference import Operations
from harness import distributed
from models import STACK_UNITS, Branches, inputs
from reference import full, only_fsdp2x, same, shard, shard_stock
from streams import WIDTH, Experts, record_of_steps, step, wide

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


@distributed(world_sizes=(1,))
@pytest.mark.parametrize("policy", POLICIES)
def test_a_unit_is_two_casts_and_a_pack(ctx, policy):
    """No flags, no reduction buffer, no pass from there to the gradients."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    model = shard(ctx, wide(), STACK_UNITS, transport="streams", mp_policy=POLICIES[policy])
    entries = record_of_steps(ctx, recorder, model, num=1)
    marks = (*streams.MARKS, "use", "optimizer")
    assert {entry[1] for entry in entries if entry[0] not in marks} == {"copy_in", "compute"}
    count = {name: sum(entry[0] == name for entry in entries) for name in {entry[0] for entry in entries} - {*marks}}
    # The root stays gathered between forward and backward.
    assert count == {"copy": 2 * len(STACK_UNITS) + 1, "pack": len(STACK_UNITS) + 1}
    report = fsdp2x.memory_report(model)
    assert report.scratch_bytes == report.measured["scratch_bytes"] == 0


@distributed(world_sizes=(1,))
@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_stocks(ctx, policy, with_kernels):
    """Written, added to, held by the user, foreign, and accumulated without gradient sync."""
    only_fsdp2x(ctx)
    streams.install(with_kernels=with_kernels)
    plain = wide()
    stock = shard_stock(copy.deepcopy(plain), STACK_UNITS, mp_policy=POLICIES[policy])
    ours = shard(ctx, plain, STACK_UNITS, transport="streams", mp_policy=POLICIES[policy])
    results = []
    for model in (stock, ours):
        found, held = [], []

        def note(model=model, found=found) -> None:
            found.append(full([param.grad for param in model.parameters()]))

        step(model, ctx, 0)
        note()
        step(model, ctx, 1)  # adds
        note()
        held = [param.grad for param in model.parameters()]
        model.zero_grad()
        step(model, ctx, 2)  # last step's gradients live on
        note()
        found.append([full(one) for one in held])
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        step(model, ctx, 3)
        note()
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        step(model, ctx, 4)
        model.set_requires_gradient_sync(True)
        step(model, ctx, 5)
        note()
        model.set_gradient_divide_factor(2.0)
        model.zero_grad()
        step(model, ctx, 6)
        note()
        results.append(found)
    same(results[1], results[0], "gradients")


@distributed(world_sizes=(1,))
def test_missing_gradients_are_known_without_asking(ctx):
    """No other rank could have one, so the host does not wait for the device to read flags."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    model = shard(ctx, Experts(), transport="streams")
    for number in range(3):
        model(inputs(ctx.rank, number, width=WIDTH), chosen=number).square().mean().backward()
        for i, expert in enumerate(model.experts):
            assert all((param.grad is None) == (i != number) for param in expert.parameters())
        model.zero_grad()
    assert not [entry for entry in recorder.entries if entry[2].endswith(".flags")]


@distributed(world_sizes=(1,))
def test_an_optimizer_in_backward(ctx):
    """A hook on a sharded parameter sees its complete gradient, on the stream on which it was packed."""
    only_fsdp2x(ctx)
    streams.install()
    plain = wide()
    stock = shard_stock(copy.deepcopy(plain), STACK_UNITS)
    ours = shard(ctx, plain, STACK_UNITS, transport="streams")
    results = []
    for model in (stock, ours):
        optimizer_in_backward(model, lr=0.1)
        for number in range(3):
            step(model, ctx, number)
        results.append(full(list(model.parameters())))
    same(results[1], results[0], "weights")


@distributed(world_sizes=(1,))
def test_memory_that_an_optimizer_in_backward_gave_back(ctx):
    """The next unit may take it on another lane: sums that are divided have one of their own."""
    only_fsdp2x(ctx)
    recorder = streams.install()
    model = shard(ctx, wide(4), [f"blocks.{i}" for i in range(4)], transport="streams")
    for number in (1, 3):
        model.blocks[number].set_gradient_divide_factor(2.0)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    entries = record_of_steps(ctx, recorder, model, num=2)
    assert {entry[1] for entry in entries if entry[0] in ("pack", "write_rows")} == {"compute", "reduce"}
    blocks = [{address for address, _ in entry[4]} for entry in entries if entry[0] in ("pack", "write_rows")]
    assert any(one & other for i, one in enumerate(blocks) for other in blocks[:i]), "no memory was used again"
    assert streams.races(entries) == []


@distributed(world_sizes=(1,))
@pytest.mark.parametrize("policy", POLICIES)
def test_plans_do_not_depend_on_which_gradients_there_are(ctx, policy):
    """Where each step lacks others, none builds a plan and takes its memory again."""
    only_fsdp2x(ctx)
    streams.install()
    model = shard(ctx, Branches(WIDTH), transport="streams", mp_policy=POLICIES[policy])

    def num_taken(chosen: tuple[int, ...]) -> int:
        loss = model(inputs(0, width=WIDTH), chosen).square().mean()
        with Operations() as operations:
            loss.backward()
        model.zero_grad()
        return operations.counts["empty"]

    num_taken((0, 1, 2, 3, 4))
    steps = ((0, 1, 2), (1, 2, 3), (2, 3, 4), (0, 1, 2), (0, 2, 4))
    counts = [num_taken(chosen) for chosen in steps]
    assert counts == counts[:1] * len(steps), counts
