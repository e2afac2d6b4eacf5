"""One rank runs another program than its peers: all raise the same error soon, or all train to the right values."""

import pytest

import divergences
from harness import distributed

NUM_PROGRAMS = {2: 13, 3: 10, 4: 7}  # by world, for each transport
NUM_FULL = {2: 300, 3: 130, 4: 70}


def check(ctx, transport, seeds, kinds=None):
    if kinds is None:
        late = divergences.TIME_OUT if transport == "shm" else ()
        kinds = tuple(kind for kind in divergences.KINDS if kind not in late)
    for seed in seeds:
        program = divergences.draw(seed, ctx.world, transport, kinds)
        wrong = divergences.run(program)
        assert not wrong, (program, wrong)


@distributed(world_sizes=tuple(NUM_PROGRAMS), timeout=120)
@pytest.mark.parametrize("transport", ["shm", "process_group"])
def test_divergences(ctx, transport):
    check(ctx, transport, range(100 * ctx.world, 100 * ctx.world + NUM_PROGRAMS[ctx.world]))


@pytest.mark.full
@distributed(world_sizes=(2, 3), timeout=240)
def test_divergences_that_time_out(ctx):
    check(ctx, "shm", range(20), divergences.TIME_OUT)


@pytest.mark.full
@pytest.mark.timeout(3600)
@distributed(world_sizes=tuple(NUM_FULL), timeout=3600)
@pytest.mark.parametrize("transport", ["shm", "process_group"])
def test_many_divergences(ctx, transport):
    check(ctx, transport, range(10_000 * ctx.world, 10_000 * ctx.world + NUM_FULL[ctx.world]))
