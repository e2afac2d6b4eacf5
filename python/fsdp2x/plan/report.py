"""``memory_report``: bytes per rank between steps and at the peak of a step, from the plan that runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.lifecycle.contexts import BeforeLast
from fsdp2x.lifecycle.tree import roots_of, units_of
from fsdp2x.lifecycle.unit import ShardedUnit
from fsdp2x.plan.facts import GroupFacts, ModelFacts, PlannedUnit
from fsdp2x.plan.optimizers import StateBytes, optimizer_bytes
from fsdp2x.plan.sources import facts_of_model
from fsdp2x.plan.steps import HELD, MicroBatches, PlannedTree, Traffic, all_reduce_scratch_bytes
from fsdp2x.sharding.offload import host_state
from fsdp2x.sharding.transport import TransportKind, has_streams

_MEASURED = ("gather_slot_bytes", "peak_gather_bytes", "scratch_bytes", "resident_shard_bytes", "wire_bytes")


@dataclass(frozen=True)
class UnitMemory:
    """One unit on this rank. ``slot_bytes`` is the full unit in the compute dtype."""

    name: str
    num_params: int
    num_elements: int
    shard_bytes: int
    pad_bytes: int  # padding in shard_bytes
    gradient_bytes: int
    slot_bytes: int
    scratch_bytes: int
    reshard_after_forward: bool


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one rank. ``str()`` prints a table, ``to_dict()`` returns plain values.

    Held between steps, from the first step on:

    - ``shard_bytes``: shards, with ``pad_bytes`` of padding.
    - ``gradient_bytes``, ``optimizer_bytes``: sharded gradients and optimizer state.
    - ``unsharded_bytes``: buffers and ignored parameters.
    - ``after_forward_bytes``: rows kept in a smaller world.
    - ``wire_bytes``: encoded rows and rounding errors of wire formats.
    - ``resident_shard_bytes``: copies on the device of offloaded shards.

    Added during a step:

    - ``gather_slot_bytes``: gather buffers. ``peak_gather_bytes`` of them are in use at once.
    - ``scratch_bytes``: reduction buffers, or one pool of all buffers over a process group.
    - ``replica_bytes``: gradients that wait for the all-reduce.
    - ``autograd_bytes``: one full gradient, or on a device the gradients of a unit.
    - ``landing_bytes``: offloaded gradients before their cast.
    - ``optimizer_step_bytes``: moments brought to the device.

    On the CPU, buffers are kept for the next step and add up. On a device, buffers, gradients, and activations share
    memory over time. There, ``step_bytes`` is their peak beyond ``gradient_bytes``. Elsewhere it is None.

    ``host_bytes`` is the part in CPU memory. ``device_resting_bytes`` and ``device_peak_bytes`` exclude it. The ranks
    of a host share gather buffers, and ``own_gather_slot_bytes`` is this rank's part. So ``peak_bytes`` of all ranks
    add up to the host's memory. It is zero if ``scratch_bytes`` includes these buffers.

    The report does not include:

    - activations,
    - memory of tensor subclasses with their own all-gather,
    - a quantizer's data outside of parameters and buffers (bitsandbytes' ``quant_state``),
    - pages and the control page of shared memory,
    - gather buffers that ``set_post_optim_event`` keeps.

    ``measured`` has the engine's own counts under the same names after the model ran, else it is None.
    """

    units: tuple[UnitMemory, ...]
    world: int
    rank: int
    replicas: int
    transport: str
    shard_bytes: int
    pad_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None
    unsharded_bytes: int
    after_forward_bytes: int
    gather_slot_bytes: int
    own_gather_slot_bytes: int
    peak_gather_bytes: int
    scratch_bytes: int
    replica_bytes: int
    autograd_bytes: int
    resident_shard_bytes: int
    landing_bytes: int
    optimizer_step_bytes: int
    step_bytes: int | None
    host_bytes: int
    traffic: Traffic
    wire_bytes: int = 0
    measured: dict[str, int] | None = None

    @property
    def resting_bytes(self) -> int:
        """Bytes that a rank holds between steps, without buffers that are kept for the next one."""
        held = self.shard_bytes + self.gradient_bytes + self.unsharded_bytes + self.after_forward_bytes
        return held + self.resident_shard_bytes + self.wire_bytes + (self.optimizer_bytes or 0)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a rank holds, without activations."""
        held = self.resting_bytes + self.replica_bytes + self.landing_bytes
        if self.step_bytes is not None:
            return held + max(self.step_bytes, self.optimizer_step_bytes)
        kept = self.own_gather_slot_bytes + self.scratch_bytes
        return held + kept + max(self.autograd_bytes, self.optimizer_step_bytes)

    @property
    def device_resting_bytes(self) -> int:
        """``resting_bytes`` without CPU memory of offloading. The same if nothing is offloaded."""
        return self.resting_bytes - (self.host_bytes - self.landing_bytes)

    @property
    def device_peak_bytes(self) -> int:
        """``peak_bytes`` without CPU memory of offloading. The same if nothing is offloaded."""
        return self.peak_bytes - self.host_bytes

    def to_dict(self) -> dict:
        """Returns all values and sums as numbers, strings and lists."""
        result = asdict(self)
        result["traffic"]["total_bytes"] = self.traffic.total_bytes
        sums = ("resting_bytes", "peak_bytes", "device_resting_bytes", "device_peak_bytes")
        return {**result, **{name: getattr(self, name) for name in sums}}

    def __str__(self) -> str:
        """Returns a table of units, and rows with bytes."""
        head = ("unit", "params", "elements", "shard", "pad", "gradients", "slot", "scratch", "reshard")
        rows = [
            (
                unit.name,
                str(unit.num_params),
                f"{unit.num_elements:,}",
                *map(readable, (unit.shard_bytes, unit.pad_bytes, unit.gradient_bytes)),
                *map(readable, (unit.slot_bytes, unit.scratch_bytes)),
                "yes" if unit.reshard_after_forward else "no",
            )
            for unit in self.units
        ]
        lines = columns([head, *_folded(rows)])
        shown = [
            (name, readable(size or 0), note) for name, size, note in self.sizes() if size or note or name == "at rest"
        ]
        ranks = f"{self.world} rank(s)" + (f" x {self.replicas} replicas" if self.replicas > 1 else "")
        return "\n".join(
            [
                *lines,
                "",
                f"rank {self.rank} of {ranks}, transport {self.transport}",
                *columns(shown, {0, 2}),
            ]
        )

    def sizes(self) -> list[tuple[str, int | None, str]]:
        """Returns the rows of the table: label (``fsdp2x plan --explain`` says more), bytes, and a remark."""
        is_pooled = TransportKind.PROCESS_GROUP in self.transport or TransportKind.DEVICE in self.transport
        return [
            ("shards", self.shard_bytes, f"padding {readable(self.pad_bytes)}"),
            ("gradients", self.gradient_bytes, ""),
            ("optimizer", self.optimizer_bytes, "" if self.optimizer_bytes is not None else "not asked for"),
            ("buffers, unsharded parameters", self.unsharded_bytes, ""),
            ("rows kept after forward", self.after_forward_bytes, ""),
            ("copies of shards on the device", self.resident_shard_bytes, ""),
            ("kept for wire formats", self.wire_bytes, ""),
            ("at rest", self.resting_bytes, ""),
            ("gather slots", self.own_gather_slot_bytes, self._sharing()),
            ("slots and staging" if is_pooled else "scratch", self.scratch_bytes, ""),
            ("waiting for the all-reduce", self.replica_bytes, ""),
            ("gradients on their way to the host", self.landing_bytes, ""),
            ("gradients of autograd", self.autograd_bytes, ""),
            ("of slots to autograd at once, beyond gradients", self.step_bytes or 0, ""),
            ("moments of a step", self.optimizer_step_bytes, ""),
            ("peak, without activations", self.peak_bytes, ""),
            ("of it in host memory", self.host_bytes, ""),
            *([("of it on the device", self.device_peak_bytes, "")] if self.host_bytes else []),
            ("sent in a step", self.traffic.total_bytes, self._sent()),
        ]

    def _sharing(self) -> str:
        shared = 0 < self.own_gather_slot_bytes != self.gather_slot_bytes
        return f"a part of {readable(self.gather_slot_bytes)} shared by the ranks of the host" if shared else ""

    def _sent(self) -> str:
        traffic = self.traffic
        text = f"{traffic.gathers} gathers {readable(traffic.gather_bytes)}"
        text += f", {traffic.reductions} reductions {readable(traffic.reduce_bytes)}"
        return text + (f", all-reduces {readable(traffic.all_reduce_bytes)}" if traffic.all_reduce_bytes else "")


@checked
def memory_report(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    micro_batches: int = 1,
    before_last: BeforeLast = "nothing",
) -> MemoryReport:
    """Counts the bytes that this rank holds between steps and at the peak of a training step. Not collective.

    The numbers equal the engine's own counts after a few steps under two conditions: every unit runs once per step in
    the order of registration, and every trainable parameter gets a gradient. It works on the meta device and before the
    first forward, where it assumes the choice of ``transport="auto"`` on one host.

    Args:
        model: a sharded model.
        optimizer: an optimizer whose state is counted. Adam, AdamW, and SGD are counted even before their first step.
        micro_batches: number of backwards in a step.
        before_last: communication of the backwards before the last one. See :func:`fsdp2x.accumulate`.

    Raises:
        ValueError: nothing in ``model`` is sharded, or the state of ``optimizer`` cannot be predicted.
    """
    accumulation = MicroBatches(micro_batches, before_last)
    states = units_of(model, "memory_report")
    stats = [root.stats() for root in roots_of(states)]
    measured = {name: sum(one[name] for one in stats) for name in _MEASURED} if stats else None
    state_bytes = optimizer_bytes(optimizer, _on_host(states)) if optimizer is not None else None
    return report_of(facts_of_model(model), state_bytes, measured, accumulation)


def _on_host(states: list[ShardedUnit]) -> Callable[[torch.Tensor], bool]:
    """Returns a test for parameters whose optimizer state is in CPU memory, by their device or by a policy."""
    offloaded = {
        id(param.param)
        for state in states
        for group in state.groups
        if group.offloads and has_streams(group.ranks.device)
        for param in group.params
    }
    return lambda param: id(param) in offloaded or host_state(param) is not None


def report_of(
    facts: ModelFacts,
    state: StateBytes | None,
    measured: dict[str, int] | None = None,
    micro_batches: MicroBatches = MicroBatches(),  # noqa: B008 (frozen)
) -> MemoryReport:
    """Makes the report of a running or planned model."""
    planned = [PlannedTree(root, units, micro_batches) for root, units in trees_of(facts)]
    traffic = sum((tree.run() for tree in planned), Traffic())
    groups = [group for unit in facts.units for group in unit.groups]
    ranks = groups[0].ranks if groups else None
    offloaded = [group for group in groups if group.offloads]
    in_pools = sum(group.shard_pool_bytes + group.gradient_pool_bytes for group in offloaded)
    # On a device, rows that wait for the all-reduce are segments of the transport.
    replicated = [g for g in groups if g.ranks.replicas > 1 and g.is_trainable and not g.ranks.has_streams]

    def total(name: str) -> int:
        return sum(tree.held(name) for tree in planned)

    return MemoryReport(
        units=tuple(_unit_memory(unit) for unit in facts.units),
        world=ranks.world if ranks else 1,
        rank=ranks.rank if ranks else 0,
        replicas=ranks.replicas if ranks else 1,
        transport=", ".join(dict.fromkeys(group.ranks.transport for group in groups)) or "none",
        shard_bytes=sum(group.shard_pool_bytes for group in groups),
        pad_bytes=sum(group.shard_pad_bytes for group in groups),
        gradient_bytes=sum(group.gradient_pool_bytes for group in groups),
        optimizer_bytes=None if state is None else state.total,
        unsharded_bytes=facts.unsharded_bytes,
        after_forward_bytes=sum(group.small.shard_pool_bytes for group in groups if group.small),
        **{name: total(name) for name in HELD},
        replica_bytes=sum(group.replica_segment_bytes for group in replicated) + all_reduce_scratch_bytes(replicated),
        autograd_bytes=max((group.gradient_bytes for group in groups), default=0),
        wire_bytes=sum(group.wire_bytes for group in groups),
        optimizer_step_bytes=0 if state is None else state.step,
        step_bytes=_step_bytes(planned, groups),
        host_bytes=in_pools + total("landing_bytes") + (0 if state is None else state.on_host),
        traffic=traffic,
        measured=measured,
    )


def _step_bytes(planned: list[PlannedTree], groups: list[GroupFacts]) -> int | None:
    if not all(tree.is_on_device for tree in planned):
        return None
    gradients = sum(group.gradient_pool_bytes for group in groups if not group.offloads)
    return sum(tree.device_bytes for tree in planned) - gradients


def trees_of(facts: ModelFacts) -> list[tuple[nn.Module, list[PlannedUnit]]]:
    """Returns each outermost unit, where forward starts, with the units below it."""
    trees: list[tuple[nn.Module, list[PlannedUnit]]] = []
    taken: set[int] = set()
    for unit in facts.units:
        if id(unit) in taken:
            continue
        below = {id(module) for top in unit.modules for module in top.modules()}
        tree = [other for other in facts.units if id(other.modules[0]) in below]
        taken.update(map(id, tree))
        trees.append((unit.modules[0] if len(unit.modules) == 1 else facts.model, tree))
    return trees


def _unit_memory(unit: PlannedUnit) -> UnitMemory:
    return UnitMemory(
        name=unit.name,
        num_params=unit.num_params,
        num_elements=unit.num_elements,
        shard_bytes=sum(group.shard_pool_bytes for group in unit.groups),
        pad_bytes=sum(group.shard_pad_bytes for group in unit.groups),
        gradient_bytes=sum(group.gradient_pool_bytes for group in unit.groups),
        slot_bytes=sum(group.slot_bytes for group in unit.groups),
        scratch_bytes=sum(
            group.reduce_segment_bytes * group.ranks.world
            if group.ranks.transport.is_collective
            else group.scratch_bytes
            for group in unit.groups
        ),
        reshard_after_forward=unit.reshards_after_forward,
    )


def columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Returns lines of a table. Columns in ``left`` are flush left, the others flush right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def readable(num_bytes: int) -> str:
    """Returns ``num_bytes`` in the largest binary unit that is at most as large."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(num_bytes) >= 1024**power:
            return f"{num_bytes / 1024**power:.2f} {unit}"
    return f"{num_bytes} B"


def _folded(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merges more than four like units in a row into one line, and repeated pairs and triples, such as layers."""
    folded: list[tuple[str, ...]] = []
    start = 0
    while start < len(rows):
        for period in (1, 2, 3):
            end = start + period
            while end < len(rows) and rows[end][1:] == rows[end - period][1:]:
                end += 1
            times = (end - start) // period
            if times > 4:
                break
        else:
            folded.append(rows[start])
            start += 1
            continue
        for row in range(start, start + period):
            last = rows[row + (times - 1) * period]
            folded.append((f"{rows[row][0]} .. {last[0]} ({times} units, each)", *rows[row][1:]))
        start += times * period
    return folded
