"""``simulate``: one step of a planned model on a machine, by our schedule and by others', and what was assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import nn

from fsdp2x.memory.facts import ModelFacts
from fsdp2x.memory.report import readable, trees_of
from fsdp2x.memory.steps import MicroBatches, Operation, Replay
from fsdp2x.simulate.lanes import Task, Times, play
from fsdp2x.simulate.machines import Machine
from fsdp2x.simulate.schedules import PEERS, Pacing, ours, theirs
from fsdp2x.simulate.work import work_of
from fsdp2x.tools.describe import columns

# An element of AdamW in fp32: weight, gradient and two moments are read, three of them are written.
_ADAMW_PASSES = 7
OURS = "fsdp2x"


@dataclass(frozen=True)
class StepTimes:
    """A step of one implementation on one rank.

    ``collectives`` are calls on the network, ``collective_launches`` their kernels, ``copy_launches`` those of copies
    and casts; ``sent_bytes`` goes around rings. ``exposed_s`` is what the step would gain from links that take no time,
    so that it is never more than ``communication_s``, what they are busy.
    """

    name: str
    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    host_s: float
    optimizer_s: float  # of compute_s
    collectives: int
    collective_launches: int
    copy_launches: int
    gather_bytes: int
    reduce_bytes: int
    all_reduce_bytes: int

    @property
    def sent_bytes(self) -> int:
        return self.gather_bytes + self.reduce_bytes + self.all_reduce_bytes


@dataclass(frozen=True)
class Simulation:
    """Steps of all implementations on one machine, ours first, and the assumptions in words."""

    machine: str
    world: int
    tokens: int
    steps: tuple[StepTimes, ...]
    model_flops: float  # of all tokens of a rank in a step
    peak_flops_per_s: float
    assumptions: tuple[str, ...]

    def __str__(self) -> str:
        head = ("schedule", "step", "compute", "network", "exposed", "host", "tokens/s", "MFU")
        head += ("collectives", "launches", "sent")
        rows = [head]
        for one in self.steps:
            times = (one.step_s, one.compute_s, one.communication_s, one.exposed_s, one.host_s)
            rate = f"{self.tokens / one.step_s:,.0f}"
            share = f"{self.model_flops / one.step_s / self.peak_flops_per_s:.1%}"
            launches = one.collective_launches + one.copy_launches
            counts = (str(one.collectives), str(launches), readable(one.sent_bytes))
            rows.append((one.name, *(f"{1e3 * seconds:.1f} ms" for seconds in times), rate, share, *counts))
        title = f"a step on {self.world} rank(s) of {self.machine}: foretold, not measured"
        return "\n".join([title, *columns(rows), *(f"- {one}" for one in self.assumptions)])

    def to_dict(self) -> dict:
        """Everything as numbers, strings and lists, with tokens per second of a rank."""
        result = asdict(self)
        for one, step in zip(result["steps"], self.steps, strict=True):
            one["sent_bytes"] = step.sent_bytes
            one["tokens_per_s"] = self.tokens / step.step_s
        return result


def simulate(
    model: nn.Module,
    facts: ModelFacts,
    machine: Machine,
    *,
    tokens: int,
    sequence_length: int,
    mfu: float,
    recomputes: bool = False,
    micro_batches: MicroBatches = MicroBatches(),  # noqa: B008 (frozen)
    peers: Sequence[str] = tuple(PEERS),
) -> Simulation:
    """A steady step: forward and backward of every micro-batch, and AdamW.

    ``tokens``: of a rank in a micro-batch, of samples of ``sequence_length``. ``mfu``: the share of the machine's peak
    that the compute reaches when it waits for nobody. ``peers``: names of ``PEERS``, without replays of their own.
    """
    replays = [Replay(root, units, micro_batches) for root, units in trees_of(facts)]
    for replay in replays:
        replay.run()
    work = work_of(model, tokens, sequence_length)
    pacing = Pacing(machine, mfu, recomputes)
    played = _played(replays)
    optimizer_s = _optimizer_s(facts, machine)
    steps = [_step(OURS, [(times, ours(one, work, pacing)) for times, one in played], machine, optimizer_s)]
    for name in peers:
        tasks = [(times, theirs(PEERS[name], one, work, pacing)) for times, one in played]
        steps.append(_step(name, tasks, machine, optimizer_s))
    num_micro_batches = sum(times for times, _ in played)
    ranks = next((group.ranks for unit in facts.units for group in unit.groups), None)
    return Simulation(
        machine.name,
        ranks.world * ranks.replicas if ranks else 1,
        tokens * num_micro_batches,
        tuple(steps),
        sum(one.flops + one.backward_flops for one in work.values()) * num_micro_batches,
        machine.flops_per_s,
        _assumptions(machine, pacing, tokens, sequence_length),
    )


def _played(replays: list[Replay]) -> list[tuple[int, list[Operation]]]:
    """Roots run one after the other in each micro-batch."""
    if not replays:
        return []
    batches = zip(*(replay.operations for replay in replays), strict=True)
    return [(roots[0][0], [operation for _, one in roots for operation in one]) for roots in batches]


def _optimizer_s(facts: ModelFacts, machine: Machine) -> float:
    trained = sum(group.trained_bytes for unit in facts.units for group in unit.groups)
    return _ADAMW_PASSES * trained / machine.memory_bytes_per_s


def _step(name: str, tasks: list[tuple[int, list[Task]]], machine: Machine, optimizer_s: float) -> StepTimes:
    whole = [(times, play(one, machine)) for times, one in tasks]
    still = [(times, play(one, machine, has_instant_links=True)) for times, one in tasks]

    def total(of: list[tuple[int, Times]], what: str) -> float:
        return sum(times * getattr(one, what) for times, one in of)

    every = [(times, task) for times, one in tasks for task in one]
    sent = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
    for times, task in every:
        for call in task.collectives:
            passes = 2 if call.kind == "all_reduce" else 1
            sent[call.kind] += times * -(-passes * call.num_bytes * (call.axis.world - 1) // call.axis.world)
    step_s = total(whole, "step_s")
    return StepTimes(
        name,
        step_s + optimizer_s,
        total(whole, "compute_s") + optimizer_s,
        total(whole, "communication_s"),
        max(step_s - total(still, "step_s"), 0.0),
        total(whole, "host_s"),
        optimizer_s,
        sum(times * len(task.collectives) for times, task in every),
        sum(times * len(task.launches) for times, task in every),
        sum(times * task.num_launches for times, task in every),
        sent["all_gather"],
        sent["reduce_scatter"],
        sent["all_reduce"],
    )


def _assumptions(machine: Machine, pacing: Pacing, tokens: int, sequence_length: int) -> tuple[str, ...]:
    links = f"{machine.inside_bytes_per_s / 1e9:.0f} GB/s in a node of {machine.ranks_per_node}"
    links += f", {machine.across_bytes_per_s / 1e9:.0f} GB/s a rank across"
    again = ", and a second forward in backward" if pacing.recomputes else ""
    compute = f"{pacing.mfu:.0%} of {machine.flops_per_s / 1e12:.0f} TFLOP/s when nothing waits{again}"
    host = f"{machine.launch_s * 1e6:.0f} us a kernel, {machine.collective_s * 1e6:.0f} us a collective"
    return (
        f"links: {links}; latency and bandwidth of rings and trees as NCCL's tuning.cc has them; one collective at a "
        "time on each kind of link; no other traffic",
        f"compute: {tokens} tokens a rank in samples of {sequence_length}, {compute}; collectives take nothing from it",
        f"host: {host}, {machine.module_s * 1e6:.0f} us for a module's own operations; assumed, not measured on a GPU",
        *(f"{peer.title}: {peer.sources}" for peer in PEERS.values()),
    )
