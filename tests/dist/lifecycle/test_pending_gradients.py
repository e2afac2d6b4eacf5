"""Gradients that wait for a reduction: what clears them, what shows them, what reduces them, and who is warned."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import both_transports, grads, mean_of_ranks, mesh_of, same, shard

CLOSE = {"rtol": 1e-5, "atol": 1e-7}
BOTH = "fsdp2x: optimizer.zero_grad() did not clear gradients"


class Outer(nn.Module):
    """A plain module around the sharded one."""

    def __init__(self):
        super().__init__()
        self.inner = Stack()

    def forward(self, x):
        return self.inner(x)


# zero_grad is called on these: the plain module around the root, the root, a unit, and plain modules in both.
WHO = ("", "inner", "inner.blocks.1", "inner.blocks.2.up", "inner.head", "inner.norm")


def loss_of(model, rank, number):
    return model(inputs(rank, number)).square().mean()


def held_back(ctx, model, number, before_last, scale=1.0):
    with fsdp2x.accumulate(model, last=False, before_last=before_last):
        (loss_of(model, ctx.rank, number) * scale).backward()


@distributed(world_sizes=(1, 2, 3, 4))
@pytest.mark.parametrize("before_last", ["nothing", "reduce_scatter"])
@both_transports
@pytest.mark.each_world
def test_zero_grad_of_any_module(ctx, transport, before_last):
    """It clears its gradients, whatever the earlier micro-batch communicated. The next sum has all other gradients."""
    mesh = mesh_of("2d" if ctx.world == 4 else "1d", ctx.world)
    for who, set_to_none in itertools.product(WHO, (True, False)):
        plain = Outer()
        ours = copy.deepcopy(plain)
        shard(ctx, ours.inner, STACK_UNITS, transport=transport, mesh=mesh)

        def good_loss(model, rank, who=who, set_to_none=set_to_none):
            loss_of(model, rank, 1).mul(1000).backward()
            model.get_submodule(who).zero_grad(set_to_none=set_to_none)
            return loss_of(model, rank, 2)

        mean_of_ranks(plain, good_loss, ctx.world)
        held_back(ctx, ours, 1, before_last, scale=1000)
        ours.get_submodule(who).zero_grad(set_to_none=set_to_none)
        loss_of(ours, ctx.rank, 2).backward()
        same(grads(ours), grads(plain), f"{who!r} {set_to_none}", rtol=1e-4, atol=1e-5)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("gathered", [False, True])
def test_zero_grad_while_gathered(ctx, gathered):
    """Also gradients that are reduced, of parameters that no module registers meanwhile."""
    model = shard(ctx, Stack(), STACK_UNITS)
    model.set_reshard_after_backward(not gathered)
    loss_of(model, ctx.rank, 0).backward()
    model.zero_grad()
    model.reshard()
    for block in model.blocks:
        block.reshard()
    assert all(param.grad is None for param in model.parameters())


@distributed(world_sizes=(1, 2, 3, 4))
@both_transports
@pytest.mark.each_pair
def test_pending_gradients_are_shown(ctx, transport):
    """Two micro-batches share one full, unreduced gradient. Writes to it are kept, and it is reduced once."""
    plain = Stack()
    ours = shard(ctx, copy.deepcopy(plain), STACK_UNITS, transport=transport)
    names = {param: name for name, param in ours.named_parameters()}
    assert ours.get_pending_gradients() == {}  # before the first forward
    expected = dict(plain.named_parameters())
    first = {}
    for number in (1, 2):
        loss_of(plain, ctx.rank, number).backward()
        held_back(ctx, ours, number, "nothing")
        found = ours.get_pending_gradients()
        assert list(found) == sorted(names, key=lambda param: names[param].startswith("blocks"))  # the root's first
        for param, (whole, rows) in found.items():
            assert rows is None and not isinstance(whole, DTensor)
            same(whole, expected[names[param]].grad, names[param], **CLOSE)
            assert first.setdefault(param, whole) is whole
        ours.reshard()
    assert set(ours.blocks[0].get_pending_gradients()) == set(ours.blocks[0].parameters())
    reductions = fsdp2x.describe(ours).stats["reductions"]
    for whole in first.values():
        whole.mul_(0.5)
    ours.set_gradient_divide_factor(4.0)
    ours.synchronize_gradients()
    mean_of_ranks(plain, lambda m, rank: (loss_of(m, rank, 1) + loss_of(m, rank, 2)) / 2, ctx.world)
    for name, param in plain.named_parameters():
        param.grad *= ctx.world / 4 if not name.startswith("blocks") else 1
    same(grads(ours), grads(plain), "gradients", **CLOSE)
    assert fsdp2x.describe(ours).stats["reductions"] == reductions + 4
    before = grads(ours)
    ours.synchronize_gradients()
    assert ours.get_pending_gradients() == {}
    same(grads(ours), before)
    held_back(ctx, ours, 1, "nothing")
    ours.blocks[1].synchronize_gradients()
    pending = ours.get_pending_gradients()
    assert {names[p] for p in pending} == {n for n in expected if not n.startswith("blocks.1")}
    assert {names[p] for p in ours.get_pending_gradients(recurse=False)} == {n for n in expected if "blocks" not in n}


@distributed(world_sizes=(4,))
@both_transports
def test_rows_that_wait_for_the_all_reduce(ctx, transport):
    plain = Stack()
    ours = shard(ctx, copy.deepcopy(plain), STACK_UNITS, transport=transport, mesh=mesh_of("2d", ctx.world))
    kept = {}
    for number in (1, 2):
        held_back(ctx, ours, number, "reduce_scatter")
        for param, (whole, rows) in ours.get_pending_gradients().items():
            assert whole is None and rows.shape == param.to_local().shape and rows.dtype == torch.float32
            assert transport == "streams" or kept.setdefault(param, rows) is rows
            if number == 2:
                rows.mul_(0.5)
    ours.synchronize_gradients()
    assert ours.get_pending_gradients() == {}
    mean_of_ranks(plain, lambda m, rank: (loss_of(m, rank, 1) + loss_of(m, rank, 2)) / 2, ctx.world)
    same(grads(ours), grads(plain), "gradients", **CLOSE)


@distributed(world_sizes=(2,))
@both_transports
def test_sums_are_shown_in_the_reduce_dtype(ctx, transport):
    """Reading the sums does not change a bit of the step's gradients."""
    results = []
    for looks in (False, True):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = shard(ctx, Stack(), STACK_UNITS, transport=transport, mp_policy=policy)
        for number in (1, 2):
            held_back(ctx, model, number, "nothing")
            if looks:
                assert {whole.dtype for whole, _ in model.get_pending_gradients().values()} == {torch.float32}
        loss_of(model, ctx.rank, 3).backward()
        results.append(grads(model))
    same(results[1], results[0], "gradients")


# Events between an unreduced micro-batch and the next forward or backward, and whether each one warns.
EVENTS = {
    "nothing": (False, lambda ctx, model, mine, other: None),
    "zero_grad": (True, lambda ctx, model, mine, other: mine.zero_grad()),
    "zero_grad to zeros": (True, lambda ctx, model, mine, other: mine.zero_grad(set_to_none=False)),
    "twice": (True, lambda ctx, model, mine, other: (mine.zero_grad(), mine.zero_grad())),
    "a step": (False, lambda ctx, model, mine, other: mine.step()),
    "another model's": (False, lambda ctx, model, mine, other: other.zero_grad()),
    "before the model's": (False, lambda ctx, model, mine, other: (mine.zero_grad(), model.zero_grad())),
    "behind the model's": (False, lambda ctx, model, mine, other: (model.zero_grad(), mine.zero_grad())),
    "and a reset": (False, lambda ctx, model, mine, other: (mine.zero_grad(), model.reset_iter_state())),
    "and a reduction": (False, lambda ctx, model, mine, other: (mine.zero_grad(), model.synchronize_gradients())),
    "after a reduction": (False, lambda ctx, model, mine, other: (model.synchronize_gradients(), mine.zero_grad())),
}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("forward_first", [False, True])
@both_transports
def test_an_optimizer_that_cannot_see_them(ctx, transport, forward_first):
    """Its zero_grad leaves them: the next forward or backward warns, once, and of nothing else."""
    for name, (warns, event) in EVENTS.items():
        model, another = (shard(ctx, Stack(), STACK_UNITS, transport=transport) for _ in range(2))
        mine, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, another))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(2):
                held_back(ctx, model, 2 * number, "nothing")
                loss = loss_of(model, ctx.rank, 2 * number + 1) if forward_first and "reset" not in name else None
                event(ctx, model, mine, other)
                loss = loss_of(model, ctx.rank, 2 * number + 1) if loss is None else loss
                loss.backward()
                mine.step()
                mine.zero_grad()
        texts = [str(warning.message) for warning in caught if BOTH in str(warning.message)]
        assert len(texts) == warns, (name, texts)
        assert not warns or ("model.zero_grad()" in texts[0] and "reset_iter_state()" in texts[0])
