"""The body that runs on every rank: one program on all of its sides, and what they differ in."""

from __future__ import annotations

from unittest import mock

import streams
from fuzz.judge import compare
from fuzz.machine import Machine
from fuzz.program import parse
from fuzz.sharded import Ours, Stock
from fuzz.unsharded import Unsharded

SIDES = ("unsharded", "stock", "shm", "process_group", "streams")


def _machine(side: str, *arguments) -> Machine:
    if side in ("unsharded", "stock"):
        return (Unsharded if side == "unsharded" else Stock)(*arguments)
    return Ours(*arguments, transport=side)


def run_program(ctx, text: str, sides: tuple[str, ...]) -> tuple[list[str], list[tuple]]:
    """Divergences on this rank, and which operations raised on which side: to be the same on all ranks."""
    program = parse(text)
    traces, races = {}, []
    for side in sides:
        recorder = streams.install(pieces=(512, 256)) if side == "streams" else None
        try:
            traces[side] = _machine(side, program, ctx.rank, ctx.world).run()
        finally:
            mock.patch.stopall()
        if recorder is not None:
            found = streams.races(recorder.entries)
            if program.offload:
                harmless = ["give_back"]  # here the host's allocator may get what the recorded device's gave back
                if any(one.raised for one in traces[side]):
                    harmless.append("transfer  on copy_in reads")  # of a gather that an exception abandoned
                found = [one for one in found if not any(part in one for part in harmless)]
            races = [f"streams: {one}" for one in found[:3]]
    raised = [
        (side, index, one.raised.kind)
        for side, trace in traces.items()
        for index, one in enumerate(trace)
        if one.raised
    ]
    return compare(program, traces) + races, raised
