"""Exceptions at every place of a step: ranks continue, and no gradient is silently lost or doubled."""

import contextlib

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import both_transports, grads, same, shard
from user_collectives import UserScatter


class Planned(Exception):
    pass


def fail(*args):
    raise Planned


class Places(Stack):
    """Raises at `place`, one of `FORWARD` and `BACKWARD`, `times` times."""

    place = ""
    times = 0

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if self.place.startswith(("recompute", "checkpoint")) and i == 1:
                x = checkpoint(block, x.requires_grad_(), use_reentrant=self.place.endswith("reentrant"))
            else:
                x = block(x)
        return self.head(self.norm(x))

    def strike(self, place):
        if self.place == place and self.times:
            self.times -= 1
            raise KeyboardInterrupt if place == "interrupt" else Planned


def plan(model, place, times=1):
    """Arms `place`; the hooks stay, and do nothing once they have raised `times` times."""
    model.place, model.times = place, times
    block = model.blocks[1]

    def strike(*args):
        model.strike(place)

    def on_gradient(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda grad: strike())

    match place:
        case "root pre":
            model.register_forward_pre_hook(strike)
        case "unit pre":
            block.register_forward_pre_hook(strike)
        case "unit pre, first":
            block.register_forward_pre_hook(strike, prepend=True)
        case "inside a unit" | "interrupt" | "checkpoint" | "checkpoint, reentrant":
            block.up.register_forward_pre_hook(strike)
        case "unit post":
            block.register_forward_hook(strike)
        case "unit post, first":
            block.register_forward_hook(strike, prepend=True)
        case "root end":
            model.head.register_forward_hook(strike)
        case "root post":
            model.register_forward_hook(strike)
        case "first gradient":
            model.register_forward_hook(on_gradient)
        case "between units":
            block.register_forward_hook(on_gradient)
        case "last unit":
            model.blocks[0].up.register_forward_hook(on_gradient)
        case "module hook":
            block.up.register_full_backward_hook(strike)
        case "post accumulate":
            block.up.weight.register_post_accumulate_grad_hook(strike)
        case "root's post accumulate":
            model.head.weight.register_post_accumulate_grad_hook(strike)
        case "recompute" | "recompute, reentrant":
            block.up.register_forward_pre_hook(
                lambda *args: strike() if torch._C._current_graph_task_id() != -1 else None
            )
        case "":
            pass
        case _:
            raise AssertionError(place)


FORWARD = (
    *("root pre", "unit pre", "unit pre, first", "inside a unit", "interrupt", "unit post", "unit post, first"),
    *("root end", "root post", "checkpoint", "checkpoint, reentrant"),
)
BACKWARD = ("first gradient", "between units", "last unit", "module hook", "recompute", "recompute, reentrant")
BEHIND_GRADIENTS = ("post accumulate", "root's post accumulate")
RAISED = (Planned, KeyboardInterrupt)


def loss_of(ctx, model, number):
    return model(inputs(ctx.rank, number)).square().mean()


def make(ctx, transport, mode="sync"):
    options = {}
    if mode == "reduce_scatter":
        options["mesh"] = init_device_mesh("cpu", (2, ctx.world // 2), mesh_dim_names=("replicate", "shard"))
    model = shard(ctx, Places(), STACK_UNITS, transport=transport, **options)
    if mode == "manual":
        model.set_manual_backward_finalization(True)
    return model


def micro_batch(ctx, model, number, mode, last):
    if mode in ("nothing", "shown", "reduce_scatter"):
        scope = fsdp2x.accumulate(model, last=last, before_last="nothing" if mode == "shown" else mode)
    else:
        scope = contextlib.nullcontext()
    with scope:
        loss_of(ctx, model, number).backward()
    if mode == "manual" and last:
        model.finalize_backward()
    if mode == "shown":
        model.get_pending_gradients()


def is_clean(model, where):
    found = fsdp2x.describe(model).stats
    assert found["gather_slots_owned"] == 0 and found["scratch_slots_owned"] == 0, (where, found)
    assert all(unit.param_state == "SHARDED" for unit in fsdp2x.describe(model).units), where


MODES = ("sync", "nothing", "reduce_scatter", "manual")


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("waits", [False, True])
@both_transports
def test_a_failed_forward_is_as_if_it_had_not_been(ctx, mode, times, waits, transport):
    """Between two micro-batches, once and twice in a row, with and without a graph that waits for its backward."""
    model = make(ctx, transport, mode)
    for number in range(2):
        micro_batch(ctx, model, number, mode, last=number == 1)
    expected = grads(model)
    for place in FORWARD:
        model = make(ctx, transport, mode)
        micro_batch(ctx, model, 0, mode, last=False)
        waiting = loss_of(ctx, model, 1) if waits else None
        plan(model, place, times)
        for _ in range(times):
            with pytest.raises(RAISED):
                loss_of(ctx, model, 2)
        model.place = ""
        if waits:
            waiting.backward()
            if mode == "manual":
                model.finalize_backward()
        else:
            micro_batch(ctx, model, 1, mode, last=True)
        same(grads(model), expected, place)
        is_clean(model, place)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("waits", [False, True])
@both_transports
@pytest.mark.each_pair
def test_a_failed_backward_leaves_nothing_behind(ctx, times, waits, transport):
    """The next step, after zero_grad, is that of a model that never failed; also when its graph was there before."""
    model = make(ctx, transport)
    loss_of(ctx, model, 0).backward()
    model.zero_grad()
    loss_of(ctx, model, 2).backward()
    expected = grads(model)
    for place in (*BACKWARD, *BEHIND_GRADIENTS):
        model = make(ctx, transport)
        loss_of(ctx, model, 0).backward()
        model.zero_grad()
        plan(model, place, times)
        failing = [loss_of(ctx, model, 1) for _ in range(times)]
        following = loss_of(ctx, model, 2) if waits else None
        for loss in failing:
            with pytest.raises(RAISED):
                loss.backward()
            model.zero_grad()
        if not waits:
            following = loss_of(ctx, model, 2)
        following.backward()
        same(grads(model), expected, place)
        del failing, following, loss
        loss_of(ctx, model, 3).backward()
        is_clean(model, place)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("mode", ["nothing", "shown", "reduce_scatter", "manual"])
@both_transports
def test_a_failed_backward_keeps_earlier_gradients_or_says_that_they_are_lost(ctx, mode, transport):
    model = make(ctx, transport, mode)
    micro_batch(ctx, model, 0, mode, last=False)
    micro_batch(ctx, model, 2, mode, last=True)
    expected = grads(model)
    kept = []
    for place in BACKWARD:
        model = make(ctx, transport, mode)
        micro_batch(ctx, model, 0, mode, last=False)
        plan(model, place)
        with pytest.raises(RAISED):
            micro_batch(ctx, model, 1, mode, last=False)
        try:
            micro_batch(ctx, model, 2, mode, last=True)
        except RuntimeError as error:
            assert "reset_iter_state()" in str(error) and "begin the step again" in str(error)
            with pytest.raises(RuntimeError, match="reset_iter_state"):
                loss_of(ctx, model, 2)
            with torch.no_grad():
                loss_of(ctx, model, 2)
            model.reset_iter_state()
            micro_batch(ctx, model, 0, mode, last=False)
            micro_batch(ctx, model, 2, mode, last=True)
        else:
            kept.append(place)
        same(grads(model), expected, place)
        is_clean(model, place)
    assert "first gradient" in kept and "last unit" not in kept


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("mode", ["synchronize", "manual"])
def test_a_reduction_that_fails_outside_of_backward_leaves_no_gradient(ctx, mode):
    """Its gradients are lost, which the next step says."""
    model = shard(ctx, Stack(), STACK_UNITS, transport="process_group")
    model.set_manual_backward_finalization(mode == "manual")
    scatter = UserScatter()
    model.blocks[1].set_custom_reduce_scatter(scatter)

    def step():
        model.zero_grad()
        model.set_requires_gradient_sync(mode == "manual")
        loss_of(ctx, model, 0).backward()
        if mode == "manual":
            return model.finalize_backward()
        model.set_requires_gradient_sync(True)
        model.synchronize_gradients()

    step()
    expected = grads(model)
    scatter.raises = True
    with pytest.raises(RuntimeError, match="refused"):
        step()
    with pytest.raises(RuntimeError, match="reset_iter_state"):
        step()
    model.reset_iter_state()
    step()
    same(grads(model), expected)
    is_clean(model, mode)


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("mode", ["sync", "nothing", "manual"])
@both_transports
def test_a_hook_behind_a_gradient_raises_when_all_gradients_are_there(ctx, mode, transport):
    """On all ranks, or on one, which takes no other with it. Gradients arrive at any moment: a rank that raised at once
    would have posted other reductions than its peers."""
    expected = make(ctx, transport, mode)
    for number in range(4):
        micro_batch(ctx, expected, number, mode, last=number > 0)
    for place in BEHIND_GRADIENTS:
        for victims in (set(range(ctx.world)), {ctx.world - 1}):
            model = make(ctx, transport, mode)
            micro_batch(ctx, model, 0, mode, last=False)
            plan(model, place if ctx.rank in victims else "", times=2)
            for number in (1, 2):
                with pytest.raises(Planned) if ctx.rank in victims else contextlib.nullcontext():
                    micro_batch(ctx, model, number, mode, last=True)
            micro_batch(ctx, model, 3, mode, last=True)
            same(grads(model), grads(expected), f"{place}, {victims}")
            is_clean(model, place)


class Silent(Stack):
    """Keeps its output, and returns None."""

    def forward(self, x):
        self.output = super().forward(x)


@distributed(world_sizes=(2,))
@both_transports
def test_a_module_that_returns_none_while_an_exception_is_handled(ctx, transport):
    """It has not failed. One that raises that same exception has."""

    def step(model, number):
        assert model(inputs(ctx.rank, number)) is None
        model.output.square().mean().backward()

    model, twin = (shard(ctx, Silent(), STACK_UNITS, transport=transport) for _ in range(2))
    try:
        fail()
    except Planned as error:
        known = error
        for number in range(2):
            step(model, number)
        handle = model.head.register_forward_hook(lambda *_: fail_again(known))
        with pytest.raises(Planned):
            model(inputs(ctx.rank))
        handle.remove()
    is_clean(model, "raised again")
    for number in range(2):
        step(twin, number)
    same(grads(model), grads(twin))


def fail_again(error):
    raise error
