"""Deltas: finds elements of this rank's shards that differ from the engines' last commit, and sends their new values.

A snapshot holds the shards in the dtypes of the wire, on their ranks and devices. It compares bits, so NaNs with other
payloads and zeros of the other sign are changes. A push updates the snapshot while it finds changes or sends complete
buckets. A failed push invalidates it, and the full push that must follow fills it again. The ranks exchange one count
per parameter and agree how each is sent. They gather positions and values of as many buckets as fit into the room of
one, in the shared ring or over the process group:

    unchanged   nothing is sent
    sparse      positions in the full tensor (int64) and values: at most half of the tensor's bytes
    dense       gathered completely, as in a full push: more changes, converted weights (un-fused experts, merged
                adapters), and weights that are not gathered with others (replicated, or cut over several axes)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fsdp2x.api import ALIGN_BYTES, can_run_kernels, explained, take_changes
from fsdp2x.io.export.rings import Entry, Ring, copy_past_caches
from fsdp2x.io.export.stream import BucketPlan
from fsdp2x.io.names import Family
from fsdp2x.rl.sync.receiver.engine import POSITION_BYTES, delta_bytes
from fsdp2x.rl.sync.targets.base import Delta

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Views a flat tensor as integers. A complex number of 16 bytes becomes two."""
    if tensor.itemsize not in _BITS:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.itemsize])


class Snapshot:
    """The engines' values of this rank's shards, by FQN, after a committed push."""

    def __init__(self, plans: list[BucketPlan]) -> None:
        """Allocates the snapshot.

        Raises:
            NotImplementedError: a shard is a tensor subclass, whose bits it cannot compare.
        """
        for entry in [entry for plan in plans for entry in plan.entries]:
            if type(local := entry.local) not in (torch.Tensor, nn.Parameter):
                raise NotImplementedError(
                    f"fsdp2x.sync.connect: deltas of {entry.name!r}, which is a {type(local).__name__}, are not "
                    "supported. Connect with deltas=False."
                )
        self._held: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def hold(self, entry: Entry, values: torch.Tensor) -> None:
        """Records that this shard, ``values``, is sent as it is now."""
        held = self._held.get(entry.name)
        if held is None:
            self._held[entry.name] = values.to(entry.dtype, copy=True, memory_format=torch.contiguous_format)
        else:
            copy_past_caches(held, values)

    @torch.no_grad()
    def take_changes(self, entry: Entry) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns (positions, values) of changes in the local shard, both flat, and records them as sent.

        None: there are too many. Some may be recorded, and the shard must be sent completely.
        """
        now, held = entry.local.detach().contiguous().view(-1), self._held[entry.name].view(-1)
        # Positions and values of this many elements take half of the bytes of all.
        most = held.nbytes // (2 * (POSITION_BYTES + held.itemsize))
        if now.device.type == "cpu" or can_run_kernels(now.device):
            return take_changes(now, held, most)
        now = now.to(entry.dtype)
        differs = _bits(now) != _bits(held)
        positions = (differs if differs.dim() == 1 else differs.any(-1)).nonzero().view(-1)
        if positions.numel() > most:
            return None
        held[positions] = values = now[positions]
        return positions, values


_MANY = -1  # in place of a count: too many to send separately


@dataclass
class BucketDelta:
    """Changes in one bucket: its dense part as a plan, and its sparse families, perhaps with those of later buckets.

    ``sparse`` has (family, its only parameter, positions, values) with this rank's values and positions in its shard.
    ``counts`` has, for each sparse family, the changes of each rank of the ring. ``rank_bytes`` is their size by rank.
    """

    dense: BucketPlan
    sparse: list[tuple[Family, Entry, torch.Tensor, torch.Tensor]]
    counts: list[list[int]]
    rank_bytes: list[int]

    @property
    def num_bytes(self) -> int:
        """Bytes to gather, with each rank's part as long as the longest, and to hand over."""
        handed_bytes = ALIGN_BYTES * len(self.sparse) + sum(self.rank_bytes)
        return max(len(self.rank_bytes) * max(self.rank_bytes), handed_bytes)

    def can_take(self, other: BucketDelta, limit_bytes: int) -> bool:
        """Returns whether the sparse parts of both can be gathered at once."""
        if self.dense.families or other.dense.families or self.dense.group is not other.dense.group:
            return False
        return self.dense.device == other.dense.device and 2 * (self.num_bytes + other.num_bytes) <= limit_bytes

    def take(self, other: BucketDelta) -> None:
        self.sparse += other.sparse
        self.counts += other.counts
        self.rank_bytes = [a + b for a, b in zip(self.rank_bytes, other.rank_bytes, strict=True)]


class Changes:
    """Changes in all buckets of a push. Takes at most half of the bytes of a snapshot."""

    def __init__(self, plans: list[BucketPlan], snapshot: Snapshot, group: dist.ProcessGroup | None) -> None:
        """Exchanges one count for each parameter. Collective over ``group``."""
        entries = [entry for plan in plans for entry in plan.entries]
        self._column = {entry.name: index for index, entry in enumerate(entries)}
        self._found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        counts = []
        for entry in entries:
            changes = snapshot.take_changes(entry)
            if changes is not None:
                self._found[entry.name] = changes
            counts.append(_MANY if changes is None else changes[0].numel())
        device = torch.device("cpu")
        if dist.get_backend(group) == "nccl":
            device = next((entry.wire_device for entry in entries if entry.group is not None), entries[0].device)
        mine = torch.tensor(counts, dtype=torch.int64, device=device)
        everyone = torch.empty(dist.get_world_size(group) * len(counts), dtype=torch.int64, device=device)
        with explained(group, "exchange of what changed"):
            dist.all_gather_into_tensor(everyone, mine, group=group)
        self._counts = everyone.view(-1, len(counts)).t().tolist()  # by parameter, then by rank
        whole = [sum(entry.whole_bytes for entry in plan.gathered) for plan in plans]
        sent = [sum(spec.num_bytes for spec in plan.specs) for plan in plans]
        self._limit_bytes = max(map(min, whole, sent))

    def of_buckets(
        self, plans: Sequence[BucketPlan], first_rings: Sequence[list[int]], own_rings: Sequence[list[int]]
    ) -> Iterator[BucketDelta]:
        """Yields what to send, in the buckets' order. The arguments are those of ``_of_bucket`` for each."""
        before: BucketDelta | None = None
        for plan, first_ring, own_ring in zip(plans, first_rings, own_rings, strict=True):
            changes = self._of_bucket(plan, first_ring, own_ring)
            if not changes.dense.families and not changes.sparse:
                continue
            if before is not None and before.can_take(changes, self._limit_bytes):
                before.take(changes)
                continue
            if before is not None:
                yield before
            before = changes
        if before is not None:
            yield before

    def _of_bucket(self, plan: BucketPlan, first_ring: list[int], own_ring: list[int]) -> BucketDelta:
        """Returns the bucket's changes and forgets them.

        Args:
            plan: the bucket.
            first_ring: ranks of the group that gather this bucket on rank 0. Their counts decide, so that replicas
                decide alike.
            own_ring: those of this rank's ring.
        """
        gathered = {entry.name: entry for entry in plan.gathered}
        slot_bytes = sum(entry.whole_bytes for entry in plan.gathered)
        changes = BucketDelta(BucketPlan(plan.index, plan.group, plan.device), [], [], [0] * len(first_ring))
        dense = changes.dense
        for family in plan.families:
            of_family = [self._counts[self._column[name]] for name in family.params]
            found = {name: self._found.pop(name) for name in family.params if name in self._found}
            name = family.params[0]
            if not any(map(any, of_family)):
                continue
            entry = gathered.get(name)
            if family.is_renamed_only and entry is not None and _MANY not in of_family[0]:
                sizes = [delta_bytes(of_family[0][rank], entry.dtype)[1] for rank in first_ring]
                # The gather pads the ranks' parts to the longest.
                longest_bytes = max(a + b for a, b in zip(changes.rank_bytes, sizes, strict=True))
                if 2 * len(first_ring) * longest_bytes <= slot_bytes and 2 * sum(sizes) <= entry.whole_bytes:
                    mine = [of_family[0][rank] for rank in own_ring]
                    changes.take(BucketDelta(dense, [(family, entry, *found[name])], [mine], sizes))
                    continue
            dense.families.append(family)
            dense.gathered += [gathered[name] for name in family.params if name in gathered]
            dense.alone += [entry for entry in plan.alone if entry.name in family.params]
        return changes


def _sizes(changes: BucketDelta) -> list[list[int]]:
    """Returns the bytes of each rank of the ring, for each sparse family."""
    pairs = list(zip(changes.counts, changes.sparse, strict=True))
    return [
        [delta_bytes(of[peer], entry.dtype)[1] for of, (_, entry, _, _) in pairs]
        for peer in range(len(changes.counts[0]))
    ]


@torch.no_grad()
def pack_changes(changes: BucketDelta, ring: Ring) -> Entry:
    """Packs this rank's changes, with positions in the full tensors, for a gather of those of all ranks."""
    largest = max(map(sum, _sizes(changes)))
    packed, end = torch.zeros(largest, dtype=torch.uint8, device=ring.device), 0
    for _, entry, positions, values in changes.sparse:
        where, what = _parts(packed, end, positions.numel(), entry.dtype)
        where.copy_(_whole_positions(entry, positions, ring.rank, ring.world))
        what.copy_(values)
        end += delta_bytes(positions.numel(), entry.dtype)[1]
    name = f"changes of {changes.sparse[0][1].name}"
    return Entry(name, packed, torch.uint8, ring.group, num_all_bytes=ring.world * largest)


def unpack_changes(changes: BucketDelta, gathered: list[torch.Tensor] | None) -> tuple[Delta, ...]:
    """Returns the changes of all ranks, a delta per tensor and rank. Empty if this rank does not receive."""
    if gathered is None:
        return ()
    received, sizes = gathered[0], _sizes(changes)
    deltas = []
    for peer, row in enumerate(sizes):
        end = peer * (len(received) // len(sizes))
        for (family, entry, _, _), of, size in zip(changes.sparse, changes.counts, row, strict=True):
            if of[peer]:
                deltas.append(Delta(family.outputs[0], *_parts(received, end, of[peer], entry.dtype)))
            end += size
    return tuple(deltas)


def _parts(memory: torch.Tensor, begin: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    values = begin + delta_bytes(count, dtype)[0]
    where = memory[begin : begin + count * POSITION_BYTES].view(torch.int64)
    return where, memory[values : values + count * dtype.itemsize].view(dtype)


def _whole_positions(entry: Entry, positions: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Converts positions in the flattened shard to positions in the flattened full tensor."""
    begin, num_rows = entry.rows(rank, world)
    inner = entry.param.shape[entry.shard_dim + 1 :].numel()
    if entry.shard_dim == 0:
        return positions + begin * inner  # the shard is one piece of the full tensor
    if num_rows == 0:
        return positions
    block = num_rows * inner
    outer = torch.div(positions, block, rounding_mode="floor")
    return outer * (entry.param.shape[entry.shard_dim] * inner) + begin * inner + positions % block
