"""Plays training steps on the ledgers: the engine's schedule (gathers, prefetches, reductions) without its work.

Modules are taken to run once each, in the order of their registration, and every trainable parameter to get a
gradient; ranks that share memory may be late. ``docs/engine/unit.md`` has the life of a unit that is followed here; the
numbers are those of ``Root.stats()``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import astuple, dataclass, field
from enum import Enum, auto

from torch import nn

from fsdp2x.memory.facts import GroupFacts, UnitFacts
from fsdp2x.memory.ledger import Ledger, make_ledger
from fsdp2x.runtime.native import _C

# The first step prefetches nothing in forward; after a few no ledger grows any more.
_MAX_STEPS = 8


# What ledgers hold, and a replay of all of them. Of this rank's own slots: a part where ranks share them, nothing where
# they are out of the memory of the scratches.
HELD = (
    "gather_slot_bytes", "own_gather_slot_bytes", "peak_gather_bytes", "scratch_bytes", "resident_shard_bytes",
    "landing_bytes",
)  # fmt: skip


class Event(Enum):
    """What a walk through the modules meets: a unit's first module, users of its trainable parameters, its end."""

    OPEN = auto()
    USE = auto()
    CLOSE = auto()


@dataclass(frozen=True)
class Traffic:
    """What one steady training step moves on this rank, forward, backward and reduction.

    Over a process group the bytes a rank sends when collectives go around a ring; over shared memory the bytes it
    writes for others to read: its rows at each gather, its packed gradients at each reduction.
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


@dataclass(eq=False)
class _Unit:
    facts: UnitFacts
    state: str = "sharded"
    keeps_rows: bool = False  # in the smaller world, from the end of forward until backward
    index: int = -1  # in the order in which forwards end
    has_node: bool = False  # autograd tells when its backward ends
    has_hook: bool = False  # autograd tells when its backward begins
    is_reduced: bool = False  # in this backward
    open: list[GroupFacts] = field(default_factory=list)

    @property
    def has_params(self) -> bool:
        return bool(self.facts.groups)


@dataclass(frozen=True)
class MicroBatches:
    """The backwards of a step, as ``fsdp2x.accumulate`` runs them: ``before_last`` is what the others do."""

    num: int = 1
    before_last: str = "nothing"

    @property
    def played(self) -> list[tuple[bool, int]]:
        """Whether a backward reduces, and how many of the step are like it: the first one, those between, the last."""
        syncs = self.before_last != "nothing"
        before = [(syncs, 1)] * (self.num > 1) + [(syncs, self.num - 2)] * (self.num > 2)
        return [*before, (True, 1)]


class Replay:
    """All units below one root module. ``run()`` plays steps until the ledgers stay as they are."""

    def __init__(
        self,
        root: nn.Module,
        units: list[UnitFacts],
        micro_batches: MicroBatches = MicroBatches(),
    ) -> None:
        self._micro_batches = micro_batches.played
        self._units = [_Unit(facts) for facts in units]
        self._ledgers: dict[Hashable, Ledger] = {}
        # What a device holds at once: slots, buffers, gradients of autograd and reduced ones.
        self._whole = _C.MemoryTally(None)
        for group in (group for facts in units for group in facts.groups):
            for ranks in (group.ranks, *((group.small.ranks,) if group.small else ())):
                self._ledgers.setdefault(ranks.key, make_ledger(ranks, self._whole))
        # A device finishes reductions when it needs their buffers, not when gradients come.
        self.is_on_device = all(ledger.has_streams for ledger in self._ledgers.values())
        self._overlaps = all(ledger.overlaps for ledger in self._ledgers.values())
        self._events = list(self._walk(root))
        self._last: list[_Unit] = []
        self._pending: list[tuple[_Unit, GroupFacts]] = []
        self._pools: set[GroupFacts] = set()  # whose gradient pool has memory, on the device

    def run(self) -> Traffic:
        """Plays steps; returns what the last one moved."""
        before = None
        for _ in range(_MAX_STEPS):
            moved: list[tuple[int, list[GroupFacts], list[GroupFacts]]] = []
            for syncs, times in self._micro_batches:
                self._gathers: list[GroupFacts] = []
                self._reductions: list[GroupFacts] = []
                self._syncs = syncs
                self._forward()
                self._backward()
                moved.append((times, self._gathers, self._reductions))
                for group in self._reductions:
                    self._ledger(group).has_gradients(group)
            self._drop_gradients()
            now = [(one.gather_slot_bytes, one.scratch_bytes, one.peak_gather_bytes) for one in self._ledgers.values()]
            if now == before:
                break
            before = now
        return Traffic(
            gathers=sum(times * len(gathers) for times, gathers, _ in moved),
            reductions=sum(times * len(reductions) for times, _, reductions in moved),
            gather_bytes=sum(times * sum(map(_gather_sent_bytes, gathers)) for times, gathers, _ in moved),
            reduce_bytes=sum(times * sum(map(_reduce_sent_bytes, groups)) for times, _, groups in moved),
            all_reduce_bytes=sum(map(_all_reduce_sent_bytes, moved[-1][2])),
        )

    def held(self, name: str) -> int:
        """One of ``HELD``."""
        return sum(getattr(ledger, name) for ledger in self._ledgers.values())

    @property
    def device_bytes(self) -> int:
        """The most that a device holds at once of slots, buffers and gradients."""
        return self._whole.peak_bytes

    # --- the order of things ---

    def _walk(self, root: nn.Module) -> Iterator[tuple[Event, _Unit, int]]:
        remaining = {id(unit): set(map(id, unit.facts.modules)) for unit in self._units}
        unit_of = {id(module): unit for unit in self._units for module in unit.facts.modules}
        users: dict[int, list[tuple[_Unit, int]]] = {}
        for unit in self._units:
            for index, owners in enumerate(unit.facts.owners):
                for owner in owners:
                    users.setdefault(owner, []).append((unit, index))
        visited: set[int] = set()
        is_traced = False  # some trainable parameter was used before

        def visit(module: nn.Module) -> Iterator[tuple[Event, _Unit, int]]:
            nonlocal is_traced
            visited.add(id(module))
            unit = unit_of.get(id(module))
            if unit is not None and len(remaining[id(unit)]) == len(unit.facts.modules):
                unit.has_node = is_traced
                yield Event.OPEN, unit, 0
            for user, index in users.get(id(module), ()):
                is_traced = True
                yield Event.USE, user, index
            for child in module.children():
                if id(child) not in visited:
                    yield from visit(child)
            if unit is not None:
                remaining[id(unit)].discard(id(module))
                if not remaining[id(unit)]:
                    unit.has_hook = is_traced
                    yield Event.CLOSE, unit, 0

        return visit(root)

    def _forward(self) -> None:
        order: list[_Unit] = []
        sequence: list[_Unit] = []
        cursor = 0
        for event, unit, _ in self._events:
            if event is Event.OPEN:
                unit.keeps_rows = False
                self._unshard(unit)
                sequence.append(unit)
                if unit in self._last[cursor:] and self._overlaps:
                    cursor = self._last.index(unit, cursor) + 1
                    if cursor < len(self._last):
                        self._last[cursor].keeps_rows = False
                        self._begin_unshard(self._last[cursor])
                else:
                    cursor = len(self._last)
            elif event is Event.CLOSE:
                if unit.facts.reshards_after_forward:
                    self._reshard(unit)
                    unit.keeps_rows = True
                unit.index = len(order)
                order.append(unit)
        for unit in self._units:
            if unit.state == "gathering":
                self._reshard(unit)
        self._last, self._order = sequence, order

    def _backward(self) -> None:
        for event, unit, index in reversed(self._events):
            if event is Event.CLOSE and unit.has_hook:
                self._unshard(unit)
                self._prefetch_backward(unit)
            elif event is Event.USE and unit.facts.groups[index] not in unit.open:
                if not self.is_on_device:
                    self._finish_pending()
                self._open_scratch(unit, unit.facts.groups[index])
            elif event is Event.OPEN and unit.has_node:
                unit.is_reduced = True
                if unit.facts.reshards_after_backward:
                    self._reshard(unit)
                if not self._syncs:
                    self._settle(unit)
                elif unit.open:
                    self._finish_pending()
                    for group in list(unit.open):
                        self._post(unit, group)
                    if not self._overlaps:
                        self._finish_pending()
        for unit in reversed(self._units):
            if not self._syncs:
                self._settle(unit)
            if unit.facts.reshards_after_backward:
                self._reshard(unit)
        self._flush()
        for unit in self._units:
            unit.is_reduced = False
            if unit.state == "gathering":
                self._reshard(unit)

    # --- parameters ---

    def _prefetch_backward(self, unit: _Unit) -> None:
        before = self._order[unit.index - 1] if unit.index > 0 else unit
        if before is not unit and not before.is_reduced:
            self._begin_unshard(before)

    def _sources(self, unit: _Unit) -> list[GroupFacts]:
        return [group.small if unit.keeps_rows and group.small else group for group in unit.facts.groups]

    def _begin_unshard(self, unit: _Unit) -> None:
        if unit.state != "sharded" or not unit.has_params:
            return
        unit.state = "gathering"
        for group in self._sources(unit):
            self._gathers.append(group)
            self._ledger(group).begin_gather(group)

    def _unshard(self, unit: _Unit) -> None:
        self._begin_unshard(unit)
        if unit.state == "gathering":
            for group in self._sources(unit):
                self._ledger(group).finish_gather(group)
            unit.state = "unsharded"

    def _reshard(self, unit: _Unit) -> None:
        if unit.state != "sharded":
            for group in self._sources(unit):
                self._ledger(group).release_gather(group)
        unit.state = "sharded"
        unit.keeps_rows = False

    # --- gradients ---

    def _open_scratch(self, unit: _Unit, group: GroupFacts) -> None:
        self._ledger(group).open_scratch(group, self._syncs)
        self._whole.take(group.gradient_bytes)
        unit.open.append(group)

    def _settle(self, unit: _Unit) -> None:
        """Without gradient sync: a device packs what autograd made; it stays until a backward reduces it."""
        for group in list(unit.open):
            ledger = self._ledger(group)
            if not ledger.is_packed(group):
                self._retire(ledger, ledger.reductions_before(group))
            if ledger.settle(group):
                self._whole.give_back(group.gradient_bytes)
                unit.open.remove(group)

    def _post(self, unit: _Unit, group: GroupFacts) -> None:
        ledger = self._ledger(group)
        self._retire(ledger, ledger.reductions_before(group))
        if ledger.packs_into_pool(group):
            self._take_pool(group)
        ledger.begin_reduce(group)
        self._whole.give_back(group.gradient_bytes)  # packed
        if group.reduces_in_place:
            self._take_pool(group)
        ledger.take_rows(group)
        self._retire(ledger, ledger.reductions_beside)
        self._reductions.append(group)
        self._pending.append((unit, group))

    def _retire(self, ledger: Ledger, num: int) -> None:
        if ledger.has_more_reductions(num):
            self._finish_pending()
            ledger.retire_reductions(num)

    def _take_pool(self, group: GroupFacts) -> None:
        if group not in self._pools and not group.offloads:
            self._pools.add(group)
            self._whole.take(group.gradient_pool_bytes)

    def _drop_gradients(self) -> None:
        self._whole.give_back(sum(group.gradient_pool_bytes for group in self._pools))
        self._pools.clear()
        for ledger in self._ledgers.values():
            ledger.forget_gradients()

    def _finish_pending(self) -> None:
        for unit, group in self._pending:
            self._take_pool(group)
            self._ledger(group).finish_reduce(group)
            unit.open.remove(group)
        self._pending.clear()

    def _flush(self) -> None:
        if not self.is_on_device:
            self._finish_pending()
        reduced = set(self._reductions)
        for unit in reversed(self._units):
            for group in unit.facts.groups:
                ledger = self._ledger(group)
                if (unit, group) in self._pending:
                    continue
                if not self._syncs:
                    continue
                if group in unit.open:
                    self._post(unit, group)
                elif group not in reduced and ledger.needs_empty_reduction(group):
                    # Over shared memory a peer may be behind, and what was posted here waits for it: the worst case.
                    if not ledger.may_wait:
                        self._finish_pending()
                    self._open_scratch(unit, group)
                    self._post(unit, group)
        self._finish_pending()
        for ledger in self._ledgers.values():
            ledger.end_backward()

    def _ledger(self, group: GroupFacts) -> Ledger:
        return self._ledgers[group.ranks.key]


def _gather_sent_bytes(group: GroupFacts) -> int:
    if group.ranks.transport.is_collective:  # around a ring everybody's segment but the next one's is passed on
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
