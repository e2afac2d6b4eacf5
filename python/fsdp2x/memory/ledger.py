"""Which memory each transport takes and when: the rules of the engine's slot ledgers and staging, in bytes only.

Twins of ``csrc/core/slots.cpp``, ``csrc/engine/host_transport.cpp`` and ``csrc/engine/group_transport.cpp``; tests hold
them to what the engine's ledger says after real steps.
"""

from __future__ import annotations

import mmap

from fsdp2x.memory.facts import ALIGN_BYTES, GroupFacts, Ranks, align_up


class SlotLedger:
    """Slots of whole pages that are kept. A free one serves when it is large enough and at most twice too large."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._capacities: list[int] = []
        self._owned: set[int] = set()
        self.peak_bytes = 0

    @property
    def arena_bytes(self) -> int:
        return sum(self._capacities)

    def acquire(self, num_bytes: int) -> int:
        needed = align_up(num_bytes, self._page_bytes)
        fitting = [
            (capacity, slot)
            for slot, capacity in enumerate(self._capacities)
            if slot not in self._owned and needed <= capacity <= 2 * needed
        ]
        if fitting:
            slot = min(fitting)[1]
        else:
            slot = len(self._capacities)
            self._capacities.append(needed)
        self._owned.add(slot)
        self.peak_bytes = max(self.peak_bytes, sum(self._capacities[owned] for owned in self._owned))
        return slot

    def release(self, slot: int) -> None:
        self._owned.remove(slot)


class HostLedger:
    """Shared memory of one host's ranks, or one rank's own: gather slots and reduce scratches of whole pages."""

    def __init__(self, ranks: Ranks) -> None:
        self._gather, self._scratch = SlotLedger(mmap.PAGESIZE), SlotLedger(mmap.PAGESIZE)
        self._slots: dict[GroupFacts, int] = {}
        self._scratches: dict[GroupFacts, int] = {}
        self.num_sharers = ranks.world  # of the gather slots
        self._world = ranks.world

    def begin_gather(self, group: GroupFacts) -> None:
        self._slots[group] = self._gather.acquire(max(group.slot_bytes, 1))

    def finish_gather(self, group: GroupFacts) -> None:
        pass

    def release_gather(self, group: GroupFacts) -> None:
        self._gather.release(self._slots.pop(group))

    def open_scratch(self, group: GroupFacts) -> None:
        self._scratches[group] = self._scratch.acquire(group.scratch_bytes)

    def begin_reduce(self, group: GroupFacts) -> None:
        pass

    def finish_reduce(self, group: GroupFacts) -> None:
        self._scratch.release(self._scratches.pop(group))

    def needs_empty_reduction(self, group: GroupFacts) -> bool:
        return self._world > 1 or group.reduces_unused

    @property
    def gather_slot_bytes(self) -> int:
        return self._gather.arena_bytes

    @property
    def peak_gather_bytes(self) -> int:
        return self._gather.peak_bytes

    @property
    def scratch_bytes(self) -> int:
        return self._scratch.arena_bytes


class GroupLedger:
    """A process group: slots, and the staging of gathers and reductions, which is reused and never freed."""

    def __init__(self, ranks: Ranks) -> None:
        self._gather = SlotLedger(ALIGN_BYTES)
        self._slots: dict[GroupFacts, int] = {}
        self._free: list[int] = []
        self._gathering: dict[GroupFacts, int] = {}
        self._reducing: dict[GroupFacts, list[int]] = {}
        self.scratch_bytes = 0  # staging of both kinds
        self.num_sharers = 1  # of the gather slots
        self._world = ranks.world

    def _take(self, num_bytes: int) -> int:
        fitting = [free for free in self._free if num_bytes <= free <= 2 * num_bytes]
        if fitting:
            self._free.remove(min(fitting))
            return min(fitting)
        self.scratch_bytes += num_bytes
        return num_bytes

    def _is_local(self, group: GroupFacts) -> bool:
        return self._world == 1 or group.gather_segment_bytes == 0

    def _open_slot(self, group: GroupFacts) -> None:
        self._slots[group] = self._gather.acquire(max(group.slot_bytes, 1))

    def begin_gather(self, group: GroupFacts) -> None:
        if self._is_local(group):
            self._open_slot(group)
        else:
            self._gathering[group] = self._take(group.gather_segment_bytes * self._world)

    def finish_gather(self, group: GroupFacts) -> None:
        if not self._is_local(group):
            self._open_slot(group)
            self._free.append(self._gathering.pop(group))

    def release_gather(self, group: GroupFacts) -> None:
        if group in self._gathering:
            self._free.append(self._gathering.pop(group))
        if group in self._slots:
            self._gather.release(self._slots.pop(group))

    def open_scratch(self, group: GroupFacts) -> None:
        self._reducing[group] = [self._take(group.reduce_segment_bytes * self._world)]

    def begin_reduce(self, group: GroupFacts) -> None:
        if self._world > 1:
            self._reducing[group].append(self._take(group.reduce_segment_bytes))

    def finish_reduce(self, group: GroupFacts) -> None:
        self._free += self._reducing.pop(group)

    def needs_empty_reduction(self, group: GroupFacts) -> bool:
        return group.reduces_unused

    @property
    def gather_slot_bytes(self) -> int:
        return self._gather.arena_bytes

    @property
    def peak_gather_bytes(self) -> int:
        return self._gather.peak_bytes


Ledger = HostLedger | GroupLedger


def make_ledger(ranks: Ranks) -> Ledger:
    """The ledger of the transport that these ranks share."""
    return GroupLedger(ranks) if ranks.transport == "process_group" else HostLedger(ranks)
