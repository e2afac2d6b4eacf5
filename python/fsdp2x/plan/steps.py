"""Simulates training steps of a planned model: the engine's schedule runs them and counts bytes.

It assumes that modules run once each, in the order of their registration, and that every trainable parameter gets a
gradient. A shared parameter's reduction buffer counts from its last use on. Ranks with shared memory may be late. The
numbers are those of ``Root.stats()``.
"""

from __future__ import annotations

import mmap
from collections.abc import Hashable, Iterator
from dataclasses import astuple, dataclass

from torch import nn

from fsdp2x.base.native import _C
from fsdp2x.plan.facts import GroupFacts, PlannedMesh, PlannedUnit
from fsdp2x.sharding.wrap import only_looks_up

# Bytes of a model's transports. ``own_gather_slot_bytes`` is this rank's part of shared gather buffers.
HELD = (
    "gather_slot_bytes", "own_gather_slot_bytes", "peak_gather_bytes", "scratch_bytes", "resident_shard_bytes",
    "landing_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """Bytes that one steady training step moves on this rank, forward, backward and reduction.

    Over a process group these are the bytes that a rank sends in ring collectives. Over shared memory, they are the
    bytes that it writes for others: its rows at each gather, and its packed gradients at each reduction.
    """

    gathers: int = 0
    reductions: int = 0
    gather_bytes: int = 0
    reduce_bytes: int = 0
    all_reduce_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.gather_bytes + self.reduce_bytes + self.all_reduce_bytes

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class MicroBatches:
    """The backwards of a step, as ``fsdp2x.accumulate`` runs them. ``before_last`` is what the others do."""

    num: int = 1
    before_last: str = "nothing"

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ValueError(f"micro_batches must be at least 1, got {self.num}")

    @property
    def backwards(self) -> list[_C.PlannedBackward]:
        """Returns the first backward, those between, and the last: whether it reduces, and how many are like it."""
        syncs = self.before_last != "nothing"
        before = [num for num in (1, self.num - 2) if self.num > 1 and num]
        return [*(_C.PlannedBackward(syncs, num, all_reduces=False) for num in before), _C.PlannedBackward(True, 1)]


class PlannedTree:
    """All units below one root module, in the order of ``named_modules``."""

    def __init__(self, root: nn.Module, units: list[PlannedUnit], micro_batches: MicroBatches = MicroBatches()) -> None:
        self._units = units
        self._backwards = micro_batches.backwards
        self._steps = _C.PlannedSteps(mmap.PAGESIZE)
        self._groups: list[GroupFacts] = []  # by the engine's numbers
        self._transports: dict[Hashable, int] = {}
        self.is_on_device = True
        for facts in units:
            reshards = facts.reshards_after_forward, facts.reshards_after_backward
            unit = self._steps.add_unit(facts.name, *reshards, facts.unshards_in_backward)
            for group in facts.groups:
                small = self._add_group(None, group.small, None) if group.small else None
                self._add_group(unit, group, small)
        self._events = list(self._walk(root))

    def _add_group(self, unit: int | None, group: GroupFacts, small: int | None) -> int:
        self._groups.append(group)
        return self._steps.add_group(unit, self._transport(group.ranks), group, small)

    def _transport(self, ranks: PlannedMesh) -> int:
        if ranks.key not in self._transports:
            self.is_on_device = self.is_on_device and ranks.has_streams
            planned = _C.PlannedRanks(ranks.world, ranks.replicas, ranks.registers_memory, ranks.max_reduce_buffers)
            self._transports[ranks.key] = self._steps.add_transport(ranks.transport, planned)
        return self._transports[ranks.key]

    def run(self) -> Traffic:
        """Runs steps until the transports' memory is stable. Returns what the last one moved."""
        moved = [
            (num, [self._groups[i] for i in gathers], [self._groups[i] for i in reductions])
            for num, gathers, reductions in self._steps.run(self._events, self._backwards)
        ]
        return Traffic(
            gathers=sum(num * len(gathers) for num, gathers, _ in moved),
            reductions=sum(num * len(reductions) for num, _, reductions in moved),
            gather_bytes=sum(num * sum(map(_gather_sent_bytes, gathers)) for num, gathers, _ in moved),
            reduce_bytes=sum(num * sum(map(_reduce_sent_bytes, groups)) for num, _, groups in moved),
            all_reduce_bytes=sum(map(_all_reduce_sent_bytes, moved[-1][2])),
        )

    def held(self, name: str) -> int:
        """Returns one of ``HELD``."""
        return getattr(self._steps, name)

    @property
    def device_bytes(self) -> int:
        """Returns the most bytes of buffers and gradients that a device holds at once."""
        return self._steps.device_bytes

    def _walk(self, root: nn.Module) -> Iterator[_C.PlannedEvent]:
        """Yields the events of the root's forward: first modules of units, uses of parameters, ends of units."""
        kinds = _C.PlannedEventKind
        remaining = [set(map(id, unit.modules)) for unit in self._units]
        unit_of = {id(module): number for number, unit in enumerate(self._units) for module in unit.modules}
        users: dict[int, list[tuple[int, int]]] = {}
        for number, unit in enumerate(self._units):
            for index, params in enumerate(unit.uses):
                for owner in {owner for param in params for owner in param.owners}:
                    users.setdefault(owner, []).append((number, index))
        shared = [
            (number, index, param)
            for number, unit in enumerate(self._units)
            for index, params in enumerate(unit.uses)
            for param in params
            if len(param.owners) > 1
        ]
        visited: set[int] = set()
        begun_by_lookup: set[int] = set()  # units whose members before this one only look rows up
        is_traced = False  # whether a trainable parameter was used before

        def visit(module: nn.Module) -> Iterator[_C.PlannedEvent]:
            nonlocal is_traced
            visited.add(id(module))
            unit = unit_of.get(id(module))
            if unit is not None and len(remaining[unit]) == len(self._units[unit].modules):
                yield _C.PlannedEvent(kinds.open, unit, 0, is_traced)
                if len(self._units[unit].modules) > 1 and only_looks_up(module):
                    begun_by_lookup.add(unit)
            if unit in begun_by_lookup and not only_looks_up(module):
                begun_by_lookup.remove(unit)
                if is_traced:
                    yield _C.PlannedEvent(kinds.read, unit, 0, False)
            for user, index in users.get(id(module), ()):
                is_traced = True
                yield _C.PlannedEvent(kinds.use, user, index, False)
            for one in [one for one in shared if id(module) in one[2].owners]:
                shared.remove(one)
                yield _C.PlannedEvent(kinds.sum, *one[:2], False, one[2].gradient_bytes)
            for child in module.children():
                if id(child) not in visited:
                    yield from visit(child)
            if unit is not None:
                remaining[unit].discard(id(module))
                if not remaining[unit]:
                    yield _C.PlannedEvent(kinds.close, unit, 0, is_traced)

        return visit(root)


def all_reduce_scratch_bytes(groups: list[GroupFacts]) -> int:
    """Returns bytes of buffers for the all-reduce over replicas of one host. ``groups`` are in the order of units."""
    segments: dict[int, list[int]] = {}
    for group in [*reversed(groups), *reversed(groups)]:
        if group.ranks.replicas_share:
            segments.setdefault(group.ranks.replicas, []).append(group.replica_segment_bytes)
    return sum(_C.all_reduce_scratch_bytes(sizes, mmap.PAGESIZE) for sizes in segments.values())


def _gather_sent_bytes(group: GroupFacts) -> int:
    if group.ranks.transport.is_collective:  # around a ring, each rank passes on all segments except the next one's
        return (group.ranks.world - 1) * group.gather_segment_bytes
    return group.row_bytes if group.ranks.world > 1 else 0


def _reduce_sent_bytes(group: GroupFacts) -> int:
    if group.ranks.transport.is_collective:
        return (group.ranks.world - 1) * (group.coded_reduce_bytes or group.reduce_segment_bytes)
    return group.packed_bytes if group.ranks.world > 1 else 0


def _all_reduce_sent_bytes(group: GroupFacts) -> int:
    replicas = group.ranks.replicas
    if group.ranks.replicas_share:
        return group.replica_segment_bytes
    return -(-2 * (replicas - 1) * group.replica_segment_bytes // replicas)
