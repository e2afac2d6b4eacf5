"""Deltas: which elements of this rank's shards differ from what the engines committed last, and their new values.

A snapshot holds the shards in the dtypes of the wire, at their ranks, on their devices. Bits are compared, so NaNs with
other payloads and zeros of the other sign are changes. It advances at a commit only: a push that is given up changes
nothing. Per bucket the ranks exchange counts, agree what is sent how, and gather positions and values of the rest:

    unchanged   nothing is sent
    sparse      positions in the whole tensor (int64) and values: at most half of the tensor's bytes
    dense       gathered whole, as in a full push: what changed more, what is converted (un-fused experts, merged
                adapters), and what is not gathered with others (replicated, or cut over several axes)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fsdp2x.export.entries import Entry
from fsdp2x.export.plans import Plan
from fsdp2x.hf.names import Family
from fsdp2x.runtime.explain import explained
from fsdp2x.sync.engine import POSITION_BYTES, delta_bytes
from fsdp2x.sync.targets.base import Delta

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view as integers; complex numbers of 16 bytes as two."""
    if tensor.itemsize not in _BITS:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.itemsize])


class Snapshot:
    """What the engines hold of this rank's shards, by FQN."""

    def __init__(self, plans: list[Plan]) -> None:
        """
        Raises:
            NotImplementedError: a shard is a tensor subclass, whose bits are not its own.
        """
        self._entries = [entry for plan in plans for entry in (*plan.gathered, *plan.alone)]
        for entry in self._entries:
            if type(local := entry.local) not in (torch.Tensor, nn.Parameter):
                raise NotImplementedError(
                    f"fsdp2x.sync.connect: deltas of {entry.name!r}, which is a {type(local).__name__}, are not "
                    "supported; connect with deltas=False"
                )
        self._held: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def advance(self) -> None:
        """The engines hold the shards as they are now."""
        for entry in self._entries:
            held = self._held.get(entry.name)
            if held is None:
                self._held[entry.name] = entry.local.to(entry.dtype, copy=True)
            else:
                held.copy_(entry.local)

    @torch.no_grad()
    def changed(self, entry: Entry) -> tuple[torch.Tensor, torch.Tensor]:
        """(positions, values) of what differs, both flat, positions in the local shard."""
        now = entry.local.to(entry.dtype)
        differs = _bits(now) != _bits(self._held[entry.name])
        if differs.dim() > now.dim():
            differs = differs.any(-1)
        positions = differs.reshape(-1).nonzero().view(-1)
        return positions, now.reshape(-1)[positions]


@dataclass
class BucketDelta:
    """What changed in one bucket: its dense part as a plan, and the sparse families.

    ``sparse``: (family, its only parameter, positions, values), the last two of this rank, positions in its shard.
    ``counts``: [ranks of the ring, sparse families], None without any.
    """

    dense: Plan
    sparse: list[tuple[Family, Entry, torch.Tensor, torch.Tensor]]
    counts: torch.Tensor | None


def find_changes(
    plan: Plan, snapshot: Snapshot, first_ring: list[int], own_ring: list[int], slot_bytes: int
) -> BucketDelta:
    """Collective over the default group, which exchanges one count for each parameter.

    Args:
        first_ring: ranks of the default group that gather this bucket on rank 0: their counts decide, so that
            replicas do not decide differently.
        own_ring: those of this rank's ring.
        slot_bytes: twice what the gathered sparse parts may take.
    """
    entries = [*plan.gathered, *plan.alone]
    found = {entry.name: snapshot.changed(entry) for entry in entries}
    counts = _exchange_counts(plan, [found[entry.name][0].numel() for entry in entries])
    column = {entry.name: index for index, entry in enumerate(entries)}
    gathered = {entry.name: entry for entry in plan.gathered}
    dense, sparse, columns = Plan(plan.index, plan.group, plan.device), [], []
    padded_bytes = torch.zeros(len(first_ring), dtype=torch.int64)
    for family in plan.families:
        of_family = counts[:, [column[name] for name in family.params]]
        name = family.params[0]
        if not of_family.any():
            continue
        entry = gathered.get(name)
        if family.is_renamed_only and len(family.params) == 1 and entry is not None:
            sizes = [delta_bytes(int(count), entry.dtype)[1] for count in of_family[first_ring]]
            # The ranks' parts are padded to the longest when they are gathered.
            padded_bytes += torch.tensor(sizes)
            is_small = 2 * len(first_ring) * int(padded_bytes.max()) <= slot_bytes
            if is_small and 2 * sum(sizes) <= entry.whole_bytes:
                sparse.append((family, entry, *found[name]))
                columns.append(column[name])
                continue
            padded_bytes -= torch.tensor(sizes)
        dense.families.append(family)
        dense.gathered += [gathered[name] for name in family.params if name in gathered]
        dense.alone += [entry for entry in plan.alone if entry.name in family.params]
    return BucketDelta(dense, sparse, counts[own_ring][:, columns] if columns else None)


def _exchange_counts(plan: Plan, mine: list[int]) -> torch.Tensor:
    """[ranks of the default group, parameters] on the CPU."""
    device = (plan.gathered or plan.alone)[0].device if dist.get_backend() == "nccl" else torch.device("cpu")
    counts = torch.tensor(mine, dtype=torch.int64, device=device)
    everyone = torch.empty(dist.get_world_size() * len(mine), dtype=torch.int64, device=device)
    with explained(None, f"exchange of the changes in bucket {plan.index}"):
        dist.all_gather_into_tensor(everyone, counts)
    return everyone.view(dist.get_world_size(), len(mine)).cpu()


@torch.no_grad()
def gather_changes(plan: Plan, changes: BucketDelta, receive: bool) -> tuple[Delta, ...]:
    """The sparse part, with positions in the whole tensors. Collective over the bucket's ring."""
    if not changes.sparse:
        return ()
    group = plan.group
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    device = changes.sparse[0][1].wire_device
    sizes = [
        [delta_bytes(int(n), e.dtype)[1] for n, (_, e, _, _) in zip(row, changes.sparse, strict=True)]
        for row in changes.counts
    ]
    largest = max(sum(row) for row in sizes)
    packed = torch.zeros(largest, dtype=torch.uint8, device=device)
    end = 0
    for (_, entry, positions, values), size in zip(changes.sparse, sizes[rank], strict=True):
        where, what = _parts(packed, end, positions.numel(), entry.dtype)
        where.copy_(_whole_positions(entry, positions, rank, world))
        what.copy_(values)
        end += size
    received = torch.empty(world * largest, dtype=torch.uint8, device=device)
    with explained(group, f"gather of the changes in bucket {plan.index}"):
        dist.all_gather_into_tensor(received, packed, group=group)
    if not receive:
        return ()
    deltas, ends = [], [peer * largest for peer in range(world)]
    for index, (family, entry, _, _) in enumerate(changes.sparse):
        parts = [_parts(received, ends[p], int(changes.counts[p, index]), entry.dtype) for p in range(world)]
        ends = [end + row[index] for end, row in zip(ends, sizes, strict=True)]
        positions, values = (torch.cat(column) for column in zip(*parts, strict=True))
        deltas.append(Delta(family.outputs[0], positions, values))
    return tuple(deltas)


def _parts(memory: torch.Tensor, begin: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    values = begin + delta_bytes(count, dtype)[0]
    where = memory[begin : begin + count * POSITION_BYTES].view(torch.int64)
    return where, memory[values : values + count * dtype.itemsize].view(dtype)


def _whole_positions(entry: Entry, positions: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Positions in the flattened whole of positions in the flattened shard."""
    begin, num_rows = entry.rows(rank, world)
    inner = entry.param.shape[entry.shard_dim + 1 :].numel()
    if num_rows == 0:
        return positions
    block = num_rows * inner
    outer = torch.div(positions, block, rounding_mode="floor")
    return outer * (entry.param.shape[entry.shard_dim] * inner) + begin * inner + positions % block
