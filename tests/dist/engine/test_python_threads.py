"""Python threads of one rank that call units of one root side by side, as a server of inference does."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import shard

NUM_THREADS = 4


class Large(Stack):
    """Copies and products long enough for threads to meet in them."""

    def __init__(self):
        super().__init__(width=96, hidden=160)


def in_threads(call, num):
    """The results of `call(i)`, all threads begin together."""
    gate = threading.Barrier(NUM_THREADS)

    def work(first):
        gate.wait()
        return [call(i) for i in range(first, num, NUM_THREADS)]

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return [result for part in [pool.submit(work, i) for i in range(NUM_THREADS)] for result in part.result()]


def x_of(number):
    return inputs(0, number, rows=16, width=96)


def ordered(results):
    return sorted(results, key=lambda one: one[0])


@distributed(world_sizes=(1,))
@pytest.mark.parametrize("what", ["different units", "the same unit", "the model", "the model and its units"])
@pytest.mark.parametrize("transport", ["shm", "process_group"])
def test_forwards_side_by_side(ctx, what, transport):
    """Same results as one after the other; a unit is freed by the last who uses it."""
    model, plain = shard(ctx, Large(), STACK_UNITS, transport=transport), Large()
    blocks = [f"blocks.{i}" for i in range(3)]
    paths = {
        "different units": blocks,
        "the same unit": blocks[:1],
        "the model": [""],
        "the model and its units": ["", *blocks],
    }[what]
    with torch.no_grad():
        model(x_of(0))  # who is the root

    def call(which):
        @torch.no_grad()
        def one(i):
            return i, which.get_submodule(paths[i % len(paths)])(x_of(i))

        return one

    num = 120
    expected = [call(plain)(i) for i in range(num)]
    for _ in range(3):
        got = ordered(in_threads(call(model), num))
        for (i, value), (_, wanted) in zip(got, expected, strict=True):
            assert torch.equal(value, wanted), (what, i)
        model.reshard()
        found = fsdp2x.describe(model).stats
        assert found["gather_slots_owned"] == 0, found
    loss = model(x_of(1)).square().mean()
    loss.backward()
    plain(x_of(1)).square().mean().backward()
    for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad.full_tensor(), wanted.grad), name


@distributed(world_sizes=(1,))
@pytest.mark.parametrize("transport", ["shm", "process_group"])
def test_one_thread_that_fails(ctx, transport):
    """Leaves the forwards of the others alone."""
    model, plain = shard(ctx, Large(), STACK_UNITS, transport=transport), Large()

    def sometimes(module, args):
        if args[0].shape[0] == 3:
            raise KeyError("planned")

    model.blocks[1].up.register_forward_pre_hook(sometimes)

    @torch.no_grad()
    def call(i):
        if i % 3:
            return i, model(x_of(i))
        with pytest.raises(KeyError, match="planned"):
            model(x_of(i)[:3])
        return i, None

    for i, value in in_threads(call, 90):
        if value is not None:
            with torch.no_grad():
                assert torch.equal(value, plain(x_of(i))), i
    model.reshard()
    assert fsdp2x.describe(model).stats["gather_slots_owned"] == 0
