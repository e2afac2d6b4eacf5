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

    def capacity(self, slot: int) -> int:
        return self._capacities[slot]

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


def all_reduce_scratch_bytes(groups: list[GroupFacts]) -> int:
    """Scratches of the all-reduce over replicas of one host, two in turn, for groups in the order of their units."""
    ledgers: dict[int, tuple[SlotLedger, list[int]]] = {}
    for group in [*reversed(groups), *reversed(groups)]:
        if not group.ranks.replicas_share:
            continue
        ledger, held = ledgers.setdefault(group.ranks.replicas, (SlotLedger(mmap.PAGESIZE), []))
        if len(held) == 2:
            ledger.release(held.pop(0))
        held.append(ledger.acquire(group.replica_segment_bytes))
    return sum(ledger.arena_bytes for ledger, _ in ledgers.values())


class HostLedger:
    """Shared memory of one host's ranks, or one rank's own: gather slots and reduce scratches of whole pages."""

    def __init__(self, ranks: Ranks) -> None:
        self._gather, self._scratch = SlotLedger(mmap.PAGESIZE), SlotLedger(mmap.PAGESIZE)
        self._slots: dict[GroupFacts, int] = {}
        self._scratches: dict[GroupFacts, int] = {}
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
    def overlaps(self) -> bool:
        """Whether gathers run ahead in forward, and reductions beside the next unit."""
        return True

    @property
    def may_wait(self) -> bool:
        """Whether what was posted in the root's callback may have to wait for peers that are behind."""
        return self._world > 1

    @property
    def gather_slot_bytes(self) -> int:
        return self._gather.arena_bytes

    @property
    def own_gather_slot_bytes(self) -> int:
        return -(-self._gather.arena_bytes // self._world)

    @property
    def peak_gather_bytes(self) -> int:
        return self._gather.peak_bytes

    @property
    def scratch_bytes(self) -> int:
        return self._scratch.arena_bytes


class GroupLedger:
    """A process group: slots, gathers and reductions take their memory from one free list, which is never emptied; on
    the CPU there is none, and a reduction is waited for at once."""

    def __init__(self, ranks: Ranks) -> None:
        self._gather = SlotLedger(ALIGN_BYTES)
        self._slots: dict[GroupFacts, tuple[int, int]] = {}  # slot, and the size of its memory
        self._free: list[int] = []
        self._gathering: dict[GroupFacts, int] = {}
        self._reducing: dict[GroupFacts, list[int]] = {}
        self.scratch_bytes = 0  # the most memory there ever was, that of the slots included
        self._memory_bytes = 0
        self._world = ranks.world
        self.overlaps = not ranks.on_cpu

    def _take(self, num_bytes: int) -> int:
        fitting = [free for free in self._free if num_bytes <= free <= 2 * num_bytes]
        if fitting:
            self._free.remove(min(fitting))
            return min(fitting)
        # In steps of a sixteenth, so that what like units need fits each other.
        power = 1 << max(num_bytes - 1, 0).bit_length()
        rounded = align_up(num_bytes, max(power // 32, ALIGN_BYTES)) if self.overlaps else num_bytes
        self._memory_bytes += rounded
        self.scratch_bytes = max(self.scratch_bytes, self._memory_bytes)
        return rounded

    def _give_back(self, *sizes: int) -> None:
        if self.overlaps:
            self._free += sizes
        else:
            self._memory_bytes -= sum(sizes)

    def _is_local(self, group: GroupFacts) -> bool:
        return self._world == 1 or group.gather_segment_bytes == 0

    def _open_slot(self, group: GroupFacts) -> None:
        slot = self._gather.acquire(max(group.slot_bytes, 1))
        self._slots[group] = slot, self._take(self._gather.capacity(slot))

    def begin_gather(self, group: GroupFacts) -> None:
        if self._is_local(group):
            self._open_slot(group)
        else:
            self._gathering[group] = self._take(group.gather_segment_bytes * self._world)

    def finish_gather(self, group: GroupFacts) -> None:
        if not self._is_local(group):
            self._open_slot(group)
            self._give_back(self._gathering.pop(group))

    def release_gather(self, group: GroupFacts) -> None:
        if group in self._gathering:
            self._give_back(self._gathering.pop(group))
        if group in self._slots:
            slot, num_bytes = self._slots.pop(group)
            self._gather.release(slot)
            self._give_back(num_bytes)

    def open_scratch(self, group: GroupFacts) -> None:
        self._reducing[group] = [self._take(group.reduce_segment_bytes * self._world)]

    def begin_reduce(self, group: GroupFacts) -> None:
        if self._world > 1:
            self._reducing[group].append(self._take(group.reduce_segment_bytes))

    def finish_reduce(self, group: GroupFacts) -> None:
        self._give_back(*self._reducing.pop(group))

    def needs_empty_reduction(self, group: GroupFacts) -> bool:
        return group.reduces_unused

    @property
    def may_wait(self) -> bool:
        return False  # collectives come in one order: each is finished before the next one is posted

    @property
    def gather_slot_bytes(self) -> int:
        return self._gather.arena_bytes

    @property
    def own_gather_slot_bytes(self) -> int:
        return 0  # counted in scratch_bytes

    @property
    def peak_gather_bytes(self) -> int:
        return self._gather.peak_bytes


Ledger = HostLedger | GroupLedger


def make_ledger(ranks: Ranks) -> Ledger:
    """The ledger of the transport that these ranks share."""
    return GroupLedger(ranks) if ranks.transport == "process_group" else HostLedger(ranks)
