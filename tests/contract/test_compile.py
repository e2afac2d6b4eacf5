"""torch.compile around and inside a sharded model: right numbers, hooks outside the graphs, nothing compiled twice."""

import functools
import tempfile

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy

from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import both_transports, grads, params, same, shard, shard_stock, skip_transport

# One graph for the first block, whose input needs no gradient, one for the others; linear, gelu, linear, add in each.
NUM_GRAPHS, NUM_CALLS = 2, 8
STEPS = 3


def compile_blocks(model: Stack, how: str, **options) -> Stack:
    """As torchtitan does it, in place ("method"), or with modules around the blocks ("wrapped")."""
    for index, block in enumerate(model.blocks):
        if how == "wrapped":
            model.blocks[index] = torch.compile(block, fullgraph=True, **options)
        else:
            block = model.blocks[index] = checkpoint_wrapper(block) if how == "checkpointed" else block
            block.compile(fullgraph=True, **options)
    return model


def steps(ctx, run, model: nn.Module) -> tuple[list, list[dict]]:
    """Losses, gradients and parameters of SGD steps on `model`, which `run` calls; what Dynamo had done after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results, seen = [], []
    for number in range(STEPS):
        loss = run(inputs(ctx.rank, number)).float().square().mean()
        loss.backward()
        results.append([loss.detach(), list(grads(model).values())])
        optimizer.step()
        optimizer.zero_grad()
        seen.append({**counters["stats"], "breaks": sum(counters["graph_break"].values())})
    return [results, list(params(model).values())], seen


def compiled(ctx, make, **options) -> tuple[list, list[dict]]:
    """`steps` on a model made, compiled and sharded by `make`; Dynamo forgets everything before and after."""
    torch._dynamo.reset()
    counters.clear()
    try:
        run, model = make()
        return steps(ctx, run, model)
    finally:
        torch._dynamo.reset()
        counters.clear()


def check_blocks(ctx, prepare, *, transport: str, after=False, exact=None, **options) -> list[dict]:
    """Ours with compiled blocks against ours without and against stock with. Returns what Dynamo did.

    after: they are compiled when they are sharded.
    """
    skip_transport(ctx, transport)

    def make(apply, compiles):
        model = prepare(Stack()) if compiles and not after else Stack()
        model = apply(model, STACK_UNITS, **options)
        model = prepare(model) if compiles and after else model
        return model, model

    ours = functools.partial(shard, ctx, transport=transport)
    got, seen = compiled(ctx, lambda: make(ours, True))
    plain, nothing = compiled(ctx, lambda: make(ours, False))
    expected, by_stock = compiled(ctx, lambda: make(shard_stock, True))
    tolerance = exact or {"rtol": 1e-5, "atol": 1e-6}
    same(got, plain, "compiled and not", **tolerance)
    same(got, expected, "ours and stock", **tolerance)
    assert "unique_graphs" not in nothing[-1]
    assert seen[-1]["unique_graphs"] == by_stock[-1]["unique_graphs"]
    return seen


def check_graphs(seen: list[dict], how: str = "method") -> None:
    """The blocks' own operations and no others were captured, all of them in the first step."""
    assert all(one == seen[0] for one in seen) and seen[0]["breaks"] == 0, seen
    if how != "checkpointed":
        assert seen[0]["unique_graphs"] == NUM_GRAPHS and seen[0]["calls_captured"] == NUM_CALLS, seen


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@distributed(world_sizes=(2,), timeout=120)
@pytest.mark.parametrize("how", ["method", "wrapped", "after", "checkpointed"])
@pytest.mark.parametrize("policy", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("reshard", [True, False])
@both_transports
def test_blocks_compiled(ctx, how, policy, reshard, transport):
    """Hooks cast a block's input. "checkpointed": in torchtitan's order, checkpointing, compiling, sharding."""
    prepare = functools.partial(compile_blocks, how=how, backend="aot_eager")
    options = {"reshard_after_forward": reshard, "after": how == "after"}
    if policy is not None:
        options |= {"mp_policy": policy, "exact": {"rtol": 2e-2, "atol": 1e-2}}
    check_graphs(check_blocks(ctx, prepare, transport=transport, **options), how)


@distributed(world_sizes=(2,), timeout=120)
def test_evaluation_between_steps(ctx):
    """Without gradients is another graph; coming back to training is none."""
    torch._dynamo.reset()
    counters.clear()
    model = shard(ctx, compile_blocks(Stack(), "method", backend="aot_eager"), STACK_UNITS)
    numbers = []
    for number in range(4):
        model(inputs(ctx.rank, number)).square().mean().backward()
        with torch.no_grad():
            model(inputs(ctx.rank, number))
        numbers.append(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert numbers == [numbers[0]] * 4 and numbers[0] > NUM_GRAPHS, numbers


@distributed(world_sizes=(2,), timeout=120)
@pytest.mark.parametrize("how", ["method", "function"])
@both_transports
def test_the_whole_model_compiled(ctx, how, transport):
    """Hooks break the root's graph, as they do stock's; the blocks are compiled, and only they."""
    skip_transport(ctx, transport)

    def make(apply):
        model = apply(Stack(), STACK_UNITS)
        if how == "function":
            return torch.compile(model, backend="aot_eager"), model
        model.compile(backend="aot_eager")
        return model, model

    expected, by_stock = compiled(ctx, lambda: make(shard_stock))
    got, seen = compiled(ctx, lambda: make(functools.partial(shard, ctx, transport=transport)))
    same(got, expected, rtol=1e-5, atol=1e-6)
    assert all(one == seen[0] for one in seen), seen
    assert seen[0]["calls_captured"] == by_stock[0]["calls_captured"], (seen, by_stock)


@pytest.mark.full
@distributed(world_sizes=(2,), timeout=280, fresh=True)
@both_transports
def test_blocks_compiled_by_inductor(ctx, transport):
    """With a cache of its own per rank, and without the processes that compile in parallel."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        patch.setattr("torch._inductor.config.compile_threads", 1)
        prepare = functools.partial(compile_blocks, how="method", backend="inductor")
        check_graphs(check_blocks(ctx, prepare, transport=transport))
