"""One rank alone fails over shared memory and continues. The others soon get an error that names it."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta

from fuzz.grammar import Grammar
from fuzz.observe import SKIPPED, Raised
from fuzz.parts import FORWARD_FAULTS
from fuzz.program import Program, op, parse
from fuzz.search import Ranks
from fuzz.sharded import Ours
from harness.context import Body

PATIENCE_S = 2.0
# Limit for ranks that do not fail: one wait until its timeout, and the computations around it on a busy machine.
LIMIT_S = PATIENCE_S + 15.0


def run_alone(ctx, text: str, victim: int) -> tuple[Raised | None, float, bool]:
    """Returns the first exception on this rank, the time it took, and whether a backward ended before it.

    Only `victim` runs the program's faults. After its fault it continues, like code that skips a bad batch.
    """
    program = parse(text)
    if ctx.rank != victim:
        ops = (op(one.kind, **{k: v for k, v in one.arguments.items() if k != "fault"}) for one in program.ops)
        program = replace(program, ops=tuple(ops))
    machine = Ours(program, ctx.rank, ctx.world, transport="shm", patience=timedelta(seconds=PATIENCE_S))
    start = time.monotonic()
    machine.shard()
    first, has_reduced = None, False
    for one in program.ops:
        seen = machine.observe(one)
        first = first or seen.raised
        if seen.raised is not None and seen.raised.kind != "Injected":
            break
        has_reduced |= one.kind == "backward" and seen.raised is None and seen.result != SKIPPED
    return first, time.monotonic() - start, has_reduced


def draw_alone(seed: int, world: int) -> Program:
    """Draws two steps, with a fault in the first one."""
    grammar = Grammar(seed, world)
    program = grammar.program()
    ops = [op("forward"), op("backward"), op("forward"), op("backward")]
    if grammar.chance(2):
        ops[0] = op("forward", fault=grammar.fault(FORWARD_FAULTS[:2]))
    else:
        ops[1] = op("backward", fault=grammar.fault(("gradient",)))
    return replace(program, ops=tuple(ops))


def check(ranks: Ranks, program: Program, victim: int) -> list[str]:
    """Runs the program and returns what is wrong. The list is empty if the fault never occurred."""
    outcomes = ranks.collect(Body.of(run_alone), repr(program), victim)
    if isinstance(outcomes, str):
        return [outcomes]
    found = []
    failed = outcomes[victim][0]
    if failed is None or failed.kind != "Injected":
        return []
    for rank, (raised, seconds, has_reduced) in enumerate(outcomes):
        if rank == victim:
            continue
        if raised is None and not has_reduced:
            continue  # nothing was computed from several ranks' batches
        if raised is None:
            found.append(f"rank {rank} went on, though rank {victim} had failed")
        elif raised.kind != "RuntimeError" or f"rank {victim}" not in raised.text:
            found.append(f"rank {rank} raised {raised}, which does not name rank {victim}\n{raised.trace}")
        if seconds > LIMIT_S:
            found.append(f"rank {rank} took {seconds:.1f} s")
    return found
