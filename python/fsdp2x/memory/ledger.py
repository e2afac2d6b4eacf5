"""Which memory each transport takes and when, in bytes only. Slots and sizes are counted by the engine's own ledger.

Twins of the rooms in ``csrc/engine/transport``: ``shm``, ``process_group`` and ``device``. Tests hold them to what the
engine's own ledger says after real steps, of models that are listed and of ones that are drawn.
"""

from __future__ import annotations

import mmap

from fsdp2x.memory.facts import GroupFacts, Ranks
from fsdp2x.runtime.native import _C


def all_reduce_scratch_bytes(groups: list[GroupFacts]) -> int:
    """Scratches of the all-reduce over replicas of one host, two in turn, for groups in the order of their units."""
    ledgers: dict[int, tuple[_C.SlotLedger, list[int]]] = {}
    for group in [*reversed(groups), *reversed(groups)]:
        if not group.ranks.replicas_share:
            continue
        ledger, held = ledgers.setdefault(group.ranks.replicas, (_C.SlotLedger(mmap.PAGESIZE), []))
        if len(held) == 2:
            ledger.release(held.pop(0))
        held.append(ledger.acquire(group.replica_segment_bytes))
    return sum(ledger.arena_bytes for ledger, _ in ledgers.values())


class HostLedger:
    """Shared memory of one host's ranks, or one rank's own: gather slots and reduce scratches of whole pages."""

    landing_bytes = resident_shard_bytes = 0

    def __init__(self, ranks: Ranks) -> None:
        self._gather, self._scratch = _C.SlotLedger(mmap.PAGESIZE), _C.SlotLedger(mmap.PAGESIZE)
        self._slots: dict[GroupFacts, int] = {}
        self._scratches: dict[GroupFacts, int] = {}
        self._world = ranks.world

    def begin_gather(self, group: GroupFacts) -> None:
        self._slots[group] = self._gather.acquire(max(group.slot_bytes, 1))

    def finish_gather(self, group: GroupFacts) -> None:
        pass

    def release_gather(self, group: GroupFacts) -> None:
        self._gather.release(self._slots.pop(group))

    def open_scratch(self, group: GroupFacts, syncs: bool) -> None:
        self._scratches[group] = self._scratch.acquire(group.scratch_bytes if syncs else group.wide_scratch_bytes)

    def settle(self, group: GroupFacts) -> bool:
        """Gradients that wait for a later backward; whether those of autograd were freed by this call."""
        return False  # they were packed as they came

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
    landing_bytes = resident_shard_bytes = 0

    def __init__(self, ranks: Ranks) -> None:
        self._gather = _C.SlotLedger(_C.ALIGN_BYTES)
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

    def open_scratch(self, group: GroupFacts, syncs: bool) -> None:
        self._reducing[group] = [self._take(group.reduce_segment_bytes * self._world)]

    def settle(self, group: GroupFacts) -> bool:
        return False

    def begin_reduce(self, group: GroupFacts) -> None:
        if self._world == 1:
            return
        if not group.coded_reduce_bytes:
            self._reducing[group].append(self._take(group.reduce_segment_bytes))
            return
        packed = self._reducing[group]
        self._reducing[group] = [self._take(group.coded_reduce_bytes * self._world)]
        self._give_back(*packed)
        self._reducing[group].append(self._take(group.coded_reduce_bytes * self._world))

    def finish_reduce(self, group: GroupFacts) -> None:
        if group.coded_reduce_bytes:
            self._reducing[group].append(self._take(group.reduce_segment_bytes))
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


class DeviceLedger:
    """A process group of an accelerator: slots, what is gathered packed, gradients in flight, reduced rows, uploads.

    And what the host keeps for units that offload: rows that have arrived and are not cast yet. ``whole`` counts what a
    step holds of the device at once, with what its caller adds.
    """

    overlaps = True
    may_wait = False  # collectives come in one order
    landing_bytes = 0  # blocks of the host

    def __init__(self, ranks: Ranks, whole: _C.MemoryTally) -> None:
        keeps = ranks.registers_memory
        self._tally = _C.MemoryTally(whole)
        self._gather = _C.BufferLedger(keeps, whole)
        pools = (_C.BufferLedger(keeps, self._tally) for _ in range(4))
        self._staging, self._buffers, self._segments, self._uploads = pools
        self._slots: dict[GroupFacts, int] = {}
        # What a gather needs besides its slot.
        self._gathering: dict[GroupFacts, list[tuple[_C.BufferLedger, int]]] = {}
        self._reducing: dict[GroupFacts, int] = {}
        self._summed: set[GroupFacts] = set()  # whose gradients of this step are in their pool already
        self._packed: dict[GroupFacts, int] = {}  # buffers with gradients that came without gradient sync
        self._in_flight: list[tuple[GroupFacts, list[tuple[_C.BufferLedger, int]]]] = []
        self._world = ranks.world
        self._window = _C.ReductionWindow()
        if ranks.max_reduce_buffers is not None:
            self._window.set_max_buffers(ranks.max_reduce_buffers)
        self._residents = _C.BufferLedger(keeps, _C.MemoryTally(None))
        self._resident_groups: set[GroupFacts] = set()
        self._landing: list[int] = []  # sizes of blocks whose rows are on their way
        self._blocks: list[int] = []  # free ones

    def begin_gather(self, group: GroupFacts) -> None:
        self._slots[group] = self._gather.acquire(max(group.slot_bytes, 1))
        aside = self._gathering[group] = []
        if group.keeps_shards and group.shard_pool_bytes:
            if group not in self._resident_groups:
                self._resident_groups.add(group)
                self._residents.acquire(group.shard_pool_bytes)
        elif group.offloads and group.shard_pool_bytes:
            aside.append((self._uploads, self._uploads.acquire(group.shard_pool_bytes)))
        if self._world > 1 and group.gather_segment_bytes and group.staging_bytes:
            aside.append((self._staging, self._staging.acquire(group.staging_bytes)))

    def finish_gather(self, group: GroupFacts) -> None:
        for buffers, number in self._gathering.pop(group, ()):
            buffers.release(number)

    def release_gather(self, group: GroupFacts) -> None:
        self.finish_gather(group)
        self._gather.release(self._slots.pop(group))

    def open_scratch(self, group: GroupFacts, syncs: bool) -> None:
        pass  # gradients are packed when they are reduced

    def settle(self, group: GroupFacts) -> bool:
        """Packs gradients that wait for a later backward into a buffer, to be reduced from there."""
        if group not in self._packed:
            self._packed[group] = self._buffers.acquire(group.reduce_segment_bytes * self._world)
        return True

    def is_packed(self, group: GroupFacts) -> bool:
        return group in self._packed

    def has_gradients(self, group: GroupFacts) -> None:
        """From now on a reduction adds to what is in the gradient pool, which no collective can do; see `forget`."""
        self._summed.add(group)

    def forget_gradients(self) -> None:
        self._summed.clear()

    def _ends_in_pool(self, group: GroupFacts) -> bool:
        return group.reduces_in_place and group not in self._summed

    def begin_reduce(self, group: GroupFacts) -> None:
        if self.packs_into_pool(group):
            return
        number = self._packed.pop(group, None)
        if number is None:
            number = self._buffers.acquire(group.reduce_segment_bytes * self._world)
        self._in_flight.append((group, [(self._buffers, number)]))

    def take_rows(self, group: GroupFacts) -> None:
        """Where the collective writes to, if not into the gradient pool; after the gradients are packed and freed."""
        if self._world > 1 and not self._ends_in_pool(group):
            self._reducing[group] = self._segments.acquire(group.reduce_segment_bytes)

    def packs_into_pool(self, group: GroupFacts) -> bool:
        """Whether gradients are packed into the gradient pool: of one rank alone."""
        plain = self._world == 1 and group.ranks.replicas == 1 and self._ends_in_pool(group)
        return plain and group not in self._packed

    def reductions_before(self, group: GroupFacts) -> int:
        """How many reductions may be on their way when the gradients of ``group`` are packed for one more."""
        if group in self._packed:
            return len(self._in_flight)
        in_flight = sum(buffers.bytes_of(number) for _, ((buffers, number), *_) in self._in_flight)
        given_back = None if group in self._slots else group.slot_bytes
        return self._window.before(group.reduce_segment_bytes * self._world, in_flight, given_back)

    @property
    def reductions_beside(self) -> int:
        """How many may be while backward goes on."""
        return self._window.beside

    def has_more_reductions(self, num: int) -> bool:
        return len(self._in_flight) > num

    def retire_reductions(self, num: int) -> list[GroupFacts]:
        """Of ``num`` and more that are on their way the compute waits for the oldest: whose they are."""
        retired = []
        while self.has_more_reductions(num):
            group, lent = self._in_flight.pop(0)
            retired.append(group)
            for buffers, number in lent:
                buffers.release(number)
        return retired

    def finish_reduce(self, group: GroupFacts) -> None:
        if group in self._reducing:
            lent = (self._segments, self._reducing.pop(group))
            if held := [held for owner, held in self._in_flight if owner is group]:
                held[-1].append(lent)
            else:
                self._segments.release(lent[1])
        if group.offloads:
            if len(self._landing) >= self._window.max_buffers:
                self._land()
            landing_bytes = group.landing_bytes or (group.reduced_bytes if group in self._summed else 0)
            if landing_bytes in self._blocks:
                self._blocks.remove(landing_bytes)
            elif landing_bytes:
                self.landing_bytes += landing_bytes
            self._landing.append(landing_bytes)

    def _land(self) -> None:
        if size := self._landing.pop(0):
            self._blocks.append(size)

    def end_backward(self) -> None:
        while self._landing:
            self._land()
        self.retire_reductions(0)

    def needs_empty_reduction(self, group: GroupFacts) -> bool:
        return group.reduces_unused

    @property
    def gather_slot_bytes(self) -> int:
        return self._gather.standing_bytes

    @property
    def own_gather_slot_bytes(self) -> int:
        return self.gather_slot_bytes

    @property
    def peak_gather_bytes(self) -> int:
        return self._gather.peak_bytes

    @property
    def scratch_bytes(self) -> int:
        return self._tally.peak_bytes

    @property
    def resident_shard_bytes(self) -> int:
        """The device's copies of shards that are the host's."""
        return self._residents.bytes


Ledger = HostLedger | GroupLedger | DeviceLedger


def make_ledger(ranks: Ranks, whole: _C.MemoryTally) -> Ledger:
    """The ledger of the transport that these ranks share; ``whole``: see ``DeviceLedger``."""
    if ranks.transport != "process_group":
        return HostLedger(ranks)
    return DeviceLedger(ranks, whole) if ranks.has_streams else GroupLedger(ranks)
