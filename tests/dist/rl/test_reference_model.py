"""A second model that only infers: a forward without gradients leaves no parameter gathered."""

import pytest
import torch

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, batch, build, inputs
from reference import both_transports, grads, same, shard

MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


def states(model):
    return {unit.name: unit.param_state for unit in fsdp2x.describe(model).units}


def owned(model):
    return fsdp2x.describe(model).stats["gather_slots_owned"]


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize("mode", MODES)
@both_transports
def test_memory_returns(ctx, mode, transport):
    """The reference model runs next to a model that trains and keeps its root for backward, as FSDP2's does."""
    student, teacher = Stack(seed=1), Stack(seed=2)
    twin = shard(ctx, Stack(seed=1), STACK_UNITS, transport=transport)
    plain = Stack(seed=2)
    for model in (student, teacher):
        shard(ctx, model, STACK_UNITS, transport=transport)
    for number in range(3):
        x = inputs(ctx.rank, number)
        with MODES[mode]():
            target = teacher(x).clone()
        assert set(states(teacher).values()) == {"SHARDED"} and owned(teacher) == 0
        target = target.clone() if mode == "inference" else target
        with torch.no_grad():
            same(target, plain(x), rtol=1e-6, atol=1e-6)
        loss = (student(x) - target).square().mean()
        assert states(student)["<root>"] == "UNSHARDED"
        loss.backward()
        (twin(x) - target).square().mean().backward()
        same(grads(student), grads(twin))
        assert owned(student) == 0


@distributed(world_sizes=(2,))
@both_transports
def test_heads_that_a_plan_keeps_for_backward(ctx, transport):
    """A transformer split by its plan: its head stays gathered after a forward with gradients only."""
    model = fsdp2x.fully_shard(build("qwen3"), transport={"streams": "process_group"}.get(transport, transport))
    tokens = batch("qwen3", ctx.rank)
    with torch.no_grad():
        model(**tokens)
    assert set(states(model).values()) == {"SHARDED"}
    loss = model(**tokens).loss
    assert "UNSHARDED" in states(model).values()
    loss.backward()
    assert set(states(model).values()) == {"SHARDED"}


@distributed(world_sizes=(2,))
def test_what_was_asked_for_stays(ctx):
    """reshard_after_forward=False, by argument or setter, and `unsharded` keep the parameters in any case."""
    asked = shard(ctx, Stack(), STACK_UNITS, reshard_after_forward=False)
    told = shard(ctx, Stack(), STACK_UNITS)
    told(inputs(ctx.rank)).sum().backward()
    told.set_reshard_after_forward(False, recurse=False)
    inside = shard(ctx, Stack(), STACK_UNITS)
    with torch.no_grad():
        asked(inputs(ctx.rank))
        told(inputs(ctx.rank))
        assert set(states(asked).values()) == {"UNSHARDED"} and states(told)["<root>"] == "UNSHARDED"
        with fsdp2x.unsharded(inside):
            before = fsdp2x.describe(inside).stats["gathers"]
            for number in range(3):
                inside(inputs(ctx.rank, number))
            assert fsdp2x.describe(inside).stats["gathers"] == before
            assert set(states(inside).values()) == {"UNSHARDED"}
        assert set(states(inside).values()) == {"SHARDED"}
        inside(inputs(ctx.rank))
    assert set(states(inside).values()) == {"SHARDED"}
    inside(inputs(ctx.rank))
    assert states(inside)["<root>"] == "UNSHARDED"


@distributed(world_sizes=(2,))
def test_another_method_gathers_the_root_once(ctx):
    """A method that calls forward many times, as generate does."""

    class Generates(Stack):
        def generate(self, x):
            return sum(self(x) for _ in range(4))

    model = shard(ctx, Generates(), STACK_UNITS)
    fsdp2x.register_fsdp_forward_method(model, "generate")
    with torch.no_grad():
        model(inputs(ctx.rank))
        before = fsdp2x.describe(model).stats["gathers"]
        got = model.generate(inputs(ctx.rank))
        assert fsdp2x.describe(model).stats["gathers"] - before == 1 + 4 * 3
        assert set(states(model).values()) == {"SHARDED"}
        same(got, 4 * model(inputs(ctx.rank)), rtol=1e-6, atol=1e-6)


@distributed(world_sizes=(2,))
def test_an_optimizer_step_behind_an_evaluation(ctx):
    """Weights that were gathered for it are not used by the next forward."""

    def run(evaluates):
        model = shard(ctx, Stack(), STACK_UNITS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for number in range(3):
            loss = model(inputs(ctx.rank, number)).square().mean()
            loss.backward()
            if evaluates:
                with torch.no_grad():
                    model(inputs(ctx.rank, 9))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    same(run(evaluates=True), run(evaluates=False))
