"""The ring that buckets are gathered into: its memory, how rows get there, and what ranks compare at each bucket.

A bucket holds its parameters one after another, each complete and contiguous. Two consecutive buckets are there at a
time. They begin and end at the two ends of the ring, so a large one does not need its room twice:

    bucket  | p0: rows of r0 r1 .. |pad| p1: rows of r0 r1 .. |pad| ...       bytes; every parameter starts aligned
    ring    | 0, 2, 4, .. from here on ->             <- 1, 3, 5, .. up to here |

Each rank writes its rows into the ring, cast as they are sent. If all ranks share it, the bucket is complete then, and
a host has one copy. Otherwise the process group gathers straight into the ring of each rank. So a parameter has room
for equal chunks of all ranks. Small parameters are packed for that, and those that are not cut along dim 0 are sorted
into their places afterwards. A rank that does not receive has no ring and only sends.

For bucket k of a ring every rank does, in this order: ``fill(k)``, ``finish(k)``, use it. ``fill(k+1)`` may come before
the use ends. ``finish(k)`` is the only synchronization: every rank has filled k and no longer uses k-1, so k+1 may
overwrite k-1. There the ranks also check that all of them are at the k-th bucket of this ring, and that no parameter
has changed since the pass began."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2x.base import torch_private
from fsdp2x.base.collectives import Exchange, all_gather, explained, gather_packed, wait
from fsdp2x.base.failures import Call, calling, current_call, exchange
from fsdp2x.base.memory_file import MemoryFile, aligned_starts, tensor_at, whole_pages
from fsdp2x.base.native import _C
from fsdp2x.base.processes import require_own_process
from fsdp2x.base.rendezvous import UnitParams, rendezvous
from fsdp2x.sharding.transport import TransportKind


@dataclass
class Entry:
    """A parameter or buffer of a bucket, or bytes of each rank. ``group`` is None if it is not gathered with others."""

    name: str
    param: torch.Tensor
    dtype: torch.dtype
    group: dist.ProcessGroup | None
    shard_dim: int = 0
    num_all_bytes: int | None = None  # of all ranks, if ``param`` is this rank's flat bytes

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
    def whole_shape(self) -> Sequence[int]:
        return self.param.shape if self.num_all_bytes is None else (self.num_all_bytes,)

    @property
    def whole_bytes(self) -> int:
        return math.prod(self.whole_shape) * self.dtype.itemsize

    def rows(self, rank: int, world: int) -> tuple[int, int]:
        """Returns first row and number of rows of ``rank``: chunks of ceil(d/W), the last short or empty."""
        begin, end = _C.shard_rows(self.whole_shape[self.shard_dim], world, rank)
        return begin, end - begin

    def shape(self, num_rows: int) -> list[int]:
        return [num_rows if dim == self.shard_dim else size for dim, size in enumerate(self.whole_shape)]

    def num_bytes(self, num_rows: int) -> int:
        return math.prod(self.shape(num_rows)) * self.dtype.itemsize

    def chunk_bytes(self, world: int) -> int:
        """Returns the bytes of the longest shard."""
        return self.num_bytes(self.rows(0, world)[1])

    def alone(self) -> torch.Tensor:
        """Returns the full tensor in separate memory. Collective if the parameter is sharded over several axes."""
        if not isinstance(self.param, DTensor):
            return self.param.detach().clone().to(self.dtype)
        whole = self.param.full_tensor().detach()
        replicated = all(placement == Replicate() for placement in self.param.placements)
        return (whole.clone() if replicated else whole).to(self.dtype)


def raise_changed(call: Call, name: str | bool) -> None:
    """Raises RuntimeError for a parameter that changed between two buckets."""
    what = f"parameter {name!r}" if isinstance(name, str) else "a parameter of another rank"
    raise RuntimeError(
        f"{call}: {what} changed between two buckets, which would mix two versions. Run optimizer steps and loads "
        "before the first bucket or after the last one."
    )


# A function that is called with each shard.
Seen = Callable[[Entry, torch.Tensor], None]
# From this size on, two passes over the bytes cost more than one more exchange.
_DIRECT_BYTES = 1 << 20


def copy_past_caches(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies without reading the target into caches, in half the time, if this rank does not read it soon."""
    is_plain = target.dtype == source.dtype and target.is_cpu and source.is_cpu
    if is_plain and target.is_contiguous() and source.is_contiguous():
        _C.stream_copies([target], [source])
    else:
        target.copy_(source)


def _place(entries: Sequence[Entry], world: int) -> tuple[list[int], int]:
    """Returns where each full parameter starts in its bucket, and the bucket's bytes, in whole pages."""
    starts, end = aligned_starts(entry.chunk_bytes(world) * world for entry in entries)
    return starts, whole_pages(end)


def make_ring(
    group: dist.ProcessGroup,
    device: torch.device,
    buckets: Sequence[Sequence[Entry]],
    transport: str,
    receivers: list[bool],
    keep_file: bool = False,
    in_order: bool = True,
) -> Ring:
    """Makes the ring of one process group for these buckets. Collective over it.

    ``receivers`` says, by rank of the group, who wants the tensors. With ``keep_file`` a ring on the CPU has a ``file``
    if this rank receives. ``in_order``: all buckets are gathered, one after another.
    """
    sizes = [_place(bucket, len(receivers))[1] for bucket in buckets]
    num_bytes = max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True))) if in_order else 2 * max(sizes)
    facts = []
    for index, bucket in enumerate(buckets):
        params = ((entry.name, (tuple(entry.param.shape), str(entry.dtype))) for entry in bucket)
        facts.append(UnitParams(f"bucket {index}", tuple(params)))
    known = rendezvous(group, facts)
    if known is None:
        reason = "the process group is fake"
    else:
        known.require_same_units("fsdp2x.export")
        reason = "the parameters are not on the CPU" if device.type != "cpu" else known.why_not_shared
        if transport == "auto" and known.is_observed:
            reason = "a dispatch mode watches the collectives"
    shared: list[MemoryFile] = []
    if transport != TransportKind.PROCESS_GROUP and known is not None and reason is None:
        reason = known.memory_file(num_bytes, lambda file: shared.append(MemoryFile("", num_bytes, file)))
    if reason and transport == TransportKind.SHM:
        raise ValueError(f'transport="shm" is not possible: {reason}. Use transport="process_group".')
    token = b"" if known is None else known.peers[0].token
    is_shared = bool(shared) and not reason
    file = shared[0] if is_shared else None
    # Otherwise memory without a file, whose pages are larger and sooner there.
    if file is None and keep_file and device.type == "cpu" and receivers[dist.get_rank(group)]:
        file = MemoryFile("fsdp2x-ring", num_bytes)
    return Ring(group, device, num_bytes, receivers, token, file, is_shared)


class RingMemory:
    """Room for two buckets, perhaps in a ``file``, where a tensor's position is its storage offset.

    Its size and the place of a bucket are whole pages. If the ranks share the file, tensors use a copy-on-write
    mapping, so writes to them stay private to the rank.
    """

    def __init__(self, device: torch.device, num_bytes: int, file: MemoryFile | None, is_shared: bool) -> None:
        self.file, self._num_bytes, self._private = file, num_bytes, None
        self._handed: list[tuple[slice, list[tuple[torch.Tensor, int]]]] = []  # the last two buckets, with versions
        if file is not None:
            self._bytes = file.bytes
        else:
            with torch.inference_mode(False):
                self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if file is not None and is_shared:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            self._private = mmap.mmap(file.file, num_bytes, mmap.MAP_PRIVATE, access)

    def _slice(self, index: int, num_bytes: int) -> slice:
        return slice(self._num_bytes - num_bytes, self._num_bytes) if index % 2 else slice(0, num_bytes)

    def written(self, index: int, num_bytes: int) -> torch.Tensor:
        """Returns the place of the ``index``-th bucket, to be written to."""
        return self._bytes[self._slice(index, num_bytes)]

    def hand_out(self, index: int, entries: Sequence[Entry], world: int) -> list[torch.Tensor]:
        """Returns the full tensors of the ``index``-th bucket."""
        starts, num_bytes = _place(entries, world)
        where, private = self._slice(index, num_bytes), self._private
        with torch.inference_mode(False):
            shown = (self._bytes if private is None else torch.frombuffer(private, dtype=torch.uint8))[where]
            tensors = [
                tensor_at(shown, start, one.whole_shape, one.dtype) for one, start in zip(entries, starts, strict=True)
            ]
        if private is not None:
            for before, handed in self._handed:
                if any(tensor._version != version for tensor, version in handed):
                    # The user wrote to the tensors that were here. The private pages would hide what the ranks write.
                    private.madvise(mmap.MADV_DONTNEED, before.start, before.stop - before.start)
            self._handed = [*self._handed[-1:], (where, [(tensor, tensor._version) for tensor in tensors])]
        return tensors


class Ring:
    """Gathers the buckets of one process group. ``token`` is equal on all ranks, unique to the ring.

    ``file`` is its memory, shared by all ranks or not. Without it, a rank that receives allocates memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        num_bytes: int,
        receivers: list[bool],
        token: bytes,
        file: MemoryFile | None = None,
        is_shared: bool = False,
    ) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.device, self.receivers, self._token = device, receivers, token
        self._call = current_call("export of weights")
        self.num_bytes, self._is_shared = num_bytes, is_shared
        has_memory = is_shared or receivers[self.rank]
        self._memory = RingMemory(device, num_bytes, file, is_shared) if has_memory else None
        self._num_filled = self._num_finished = 0
        self._works: list = []
        self._staged: dict[int, torch.Tensor] = {}  # chunks of all ranks to sort, by index in the bucket

    @property
    def file(self) -> int | None:
        """A descriptor of the memory, if it is a file."""
        memory = None if self._memory is None else self._memory.file
        return None if memory is None else memory.file

    @property
    def _is_over_gloo(self) -> bool:
        return self.device.type == "cpu" and torch_private.is_gloo(self.group)

    def apart(self, entry: Entry) -> Ring:
        """Returns a ring of the same ranks with separate memory, for one bucket of ``entry``."""
        return Ring(self.group, self.device, _place([entry], self.world)[1], self.receivers, self._token)

    @torch.no_grad()
    def fill(self, entries: Sequence[Entry], seen: Seen | None = None) -> None:
        """Writes this rank's rows of a bucket and starts its gather. At most one runs at a time.

        ``seen`` is called with each shard while it is in the caches.
        """
        require_own_process("export a sharded model")
        starts, num_bytes = _place(entries, self.world)
        slot = None if self._memory is None else self._memory.written(self._num_filled, num_bytes)
        self._num_filled += 1
        pairs: list[tuple[torch.Tensor | None, torch.Tensor]] = []  # bytes: chunks of all ranks, and of this one
        for index, (entry, start) in enumerate(zip(entries, starts, strict=True)):
            local = entry.local
            if self._is_shared:
                assert slot is not None, "every rank writes to shared memory"
                whole = tensor_at(slot, start, entry.whole_shape, entry.dtype)
                rows = whole.narrow(entry.shard_dim, *entry.rows(self.rank, self.world))
            else:
                chunks, own = self._chunks(index, entry, slot, start)
                if own.numel():
                    pairs.append((chunks, own))
                rows = tensor_at(own, 0, local.shape, entry.dtype)
            if local.numel():
                copy_past_caches(rows, local)
            if seen is not None:
                seen(entry, local)
        if self.world == 1 or self._is_shared:
            return
        large = [pair for pair in pairs if self.world * pair[1].nbytes >= _DIRECT_BYTES]
        small = [pair for pair in pairs if self.world * pair[1].nbytes < _DIRECT_BYTES]
        with explained(self.group, _gather_of(entries)):
            if self._is_over_gloo:
                self._works = [self._send(large)] if large else []
            else:
                self._works = [self._gather(*pair) for pair in large]
            if small:
                self._works.append(gather_packed(self._gather, self.world, self.rank, small))

    def _chunks(
        self, index: int, entry: Entry, slot: torch.Tensor | None, start: int
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Returns bytes for equal chunks of all ranks, None if this rank does not receive, and for its own chunk."""
        num_bytes = entry.chunk_bytes(self.world)
        if slot is None:
            return None, torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        chunks = slot[start : start + self.world * num_bytes]
        if entry.shard_dim > 0:
            chunks = self._staged[index] = torch.empty_like(chunks)
        return chunks, chunks[self.rank * num_bytes : (self.rank + 1) * num_bytes]

    def _gather(self, chunks: torch.Tensor | None, own: torch.Tensor):
        """Starts a gather of one chunk of each rank on the ranks that receive. Returns the work."""
        if chunks is not None and all(self.receivers):
            return all_gather(self.group, chunks, own)
        if self._is_over_gloo:
            return self._send([(chunks, own)])
        works = []
        for receiver in [rank for rank, wanted in enumerate(self.receivers) if wanted]:
            mine = list(chunks.chunk(self.world)) if chunks is not None and receiver == self.rank else None
            to = dist.get_global_rank(self.group, receiver)
            works.append(dist.gather(own, mine, dst=to, group=self.group, async_op=True))
        return works

    def _send(self, pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor]]) -> Exchange:
        """Starts to gather chunks over gloo from rank to rank, without the memory that its collectives take."""
        received: list[list[torch.Tensor | None]] = [[None] * self.world for _ in pairs]
        if self.receivers[self.rank]:
            received = [[] if chunks is None else list(chunks.chunk(self.world)) for chunks, _ in pairs]
        sent = [[own if wanted else None for wanted in self.receivers] for _, own in pairs]
        return Exchange(self.group, received, sent)

    @torch.no_grad()
    def finish(self, entries: Sequence[Entry], changed: str = "") -> list[torch.Tensor] | None:
        """Waits for the rows of all ranks. Returns the full tensors, or None if this rank does not receive.

        ``changed`` is a parameter of this rank that changed since the pass began.
        """
        require_own_process("export a sharded model")
        works, self._works = self._works, []
        staged, self._staged = self._staged, {}
        with explained(self.group, _gather_of(entries)):
            wait(works)
        self._meet(_gather_of(entries), changed)
        self._num_finished += 1
        if self._memory is None or not self.receivers[self.rank]:
            return None
        tensors = self._memory.hand_out(self._num_finished - 1, entries, self.world)
        for index, chunks in staged.items():
            entry = entries[index]
            for rank, chunk in enumerate(chunks.view(self.world, entry.chunk_bytes(self.world))):
                begin, num_rows = entry.rows(rank, self.world)
                rows = tensor_at(chunk, 0, entry.shape(num_rows), entry.dtype)
                tensors[index].narrow(entry.shard_dim, begin, num_rows).copy_(rows)
        return tensors

    def _meet(self, what: str, changed: str) -> None:
        """Waits for all ranks at the next bucket. They check that none is elsewhere or has changed a parameter."""
        here = (int.from_bytes(self._token[:7], "little"), self._num_finished)
        if self.device.type == "cpu" and not self._is_shared:
            with calling(self._call):
                said = exchange((here, changed), self.group)
        else:  # these gathers are faster than an exchange of objects
            mine = torch.tensor([*here, bool(changed)], device=self.device)
            everyone = mine.new_empty(self.world * 3)
            with explained(self.group, what):
                wait(all_gather(self.group, everyone, mine))
            said = [((token, num), changed or is_changed) for token, num, is_changed in everyone.view(-1, 3).tolist()]
        for rank, (there, _) in zip(dist.get_process_group_ranks(self.group), said, strict=True):
            if there != here:
                raise ValueError(
                    f"{self._call}: rank {rank} is at another bucket, or in another pass over the weights. Take the "
                    "same buckets in the same order on every rank."
                )
        if names := [name for _, name in said if name]:
            raise_changed(self._call, next((name for name in names if isinstance(name, str)), True))


def _gather_of(entries: Sequence[Entry]) -> str:
    return f"export of '{entries[0].name}' to '{entries[-1].name}'"
