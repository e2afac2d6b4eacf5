"""Ctrl-C or an exception of a signal handler inside a step: no rank waits for long, and the next step is right."""

import contextlib

import pytest

from harness import distributed
from interrupts import Program
from large_gathers import everything_is_large
from reference import TRANSPORTS

PARTS = ("train", "train large", "clip", "step", "save", "unshard")


def explore(ctx, transport, part, all_ranks, num):
    """Interrupts ``part`` at ``num`` places, spread over all of them. ``large``: gathers and reductions as messages."""
    part, _, large = part.partition(" ")
    wrong = []
    with everything_is_large() if large else contextlib.nullcontext():
        program = Program(ctx, transport)
        total = program.count(part)
        for at in range(1, total + 1, max(total // num, 1)):
            found, goes_on = program.explore(part, at, set(range(ctx.world)) if all_ranks else {at % ctx.world})
            wrong += [found] if found else []
            if not goes_on:
                program = Program(ctx, transport)
    assert not wrong, f"{len(wrong)} of {num}: " + "\n".join(wrong[:8])


@distributed(world_sizes=(2, 3), timeout=120)
@pytest.mark.parametrize("all_ranks", [False, True])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_interrupts(ctx, transport, part, all_ranks):
    explore(ctx, transport, part, all_ranks, 3)


@pytest.mark.full
@pytest.mark.timeout(3600)
@distributed(world_sizes=(2, 3), timeout=3600)
@pytest.mark.parametrize("all_ranks", [False, True])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_interrupts(ctx, transport, part, all_ranks):
    explore(ctx, transport, part, all_ranks, 60)
