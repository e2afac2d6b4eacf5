"""Which memory each transport takes and when: the rules of the engine's slot ledgers and staging, in bytes only.

Twins of ``csrc/core/slots.cpp`` and of the transports in ``csrc/engine``: ``host_transport.cpp``,
``group_transport.cpp`` and ``device_transport.cpp``; tests hold them to what the engine's ledger says after real steps.
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

    is_full = False
    landing_bytes = resident_shard_bytes = 0

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

    def end_backward(self) -> None:
        pass

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
    """A process group on the CPU: nothing is kept, and a reduction is waited for at once."""

    overlaps = False
    is_full = False
    landing_bytes = resident_shard_bytes = 0

    def __init__(self, ranks: Ranks) -> None:
        self._gather = SlotLedger(ALIGN_BYTES)
        self._slots: dict[GroupFacts, tuple[int, int]] = {}  # slot, and the size of its memory
        self._gathering: dict[GroupFacts, int] = {}
        self._reducing: dict[GroupFacts, list[int]] = {}
        self.scratch_bytes = 0  # the most memory there ever was, that of the slots included
        self._memory_bytes = 0
        self._world = ranks.world

    def _take(self, num_bytes: int) -> int:
        self._memory_bytes += num_bytes
        self.scratch_bytes = max(self.scratch_bytes, self._memory_bytes)
        return num_bytes

    def _give_back(self, *sizes: int) -> None:
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

    def end_backward(self) -> None:
        pass

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


class _Buffers:
    """Device memory that is lent again and again, in steps of a sixteenth, so that like units fit each other."""

    def __init__(self) -> None:
        self._capacities: list[int] = []
        self._owned: set[int] = set()
        self.peak_bytes = 0

    @property
    def num_bytes(self) -> int:
        return sum(self._capacities)

    def acquire(self, num_bytes: int) -> int:
        power = 1 << max(num_bytes - 1, 0).bit_length()
        rounded = align_up(num_bytes, max(power // 32, ALIGN_BYTES))
        fitting = [
            (capacity, number)
            for number, capacity in enumerate(self._capacities)
            if number not in self._owned and num_bytes <= capacity <= 2 * rounded
        ]
        if fitting:
            number = min(fitting)[1]
        else:
            number = len(self._capacities)
            self._capacities.append(rounded)
        self._owned.add(number)
        self.peak_bytes = max(self.peak_bytes, sum(self._capacities[owned] for owned in self._owned))
        return number

    def release(self, number: int) -> None:
        self._owned.remove(number)


class DeviceLedger:
    """A process group of an accelerator: slots, what is gathered packed, gradients in flight, reduced rows, uploads.

    And what the host keeps for units that offload: rows that have arrived and are not cast yet.
    """

    overlaps = True
    may_wait = False  # collectives come in one order
    landing_bytes = 0  # blocks of the host

    def __init__(self, ranks: Ranks) -> None:
        self._gather, self._staging, self._buffers, self._segments, self._uploads = (_Buffers() for _ in range(5))
        self._slots: dict[GroupFacts, int] = {}
        self._reducing: dict[GroupFacts, int] = {}
        self._in_flight: list[int] = []
        self._world = ranks.world
        self._max_reduce_buffers = ranks.max_reduce_buffers
        self._residents = _Buffers()
        self._resident_groups: set[GroupFacts] = set()
        self._landing: list[int] = []  # sizes of blocks whose rows are on their way
        self._blocks: list[int] = []  # free ones

    def begin_gather(self, group: GroupFacts) -> None:
        self._slots[group] = self._gather.acquire(max(group.slot_bytes, 1))
        if group.keeps_shards and group.shard_pool_bytes:
            if group not in self._resident_groups:
                self._resident_groups.add(group)
                self._residents.acquire(group.shard_pool_bytes)
        elif group.offloads and group.shard_pool_bytes:
            self._uploads.release(self._uploads.acquire(group.shard_pool_bytes))
        if self._world > 1 and group.gather_segment_bytes and group.staging_bytes:
            self._staging.release(self._staging.acquire(group.staging_bytes))

    def finish_gather(self, group: GroupFacts) -> None:
        pass

    def release_gather(self, group: GroupFacts) -> None:
        self._gather.release(self._slots.pop(group))

    def open_scratch(self, group: GroupFacts) -> None:
        pass  # gradients are packed when they are reduced

    def begin_reduce(self, group: GroupFacts) -> None:
        if self._world == 1 and group.ranks.replicas == 1 and group.reduces_in_place:
            return  # packed into the gradient pool
        while self.is_full:
            self._buffers.release(self._in_flight.pop(0))
        self._in_flight.append(self._buffers.acquire(group.reduce_segment_bytes * self._world))
        if self._world > 1 and not group.reduces_in_place:
            self._reducing[group] = self._segments.acquire(group.reduce_segment_bytes)

    @property
    def is_full(self) -> bool:
        """Whether all pending reductions are finished before the next one is begun."""
        return len(self._in_flight) >= self._max_reduce_buffers

    def finish_reduce(self, group: GroupFacts) -> None:
        if group in self._reducing:
            self._segments.release(self._reducing.pop(group))
        if group.offloads:
            if len(self._landing) >= self._max_reduce_buffers:
                self._land()
            if group.landing_bytes in self._blocks:
                self._blocks.remove(group.landing_bytes)
            elif group.landing_bytes:
                self.landing_bytes += group.landing_bytes
            self._landing.append(group.landing_bytes)

    def _land(self) -> None:
        if size := self._landing.pop(0):
            self._blocks.append(size)

    def end_backward(self) -> None:
        while self._landing:
            self._land()
        while self._in_flight:
            self._buffers.release(self._in_flight.pop())

    def needs_empty_reduction(self, group: GroupFacts) -> bool:
        return group.reduces_unused

    @property
    def gather_slot_bytes(self) -> int:
        return self._gather.num_bytes

    @property
    def own_gather_slot_bytes(self) -> int:
        return self._gather.num_bytes

    @property
    def peak_gather_bytes(self) -> int:
        return self._gather.peak_bytes

    @property
    def scratch_bytes(self) -> int:
        others = (self._staging, self._buffers, self._segments, self._uploads)
        return sum(buffers.num_bytes for buffers in others)

    @property
    def resident_shard_bytes(self) -> int:
        """The device's copies of shards that are the host's."""
        return self._residents.num_bytes


Ledger = HostLedger | GroupLedger | DeviceLedger


def make_ledger(ranks: Ranks) -> Ledger:
    """The ledger of the transport that these ranks share."""
    if ranks.transport != "process_group":
        return HostLedger(ranks)
    return DeviceLedger(ranks) if ranks.has_streams else GroupLedger(ranks)
