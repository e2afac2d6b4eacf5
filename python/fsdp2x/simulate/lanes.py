"""Plays a schedule on lanes: the host, the compute, and one network per kind of group, each in its own order.

Everything is a sum or a maximum of times, so that no part of a step ever gets slower when a link gets faster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from fsdp2x.simulate.machines import Axis, Machine


@dataclass(frozen=True)
class Collective:
    """One call: its bytes are those of all ranks together."""

    kind: str  # "all_gather", "reduce_scatter" or "all_reduce"
    num_bytes: int
    axis: Axis


@dataclass(frozen=True)
class Task:
    """What the host does next.

    ``"gather"`` starts collectives behind ``follows``, and ``"use"`` lets the compute wait for them; ``"run"`` is
    compute; ``"reduce"`` computes (packing) and starts collectives behind that, and ``"reduced"`` waits for them.
    """

    kind: str
    key: Hashable = None
    collectives: tuple[Collective, ...] = ()
    num_launches: int = 0  # kernels, without those of collectives
    host_s: float = 0.0  # besides launches and calls
    compute_s: float = 0.0
    before_s: float = 0.0  # copies in front of the collectives, beside the compute
    after_s: float = 0.0  # and behind them
    follows: str = "compute"  # a gather begins behind what was enqueued, or "use": behind the last use of a gather
    is_one_launch: bool = False  # collectives of one kind and group: one kernel, whose latencies pass together

    @property
    def launches(self) -> tuple[Collective, ...]:
        """The collectives as the network has them."""
        if not self.is_one_launch:
            return self.collectives
        sums: dict[tuple[str, Axis], int] = {}
        for call in self.collectives:
            sums[call.kind, call.axis] = sums.get((call.kind, call.axis), 0) + call.num_bytes
        return tuple(Collective(kind, num_bytes, axis) for (kind, axis), num_bytes in sums.items())


@dataclass(frozen=True)
class Times:
    """Seconds of a step, and what each lane was busy."""

    step_s: float
    compute_s: float
    communication_s: float
    host_s: float


def play(tasks: Iterable[Task], machine: Machine, *, has_instant_links: bool = False) -> Times:
    """One step from an idle machine until all of it has ended; links may take no time, and keep their order."""
    host = compute = last_use = end = 0.0
    busy = {"compute": 0.0, "link": 0.0, "host": 0.0}
    links: dict[str, float] = defaultdict(float)  # until when each is taken
    streams: dict[str, float] = defaultdict(float)  # of gathers and of reductions, with the copies behind them
    ready: dict[Hashable, float] = {}
    for task in tasks:
        launches = task.launches
        enqueue = task.host_s + task.num_launches * machine.launch_s + len(launches) * machine.collective_s
        enqueue += (len(task.collectives) - len(launches)) * machine.grouped_s
        host += enqueue
        busy["host"] += enqueue
        if not machine.is_device:
            host = compute = max(host, compute)
        if task.kind in ("use", "reduced"):
            compute = max(compute, ready.get(task.key, 0.0))
        if task.compute_s:
            compute = max(compute, host) + task.compute_s
            busy["compute"] += task.compute_s
        if task.kind == "use":
            last_use = compute
        if task.kind in ("gather", "reduce"):
            behind = last_use if task.kind == "gather" and task.follows == "use" else compute
            start = max(max(host, behind) + task.before_s, streams[task.kind])
            ready[task.key] = start + task.after_s
            for number, call in enumerate(one for one in launches if one.axis.world > 1):
                # Groups inside a node do not hold up those between nodes.
                name = "across" if call.axis.num_nodes > 1 else "inside"
                seconds = machine.collective_s_of(call.kind, call.num_bytes, call.axis) * (not has_instant_links)
                start = max(start, links[name]) + seconds
                links[name] = start
                busy["link"] += seconds
                # The compute waits for all gathers; of a reduction until the gradients are read, not for replicas.
                if task.kind == "gather" or number == 0 or call.kind == "reduce_scatter":
                    ready[task.key] = start + task.after_s
            streams[task.kind] = start + task.after_s
            end = max(end, streams[task.kind])
            if machine.is_blocking:
                compute = max(compute, end)
        if not machine.is_device:
            host = compute
    return Times(max(host, compute, end), busy["compute"], busy["link"], busy["host"])
