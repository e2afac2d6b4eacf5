"""Which memory each transport takes and when, in bytes only; the rules are the engine's own.

Sizes, slots, buffers, reductions on their way and their number come from ``csrc/core``, which the transports of
``csrc/engine/transport`` decide by as well. What stands here, and there, is the order of the calls: the engine's is
autograd's, which runs on tensors, so a plan of a model that has none cannot run it. Tests hold the two together: the
engine's ledger after real steps, of models that are listed and of ones that are drawn.
"""

from __future__ import annotations

import mmap

from fsdp2x.memory.facts import GroupFacts, Ranks
from fsdp2x.runtime.native import _C


def all_reduce_scratch_bytes(groups: list[GroupFacts]) -> int:
    """Scratches of the all-reduce over replicas of one host, some in turn, for groups in the order of their units."""
    ledgers: dict[int, tuple[_C.SlotLedger, list[int]]] = {}
    for group in [*reversed(groups), *reversed(groups)]:
        if not group.ranks.replicas_share:
            continue
        ledger, held = ledgers.setdefault(group.ranks.replicas, (_C.SlotLedger(mmap.PAGESIZE), []))
        if len(held) == _C.HostAllReduce.num_turns:
            ledger.release(held.pop(0))
        held.append(ledger.acquire(group.replica_segment_bytes))
    return sum(ledger.arena_bytes for ledger, _ in ledgers.values())


class Ledger:
    """What one transport holds. Its methods are the engine's calls; what is not overridden costs nothing."""

    has_streams = False
    overlaps = True  # gathers run ahead in forward, and reductions beside the next unit
    may_wait = (
        False  # what was posted in the root's callback waits for peers that are behind: collectives have an order
    )
    landing_bytes = resident_shard_bytes = own_gather_slot_bytes = 0

    def __init__(self, ranks: Ranks, slots: _C.SlotLedger | _C.BufferLedger) -> None:
        self._world = ranks.world
        self._gather = slots
        self._slots: dict[GroupFacts, int] = {}

    def begin_gather(self, group: GroupFacts) -> None:
        self._slots[group] = self._gather.acquire(max(group.slot_bytes, 1))

    def finish_gather(self, group: GroupFacts) -> None:
        pass

    def release_gather(self, group: GroupFacts) -> None:
        if (slot := self._slots.pop(group, None)) is not None:
            self._gather.release(slot)

    def open_scratch(self, group: GroupFacts, syncs: bool) -> None:
        pass

    def settle(self, group: GroupFacts) -> bool:
        """Gradients that wait for a later backward; whether those of autograd were freed by this call."""
        return False  # they were packed as they came

    def is_packed(self, group: GroupFacts) -> bool:
        return True

    def packs_into_pool(self, group: GroupFacts) -> bool:
        """Whether gradients are packed into the gradient pool."""
        return False

    def reductions_before(self, group: GroupFacts) -> int:
        """How many reductions may be on their way when the gradients of ``group`` are packed for one more."""
        return 0

    reductions_beside = 0  # while backward goes on

    def has_more_reductions(self, num: int) -> bool:
        return False

    def retire_reductions(self, num: int) -> None:
        """The compute waits for the oldest reductions until ``num`` are left on their way."""

    def begin_reduce(self, group: GroupFacts) -> None:
        pass

    def take_rows(self, group: GroupFacts) -> None:
        """Where the collective writes to; after the gradients are packed and freed."""

    def finish_reduce(self, group: GroupFacts) -> None:
        pass

    def end_backward(self) -> None:
        pass

    def has_gradients(self, group: GroupFacts) -> None:
        """From now on a reduction adds to what is in the gradient pool; see ``forget_gradients``."""

    def forget_gradients(self) -> None:
        pass

    def needs_empty_reduction(self, group: GroupFacts) -> bool:
        return group.reduces_unused

    @property
    def gather_slot_bytes(self) -> int:
        return self._gather.arena_bytes

    @property
    def peak_gather_bytes(self) -> int:
        return self._gather.peak_bytes

    @property
    def scratch_bytes(self) -> int:
        raise NotImplementedError


class HostLedger(Ledger):
    """Shared memory of one host's ranks, or one rank's own: gather slots and reduce scratches of whole pages."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks, _C.SlotLedger(mmap.PAGESIZE))
        self._scratch = _C.SlotLedger(mmap.PAGESIZE)
        self._scratches: dict[GroupFacts, int] = {}
        self.may_wait = ranks.world > 1

    def begin_gather(self, group: GroupFacts) -> None:
        if not group.rests:
            super().begin_gather(group)

    def open_scratch(self, group: GroupFacts, syncs: bool) -> None:
        self._scratches[group] = self._scratch.acquire(group.scratch_bytes if syncs else group.wide_scratch_bytes)

    def finish_reduce(self, group: GroupFacts) -> None:
        self._scratch.release(self._scratches.pop(group))

    def needs_empty_reduction(self, group: GroupFacts) -> bool:
        return self._world > 1 or group.reduces_unused

    @property
    def own_gather_slot_bytes(self) -> int:
        return -(-self._gather.arena_bytes // self._world)

    @property
    def scratch_bytes(self) -> int:
        return self._scratch.arena_bytes


class GroupLedger(Ledger):
    """A process group on the CPU: nothing is kept, and a reduction is waited for at once.

    ``scratch_bytes`` is the most memory there ever was, that of the slots included.
    """

    overlaps = False

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks, _C.SlotLedger(_C.ALIGN_BYTES))
        self._tally = _C.MemoryTally(None)
        self._held: dict[tuple[str, GroupFacts], int] = {}

    def _hold(self, what: str, group: GroupFacts, num_bytes: int) -> None:
        self._tally.take(num_bytes)
        self._held[what, group] = num_bytes

    def _drop(self, group: GroupFacts, *names: str) -> None:
        for what in names:
            self._tally.give_back(self._held.pop((what, group), 0))

    def begin_gather(self, group: GroupFacts) -> None:
        if self._world == 1 or group.gather_segment_bytes == 0:
            self._open_slot(group)
        else:
            self._hold("gathered", group, group.gather_segment_bytes * self._world)

    def _open_slot(self, group: GroupFacts) -> None:
        super().begin_gather(group)
        self._hold("slot", group, self._gather.capacity(self._slots[group]))

    def finish_gather(self, group: GroupFacts) -> None:
        if group not in self._slots:
            self._open_slot(group)
            self._drop(group, "gathered")

    def release_gather(self, group: GroupFacts) -> None:
        self._drop(group, "gathered", "slot")
        super().release_gather(group)

    def open_scratch(self, group: GroupFacts, syncs: bool) -> None:
        self._hold("packed", group, group.reduce_segment_bytes * self._world)

    def begin_reduce(self, group: GroupFacts) -> None:
        if self._world == 1:
            return
        if group.coded_reduce_bytes:
            self._hold("sent", group, group.coded_reduce_bytes * self._world)
            self._drop(group, "packed")
            self._hold("received", group, group.coded_reduce_bytes * self._world)
        else:
            self._hold("rows", group, group.reduce_segment_bytes)

    def finish_reduce(self, group: GroupFacts) -> None:
        if group.coded_reduce_bytes:
            self._hold("rows", group, group.reduce_segment_bytes)
        self._drop(group, "packed", "sent", "received", "rows")

    @property
    def scratch_bytes(self) -> int:
        return self._tally.peak_bytes


class DeviceLedger(Ledger):
    """A process group of an accelerator: slots, what is gathered packed, gradients in flight, reduced rows, uploads.

    And what the host keeps for units that offload: rows that have arrived and are not cast yet. ``whole`` counts what a
    step holds of the device at once, with what its caller adds.
    """

    has_streams = True

    def __init__(self, ranks: Ranks, whole: _C.MemoryTally) -> None:
        keeps = ranks.registers_memory
        super().__init__(ranks, _C.BufferLedger(keeps, whole))
        self._tally = _C.MemoryTally(whole)
        pools = (_C.BufferLedger(keeps, self._tally) for _ in range(4))
        self._staging, self._buffers, self._segments, self._uploads = pools
        self._residents = _C.BufferLedger(keeps, _C.MemoryTally(None))
        self._resident_groups: set[GroupFacts] = set()
        # What a gather needs besides its slot.
        self._gathering: dict[GroupFacts, list[tuple[_C.BufferLedger, int]]] = {}
        self._queue = _C.ReductionQueue()
        if ranks.max_reduce_buffers is not None:
            self._queue.set_max_buffers(ranks.max_reduce_buffers)
        self._numbers: dict[GroupFacts, int] = {}  # of the last reduction
        self._rows: dict[GroupFacts, int] = {}  # segments of reductions that are not finished
        self._summed: set[GroupFacts] = set()  # whose gradients of this step are in their pool already
        self._packed: dict[GroupFacts, int] = {}  # buffers with gradients that came without gradient sync
        self._landing: list[int] = []  # sizes of the host's blocks whose rows are on their way
        self._blocks: list[int] = []  # free ones

    def begin_gather(self, group: GroupFacts) -> None:
        super().begin_gather(group)
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
        super().release_gather(group)

    def _pack(self, group: GroupFacts) -> int:
        return self._buffers.acquire(group.reduce_segment_bytes * self._world)

    def settle(self, group: GroupFacts) -> bool:
        """Packs gradients that wait for a later backward into a buffer, to be reduced from there."""
        if group not in self._packed:
            self._packed[group] = self._pack(group)
        return True

    def is_packed(self, group: GroupFacts) -> bool:
        return group in self._packed

    def has_gradients(self, group: GroupFacts) -> None:
        self._summed.add(group)

    def forget_gradients(self) -> None:
        self._summed.clear()

    def _ends_in_pool(self, group: GroupFacts) -> bool:
        return group.reduces_in_place and group not in self._summed

    def packs_into_pool(self, group: GroupFacts) -> bool:
        alone = self._world == 1 and group.ranks.replicas == 1
        return alone and self._ends_in_pool(group) and group not in self._packed

    def begin_reduce(self, group: GroupFacts) -> None:
        if self.packs_into_pool(group):
            return
        buffer = self._packed.pop(group) if group in self._packed else self._pack(group)
        self._numbers[group] = self._queue.begin(buffer, self._buffers.bytes_of(buffer))

    def take_rows(self, group: GroupFacts) -> None:
        if self._world > 1 and not self._ends_in_pool(group):  # or it is the gradient pool
            self._rows[group] = self._segments.acquire(group.reduce_segment_bytes)
        if group.coded_reduce_bytes:  # what is sent and what is received
            segment = self._segments.acquire(2 * group.coded_reduce_bytes * self._world)
            self._queue.add_segment(self._numbers[group], segment)

    def reductions_before(self, group: GroupFacts) -> int:
        if group in self._packed:
            return len(self._queue)
        given_back = None if group in self._slots else group.slot_bytes
        return self._queue.allowed_before(group.reduce_segment_bytes * self._world, given_back)

    @property
    def reductions_beside(self) -> int:
        return self._queue.allowed_beside

    def has_more_reductions(self, num: int) -> bool:
        return len(self._queue) > num

    def retire_reductions(self, num: int) -> None:
        while len(self._queue) > num:
            _, buffer, segments = self._queue.pop()
            self._buffers.release(buffer)
            for segment in segments:
                self._segments.release(segment)

    def finish_reduce(self, group: GroupFacts) -> None:
        if group in self._rows:
            segment = self._rows.pop(group)
            if not self._queue.add_segment(self._numbers[group], segment):
                self._segments.release(segment)
        if group.offloads:
            if len(self._landing) >= self._queue.max_buffers:
                self._land()
            landing_bytes = group.landing_bytes or (group.reduced_bytes if group in self._summed else 0)
            if landing_bytes in self._blocks:
                self._blocks.remove(landing_bytes)
            else:
                self.landing_bytes += landing_bytes
            self._landing.append(landing_bytes)

    def _land(self) -> None:
        if size := self._landing.pop(0):
            self._blocks.append(size)

    def end_backward(self) -> None:
        while self._landing:
            self._land()
        self.retire_reductions(0)

    @property
    def gather_slot_bytes(self) -> int:
        return self._gather.standing_bytes

    @property
    def own_gather_slot_bytes(self) -> int:
        return self.gather_slot_bytes

    @property
    def scratch_bytes(self) -> int:
        return self._tally.peak_bytes

    @property
    def resident_shard_bytes(self) -> int:
        """The device's copies of shards that are the host's."""
        return self._residents.bytes


def make_ledger(ranks: Ranks, whole: _C.MemoryTally) -> Ledger:
    """The ledger of the transport that these ranks share; ``whole``: see ``DeviceLedger``."""
    if not ranks.transport.is_collective:
        return HostLedger(ranks)
    return DeviceLedger(ranks, whole) if ranks.has_streams else GroupLedger(ranks)
