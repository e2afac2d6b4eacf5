"""Ring memory that buckets are gathered into alternately: shared between the ranks of a host, or separate for each.

A bucket holds its parameters one after another, each complete and contiguous. Two consecutive buckets are there at a
time. They begin and end at the two ends of the ring, so a large one does not need its room twice:

    bucket  | p0: rows of r0 r1 .. |pad| p1: rows of r0 r1 .. |pad| ...       bytes; every parameter starts aligned
    ring    | 0, 2, 4, .. from here on ->             <- 1, 3, 5, .. up to here |

``SharedRing``: one mapping for all ranks of the group. Each rank casts its rows and writes them into it, so a host has
one copy of a bucket. Tensors use a second, copy-on-write mapping, so writes to them stay private to the rank.
``GroupRing``: the process group delivers the next bucket. Large parameters that are cut along dim 0 go directly from
the shard (or its cast copy) to their place. Over gloo they go from rank to rank, as gradients do, without extra memory.
Elsewhere a collective moves them if they are cut evenly and all ranks want them. All others are packed into one
collective and sorted into their places afterwards.

For bucket k of a ring every rank does, in this order: ``fill(k)``, ``finish(k)``, use it. ``fill(k+1)`` may come before
the use ends. ``finish(k)`` is the only synchronization: every rank has filled k and no longer uses k-1, so k+1 may
overwrite k-1. There the ranks also check that all of them are at the k-th bucket of this ring, and that no parameter
has changed since the pass began."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2x.base import torch_private
from fsdp2x.base.collectives import Exchange, explained
from fsdp2x.base.failures import Call, calling, current_call, exchange
from fsdp2x.base.memory_file import MemoryFile, aligned_starts, tensor_at, whole_pages
from fsdp2x.base.native import _C
from fsdp2x.base.processes import require_own_process
from fsdp2x.base.rendezvous import GroupInfo, UnitParams, rendezvous
from fsdp2x.sharding.transport import TransportKind


@dataclass
class Entry:
    """A parameter or buffer of a bucket. ``group`` is None if it is not gathered with others."""

    name: str
    param: torch.Tensor
    dtype: torch.dtype
    group: dist.ProcessGroup | None
    shard_dim: int = 0

    @classmethod
    def of(cls, name: str, param: torch.Tensor, dtype: torch.dtype | None) -> Entry:
        target = dtype if dtype is not None and param.is_floating_point() else param.dtype
        if isinstance(param, DTensor):
            axes = [axis for axis, placement in enumerate(param.placements) if placement != Replicate()]
            # Exactly Shard: DTensor itself redistributes strided or ragged shards, and those over two axes.
            placement = param.placements[axes[0]] if len(axes) == 1 else None
            is_plain = type(placement) is Shard and type(torch_private.local_tensor(param)) is torch.Tensor
            if is_plain and isinstance(placement, Shard):
                return cls(name, param, target, param.device_mesh.get_group(axes[0]), placement.dim)
        return cls(name, param, target, None)

    @property
    def device(self) -> torch.device:
        return self.param.device

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of the parameter."""
        param = self.param
        # Detaching the DTensor first would cost more than a small copy.
        return (torch_private.local_tensor(param) if isinstance(param, DTensor) else param).detach()

    @property
    def version(self) -> int:
        """A number that changes with each in-place change of the values, by DTensor's operations or of the shard."""
        both = (
            (self.param, torch_private.local_tensor(self.param)) if isinstance(self.param, DTensor) else (self.param,)
        )
        return sum(tensor._version for tensor in both if not tensor.is_inference())

    @property
    def layout(self) -> tuple:
        """A key that is equal for parameters that are gathered alike."""
        placements = self.param.placements if isinstance(self.param, DTensor) else None
        return self.param.shape, self.param.dtype, self.device, placements, self.dtype, self.group, self.shard_dim

    @property
    def wire_device(self) -> torch.device:
        """The device where the group communicates, which is not the parameter's if that is offloaded."""
        assert isinstance(self.param, DTensor), "a group gathers sharded parameters"
        kind = self.param.device_mesh.device_type
        return self.device if self.device.type == kind else torch.device(kind)

    @property
    def whole_bytes(self) -> int:
        return self.param.numel() * self.dtype.itemsize

    def rows(self, rank: int, world: int) -> tuple[int, int]:
        """Returns first row and number of rows of ``rank``: chunks of ceil(d/W), the last short or empty."""
        begin, end = _C.shard_rows(self.param.shape[self.shard_dim], world, rank)
        return begin, end - begin

    def shape(self, num_rows: int) -> list[int]:
        return [num_rows if dim == self.shard_dim else size for dim, size in enumerate(self.param.shape)]

    def num_bytes(self, num_rows: int) -> int:
        return math.prod(self.shape(num_rows)) * self.dtype.itemsize

    def whole(self, buffer: torch.Tensor, start: int) -> torch.Tensor:
        """Returns the full tensor in a buffer of bytes."""
        return tensor_at(buffer, start, self.param.shape, self.dtype)

    def part(self, buffer: torch.Tensor, start: int, num_rows: int) -> torch.Tensor:
        """Returns a shard of ``num_rows`` rows in a buffer of bytes."""
        return tensor_at(buffer, start, self.shape(num_rows), self.dtype)

    def alone(self) -> torch.Tensor:
        """Returns the full tensor in separate memory. Collective if the parameter is sharded over several axes."""
        if not isinstance(self.param, DTensor):
            return self.param.detach().clone().to(self.dtype)
        whole = self.param.full_tensor().detach()
        replicated = all(placement == Replicate() for placement in self.param.placements)
        return (whole.clone() if replicated else whole).to(self.dtype)


class Meetings:
    """Synchronizes the ranks of one ring over a process group. ``token`` is equal on all ranks, unique to the ring."""

    def __init__(self, group: dist.ProcessGroup, token: bytes) -> None:
        self.call: Call = current_call("export of weights")
        self._group, self._token = group, int.from_bytes(token[:7], "little")
        self.num = 0

    def meet(self, changed: str, device: torch.device) -> None:
        """Waits for all ranks at the next bucket."""
        self.num += 1
        if device.type == "cpu":
            with calling(self.call):
                said = exchange((self._token, self.num, changed), self._group)
        else:
            mine = torch.tensor([self._token, self.num, bool(changed)], device=device)
            everyone = mine.new_empty(dist.get_world_size(self._group) * 3)
            dist.all_gather_into_tensor(everyone, mine, group=self._group)
            said = [(token, num, changed or is_changed) for token, num, is_changed in everyone.view(-1, 3).tolist()]
        self.require([(token, num) == (self._token, self.num) for token, num, _ in said], [one for *_, one in said])

    def require(self, arrived: Sequence[bool], changed: Sequence[str | bool]) -> None:
        """Checks what the ranks of the group reported."""
        ranks = dist.get_process_group_ranks(self._group)
        for rank, is_here in zip(ranks, arrived, strict=True):
            if not is_here:
                raise ValueError(
                    f"{self.call}: rank {rank} is at another bucket, or in another pass over the weights. Take the "
                    "same buckets in the same order on every rank."
                )
        if any(changed):
            raise_changed(self.call, next((name for name in changed if isinstance(name, str) and name), True))


def raise_changed(call: Call, name: str | bool) -> None:
    """Raises RuntimeError for a parameter that changed between two buckets."""
    what = f"parameter {name!r}" if isinstance(name, str) else "a parameter of another rank"
    raise RuntimeError(
        f"{call}: {what} changed between two buckets, which would mix two versions. Run optimizer steps and loads "
        "before the first bucket or after the last one."
    )


# A function that is called with each shard.
Seen = Callable[[Entry, torch.Tensor], None]
# Words of each rank, after the buckets: its last synchronization, and the one that found a changed parameter.
_NUM_WORDS = 2
# From this size on, two passes over the bytes cost more than one more exchange.
_DIRECT_BYTES = 1 << 20


def copy_past_caches(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies without reading the target into caches, in half the time, if this rank does not read it soon."""
    is_plain = target.dtype == source.dtype and target.is_cpu and source.is_cpu
    if is_plain and target.is_contiguous() and source.is_contiguous():
        _C.stream_copies([target], [source])
    else:
        target.copy_(source)


def place(entries: Sequence[Entry]) -> tuple[list[int], int]:
    """Returns where each full parameter starts in its buffer, and where the last one ends."""
    return aligned_starts(entry.whole_bytes for entry in entries)


def ring_bytes(sizes: Sequence[int], in_order: bool) -> int:
    """Returns the bytes of a ring for buckets of these sizes, which come in this order or in any order."""
    if not in_order:
        return 2 * max(sizes)
    return max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True)))


def _place_in_ring(index: int, num_bytes: int, ring: int) -> slice:
    """Returns the place of the ``index``-th bucket in a ring of this size."""
    return slice(ring - num_bytes, ring) if index % 2 else slice(num_bytes)


def make_ring(
    group: dist.ProcessGroup,
    device: torch.device,
    buckets: Sequence[Sequence[Entry]],
    transport: str,
    receivers: list[bool],
    keep_file: bool = False,
    in_order: bool = True,
):
    """Makes the ring of one process group for these buckets. Collective over it.

    ``receivers`` says, by rank of the group, who wants the tensors. With ``keep_file`` a ring on the CPU has a ``file``
    if this rank receives. ``in_order``: all buckets are gathered, one after another.
    """
    sizes = [place(bucket)[1] for bucket in buckets]
    facts = []
    for index, bucket in enumerate(buckets):
        params = ((entry.name, (tuple(entry.param.shape), str(entry.dtype))) for entry in bucket)
        facts.append(UnitParams(f"bucket {index}", tuple(params)))
    known = rendezvous(group, facts)
    if known is not None:
        known.require_same_units("fsdp2x.export")
    reason = "the process group is fake" if known is None else "the parameters are not on the CPU"
    if transport != TransportKind.PROCESS_GROUP and device.type == "cpu" and known is not None:
        num_bytes = ring_bytes([whole_pages(size) for size in sizes], in_order)
        ring, reason = _shared_ring(known, num_bytes, transport, keep_file)
        if ring is not None:
            return ring
    if transport == TransportKind.SHM:
        raise ValueError(f'transport="shm" is not possible: {reason}. Use transport="process_group".')
    token = b"" if known is None else known.peers[0].token
    return GroupRing(group, device, ring_bytes(sizes, in_order), receivers, keep_file, token)


def _shared_ring(known: GroupInfo, num_bytes: int, transport: str, keep_file: bool) -> tuple[SharedRing | None, str]:
    """Returns (a ring in shared memory, "") or (None, the reason). The same on every rank."""
    if transport == "auto" and known.is_observed:
        return None, "a dispatch mode watches the collectives"
    if known.why_not_shared is not None:
        return None, known.why_not_shared
    rings: list[SharedRing] = []
    words_bytes = whole_pages(_NUM_WORDS * 8 * len(known.peers))
    reason = known.memory_file(
        num_bytes + words_bytes, lambda file: rings.append(SharedRing(known.group, num_bytes, file, keep_file))
    )
    return (None, reason) if reason else (rings[0], "")


def _gather_of(entries: Sequence[Entry]) -> str:
    return f"export of '{entries[0].name}' to '{entries[-1].name}'"


class GroupRing:
    """Memory of this rank, with one send and one receive buffer for packed parameters that every bucket reuses.

    With ``keep_file`` it is an anonymous memory file, as in a ``SharedRing``, on a receiving rank of the CPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        num_bytes: int,
        receivers: list[bool],
        keep_file: bool = False,
        token: bytes = b"",
    ) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.device, self.receivers = device, receivers
        self._meetings = Meetings(group, token)
        self.num_bytes, self.file = num_bytes, None
        self._memory: torch.Tensor | None = None
        if keep_file and receivers[self.rank] and device.type == "cpu":
            self._kept = MemoryFile("fsdp2x-ring", num_bytes)
            self.num_bytes, self.file, self._memory = self._kept.num_bytes, self._kept.file, self._kept.bytes
        self._index = 0
        self._sent = self._received = torch.empty(0, dtype=torch.uint8, device=device)
        self._work: list = []
        self._packed: dict[int, int] = {}  # index in the bucket -> start in the send buffer
        self._end = 0

    @torch.no_grad()
    def fill(self, entries: Sequence[Entry], seen: Seen | None = None) -> None:
        """Starts the gather of a bucket. At most one runs at a time. ``seen`` is called with this rank's shards."""
        if self.world > 1:
            with explained(self.group, _gather_of(entries)):
                self._start(entries)
        if seen is not None:
            for entry in entries:
                seen(entry, entry.local)

    def _start(self, entries: Sequence[Entry]) -> None:
        direct = [self._is_direct(entry) for entry in entries]
        sizes = [entry.num_bytes(entry.rows(0, self.world)[1]) for entry in entries]
        packed = [index for index in range(len(entries)) if not direct[index]]
        copied = [index for index, entry in enumerate(entries) if direct[index] and self._needs_copy(entry)]
        starts, self._end = aligned_starts(sizes[index] for index in packed)
        self._packed = dict(zip(packed, starts, strict=True))
        starts, end = aligned_starts((sizes[index] for index in copied), self._end)
        staged = dict(zip(copied, starts, strict=True))
        if self._sent.numel() < end:
            self._sent = torch.zeros(end, dtype=torch.uint8, device=self.device)
        for index, start in (*self._packed.items(), *staged.items()):
            entry = entries[index]
            entry.part(self._sent, start, entry.rows(self.rank, self.world)[1]).copy_(entry.local)
        received: list[list[torch.Tensor | None]] = []  # messages by parameter and rank
        sent: list[list[torch.Tensor | None]] = []
        for index, (entry, place_bytes) in enumerate(zip(entries, place(entries)[0], strict=True)):
            if not direct[index]:
                continue
            mine = entry.local
            if index in staged:
                mine = entry.part(self._sent, staged[index], mine.shape[0])
            whole = entry.whole(self._slot(entries), place_bytes) if self.receivers[self.rank] else None
            if not self._sends_messages:
                assert whole is not None, "every rank receives if a collective gathers"
                self._work.append(
                    dist.all_gather_into_tensor(whole.view(-1), mine.view(-1), group=self.group, async_op=True)
                )
                continue
            rows = [entry.rows(rank, self.world) for rank in range(self.world)]
            received.append([whole.narrow(0, *row) if whole is not None and row[1] else None for row in rows])
            sent.append([mine if receives and mine.numel() else None for receives in self.receivers])
        if sent:
            self._work.append(Exchange(self.group, received, sent))
        if self._packed:
            self._gather_packed(self._sent[: self._end])
        for targets, sources in zip(received, sent, strict=True):
            own, mine = targets[self.rank], sources[self.rank]
            if own is not None and mine is not None:
                own.copy_(mine)

    def _is_direct(self, entry: Entry) -> bool:
        """Returns whether the ranks' parts, concatenated, are the full tensor and are worth a separate exchange."""
        if not entry.param.dim() or entry.shard_dim != 0 or entry.whole_bytes < _DIRECT_BYTES:
            return False
        return self._sends_messages or all(self.receivers) and entry.param.shape[0] % self.world == 0

    @property
    def _sends_messages(self) -> bool:
        return self.device.type == "cpu" and torch_private.is_gloo(self.group)

    def _needs_copy(self, entry: Entry) -> bool:
        local = entry.local
        return local.dtype != entry.dtype or local.device != self.device or not local.is_contiguous()

    def _gather_packed(self, mine: torch.Tensor) -> None:
        if self.receivers[self.rank] and self._received.numel() < self.world * self._end:
            self._received = torch.empty(self.world * self._end, dtype=torch.uint8, device=self.device)
        received = self._received[: self.world * self._end]
        if all(self.receivers):
            self._work.append(dist.all_gather_into_tensor(received, mine, group=self.group, async_op=True))
            return
        for receiver in range(self.world):
            if self.receivers[receiver]:
                parts = list(received.chunk(self.world)) if receiver == self.rank else None
                destination = dist.get_global_rank(self.group, receiver)
                self._work.append(dist.gather(mine, parts, dst=destination, group=self.group, async_op=True))

    def _slot(self, entries: Sequence[Entry]) -> torch.Tensor:
        """Returns the place of the current bucket. The previous one is at the other end."""
        if self._memory is None:
            self._memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        return self._memory[_place_in_ring(self._index, place(entries)[1], self.num_bytes)]

    @torch.no_grad()
    def finish(self, entries: Sequence[Entry], changed: str = "") -> list[torch.Tensor] | None:
        """Returns the full tensors in the order of ``entries``, or None if this rank does not receive."""
        works, self._work = self._work, []
        with explained(self.group, _gather_of(entries)):
            for work in works:
                if work is not None:
                    work.wait()
        self._meetings.meet(changed, self.device)
        if not self.receivers[self.rank]:
            return None
        tensors, slot = [], self._slot(entries)
        for index, (entry, start) in enumerate(zip(entries, place(entries)[0], strict=True)):
            whole = entry.whole(slot, start)
            if self.world == 1:
                whole.copy_(entry.local)
            elif index in self._packed:
                for rank in range(self.world):
                    begin, num_rows = entry.rows(rank, self.world)
                    if num_rows:
                        rows = entry.part(self._received, rank * self._end + self._packed[index], num_rows)
                        whole.narrow(entry.shard_dim, begin, num_rows).copy_(rows)
            tensors.append(whole)
        self._index += 1
        return tensors


class SharedRing:
    """One anonymous memory file that all ranks of the group map. It is freed with the last of them.

    ``num_bytes`` and the place of a bucket are whole pages. With ``keep_file`` the ring has a descriptor of its
    ``file`` for processes that are not ranks. A tensor's position in it is its storage offset.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, file: int, keep_file: bool = False) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._written = mmap.mmap(file, num_bytes, mmap.MAP_SHARED)
        num_words = _NUM_WORDS * self.world
        self._words = memoryview(mmap.mmap(file, 8 * num_words, mmap.MAP_SHARED, offset=num_bytes)).cast("q")
        self._meetings = Meetings(group, b"")
        self._private = mmap.mmap(file, num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self.num_bytes, self.file = num_bytes, os.dup(file) if keep_file else None
        if self.file is not None:
            weakref.finalize(self, os.close, self.file)
        self._num_filled = self._num_finished = 0
        self._given: list[tuple[slice, list[tuple[torch.Tensor, int]]]] = []  # the last two buckets, with versions

    @torch.no_grad()
    def fill(self, entries: Sequence[Entry], seen: Seen | None = None) -> None:
        """Writes this rank's rows of a bucket. ``seen`` is called with each shard while it is in the caches."""
        slot = self._next_slot(place(entries)[1])
        for entry, start in zip(entries, place(entries)[0], strict=True):
            first, num_rows = entry.rows(self.rank, self.world)
            local = entry.local
            if num_rows:
                part = entry.whole(slot, start).narrow(entry.shard_dim, first, num_rows)
                copy_past_caches(part, local)
            if seen is not None:
                seen(entry, local)

    def finish(self, entries: Sequence[Entry], changed: str = "") -> list[torch.Tensor]:
        """Waits until every rank has written. Returns the full tensors in the order of ``entries``."""
        starts, num_bytes = place(entries)
        slot = self._meet(num_bytes, _gather_of(entries), changed)
        with torch.inference_mode(False):
            tensors = [entry.whole(slot, start) for entry, start in zip(entries, starts, strict=True)]
        self._given[-1][1].extend((tensor, tensor._version) for tensor in tensors)
        return tensors

    # Bytes of each rank, one after another, in place of a bucket.

    def part(self, num_bytes: int) -> torch.Tensor:
        """Returns memory for this rank's bytes, to be written before ``finish_parts``. All ranks have the same size."""
        return self._next_slot(self.world * num_bytes)[self.rank * num_bytes : (self.rank + 1) * num_bytes]

    def finish_parts(self, num_bytes: int, what: str) -> torch.Tensor:
        """Waits until every rank has written. Returns the bytes of all ranks."""
        parts = self._meet(self.world * num_bytes, what)[: self.world * num_bytes]
        self._given[-1][1].append((parts, parts._version))
        return parts

    def _next_slot(self, num_bytes: int) -> torch.Tensor:
        require_own_process("export a sharded model")
        part = _place_in_ring(self._num_filled, whole_pages(num_bytes), self.num_bytes)
        self._num_filled += 1
        return torch.frombuffer(self._written, dtype=torch.uint8)[part]

    def _meet(self, num_bytes: int, what: str, changed: str = "") -> torch.Tensor:
        """Returns the place that every rank has written to."""
        require_own_process("export a sharded model")
        part = _place_in_ring(self._num_finished, whole_pages(num_bytes), self.num_bytes)
        self._num_finished += 1
        if changed:
            self._words[_NUM_WORDS * self.rank + 1] = self._num_finished
        self._words[_NUM_WORDS * self.rank] = self._num_finished
        with explained(self.group, what):
            dist.barrier(group=self.group)
        # Other ranks may already be at the next synchronization, whose findings do not belong to this one.
        found: list[str | bool] = [0 < number <= self._num_finished for number in self._words[1::_NUM_WORDS]]
        found[self.rank] = changed or found[self.rank]
        self._meetings.require([number >= self._num_finished for number in self._words[::_NUM_WORDS]], found)
        for before, tensors in self._given:
            if any(tensor._version != version for tensor, version in tensors):
                # The user wrote to the tensors that were here. The private pages would hide what the ranks write.
                begin = before.start or 0
                self._private.madvise(mmap.MADV_DONTNEED, begin, before.stop - begin)
        self._given = [*self._given[-1:], (part, [])]
        with torch.inference_mode(False):
            return torch.frombuffer(self._private, dtype=torch.uint8)[part]
