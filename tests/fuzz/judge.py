"""Compares what the sides recorded, operation by operation."""

from __future__ import annotations

from collections.abc import Iterator

from fuzz.known import Case, Traces, left_out
from fuzz.observe import differences
from fuzz.program import Program

ORACLES = ("unsharded", "stock")


def compare(program: Program, traces: Traces) -> list[str]:
    """Each divergence as a sentence, at the first operation that shows one: what comes later may follow from it."""
    ours = [side for side in traces if side not in ORACLES]
    gone: set[tuple[str, str]] = set()  # pairs that are not compared any more
    for index in range(len(program.ops) + 1):
        what = "fully_shard" if index == 0 else repr(program.ops[index - 1])
        found = []
        for side in ours:
            where = f"{side}, operation {index}: {what}"
            found += [f"{where}: {one}" for one in _check_memory(index, side, traces)]
            for other in (*(one for one in ORACLES if one in traces), *ours[: ours.index(side)]):
                if (side, other) in gone or index >= len(traces[other]):
                    continue
                case = Case(program, traces, side, other, index)
                keys, ends = left_out(case)
                if ends:
                    gone.add((side, other))
                elif "all" not in keys:
                    found += [f"{where}: {one} ({other})" for one in _compare(case, keys)]
        if found:
            return found
    return []


def _tolerance(case: Case) -> float:
    """bf16 is rounded at other places unsharded; between sharded sides only sums of many ranks may differ."""
    ops = case.program.ops
    if (
        case.program.policy != "full"
        or case.program.grads
        or any(one.arguments.get("mode_name") == "autocast" for one in ops)
    ):
        return 3e-2
    return 2e-5 if case.other in ORACLES else 1e-5


def _compare(case: Case, excluded: set[str]) -> Iterator[str]:
    got, expected, tolerance = case.got, case.expected, _tolerance(case)
    if (got.raised and got.raised.kind) != (expected.raised and expected.raised.kind):
        yield f"raised {got.raised}, expected {expected.raised}"
        if got.raised is not None:
            yield got.raised.trace
        return
    if "result" not in excluded:
        yield from differences(got.result, expected.result, tolerance, "result")
    if "log" not in excluded:
        yield from differences(_sorted(got.log), _sorted(expected.log), tolerance, "hooks")
    for key in expected.state:
        if key not in excluded and key in got.state and key != "memory":
            yield from differences(got.state[key], expected.state[key], tolerance, key)


def _sorted(log: list) -> list:
    """Hooks by name, each in its order: branches of a graph may run in any order."""
    return sorted(log, key=lambda one: one[0])


def _check_memory(index: int, side: str, traces: Traces) -> Iterator[str]:
    """Gathered units have a gather buffer. Reduction buffers are open only while gradients await synchronization."""
    observation = traces[side][index]
    memory = observation.state["memory"]
    # A gather in progress has a gather buffer, or a separate staging buffer over gloo.
    least, most = memory["states"].count("UNSHARDED"), len(memory["states"]) - memory["states"].count("SHARDED")
    if side == "streams" and memory["ranks"] == 1:
        least = 0  # its parameters may be views of its shards
    if memory["keeps"]:
        most = len(memory["states"])
    most *= memory["parts"]  # each part of a unit with another offload has its own
    if not least <= memory["slots"] <= most:
        yield f"{memory['slots']} slots are owned, but units are {memory['states']}"
    reference = traces["unsharded"][index]
    pairs = zip(traces[side], traces["unsharded"], strict=False)
    is_refused = any(one.raised and not other.raised for one, other in pairs)
    if not is_refused and "stale" not in reference.taint and not reference.state["pending"] and memory["scratches"]:
        yield f"{memory['scratches']} scratches are owned, but no gradient waits"
