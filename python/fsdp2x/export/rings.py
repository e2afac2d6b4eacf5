"""Memory that buckets are gathered into in turn: two slots shared between the ranks of a host, or one of each rank.

A bucket lies in a slot parameter by parameter, each whole and contiguous:

    slot    | p0: rows of r0 r1 .. |pad| p1: rows of r0 r1 .. |pad| ...       bytes; every parameter starts aligned

``SharedRing``: one mapping for all ranks of the group. Each rank writes its rows into it, cast on the way, so a bucket
is one copy per host. Tensors look through a second, copy-on-write mapping: what a rank writes to them stays its own.
``GroupRing``: the bytes of the next bucket come through collectives of the process group into a receive buffer, and are
sorted into the one slot when the bucket before is done with.

For bucket k of a ring every rank does, in this order: ``fill(k)``, ``finish(k)``, use it, ``fill(k+1)`` may come before
the use ends. ``finish(k)`` is the only meeting: every rank has filled k, and is done with k-1, so that k+1 may go
where k-1 was.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp2x.export.entries import Entry, aligned
from fsdp2x.runtime import torch_private
from fsdp2x.runtime.transport import why_not_shared

NUM_SLOTS = 2


def place(entries: Sequence[Entry]) -> tuple[list[int], int]:
    """Where each whole parameter starts in a slot, and where the last one ends."""
    starts, end = [], 0
    for entry in entries:
        starts.append(end)
        end += aligned(entry.whole_bytes)
    return starts, end


def make_ring(group: dist.ProcessGroup, device: torch.device, slot_bytes: int, transport: str, receivers: list[bool]):
    """The ring of one process group; collective over it. ``receivers``: by rank of the group, who wants the tensors.

    Raises:
        ValueError: ``transport="shm"`` where the ranks cannot share memory.
    """
    reason: str | None = "the parameters are not on the CPU"
    if transport != "process_group" and device.type == "cpu":
        reason, hello, is_observed = why_not_shared(group)
        if transport == "auto" and is_observed:
            reason = "a dispatch mode watches the collectives"
        if reason is None:
            return SharedRing(group, slot_bytes, hello)
    if transport == "shm":
        raise ValueError(f'transport="shm" is not possible: {reason}; use transport="process_group"')
    return GroupRing(group, device, slot_bytes, receivers)


class GroupRing:
    """One slot, one send and one receive buffer of this rank, reused by every bucket."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, slot_bytes: int, receivers: list[bool]) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.device, self.receivers = device, receivers
        self._slot_bytes = slot_bytes
        self._slot: torch.Tensor | None = None
        self._sent = self._received = torch.empty(0, dtype=torch.uint8, device=device)
        self._work: list = []

    @torch.no_grad()
    def fill(self, entries: Sequence[Entry]) -> None:
        """Starts the gather of a bucket; at most one runs at a time."""
        if self.world == 1:
            return
        self._starts, end = [], 0
        for entry in entries:
            self._starts.append(end)
            end += aligned(entry.num_bytes(entry.rows(0, self.world)[1]))
        if self._sent.numel() < end:
            self._sent = torch.zeros(end, dtype=torch.uint8, device=self.device)
        mine = self._sent[:end]
        for entry, start in zip(entries, self._starts, strict=True):
            entry.part(mine, start, entry.rows(self.rank, self.world)[1]).copy_(entry.param.to_local())
        self._end = end
        if self.receivers[self.rank] and self._received.numel() < self.world * end:
            self._received = torch.empty(self.world * end, dtype=torch.uint8, device=self.device)
        received = self._received[: self.world * end]
        if all(self.receivers):
            self._work = [dist.all_gather_into_tensor(received, mine, group=self.group, async_op=True)]
            return
        for receiver in range(self.world):
            if self.receivers[receiver]:
                parts = list(received.chunk(self.world)) if receiver == self.rank else None
                destination = dist.get_global_rank(self.group, receiver)
                self._work.append(dist.gather(mine, parts, dst=destination, group=self.group, async_op=True))

    @torch.no_grad()
    def finish(self, entries: Sequence[Entry]) -> list[torch.Tensor] | None:
        """The whole tensors, in the order of ``entries``; None where this rank does not receive."""
        for work in self._work:
            if work is not None:
                work.wait()
        self._work = []
        if not self.receivers[self.rank]:
            return None
        if self._slot is None:
            self._slot = torch.empty(self._slot_bytes, dtype=torch.uint8, device=self.device)
        tensors = []
        for index, (entry, start) in enumerate(zip(entries, place(entries)[0], strict=True)):
            whole = entry.whole(self._slot, start)
            for rank in range(self.world):
                begin, num_rows = entry.rows(rank, self.world)
                if self.world == 1:
                    rows = entry.param.to_local()
                else:
                    rows = entry.part(self._received, rank * self._end + self._starts[index], num_rows)
                if num_rows:
                    whole.narrow(entry.shard_dim, begin, num_rows).copy_(rows)
            tensors.append(whole)
        return tensors


class SharedRing:
    """One anonymous memory file, mapped by all ranks of the group; gone with the last of them."""

    def __init__(self, group: dist.ProcessGroup, slot_bytes: int, hello: dict) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self._slot_bytes = -(-max(slot_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        size = NUM_SLOTS * self._slot_bytes
        file = _share_memory_file(group, size, hello)
        try:
            self._written = mmap.mmap(file, size, mmap.MAP_SHARED)
            self._private = mmap.mmap(file, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(file)
        self._num_filled = self._num_finished = 0
        self._given: list[list[tuple[torch.Tensor, int]]] = [[] for _ in range(NUM_SLOTS)]

    @torch.no_grad()
    def fill(self, entries: Sequence[Entry]) -> None:
        """Writes this rank's rows of a bucket."""
        begin = self._num_filled % NUM_SLOTS * self._slot_bytes
        self._num_filled += 1
        slot = torch.frombuffer(self._written, dtype=torch.uint8)[begin : begin + self._slot_bytes]
        for entry, start in zip(entries, place(entries)[0], strict=True):
            first, num_rows = entry.rows(self.rank, self.world)
            if num_rows:
                entry.whole(slot, start).narrow(entry.shard_dim, first, num_rows).copy_(entry.param.to_local())

    def finish(self, entries: Sequence[Entry]) -> list[torch.Tensor]:
        """Waits until every rank has written, and returns the whole tensors in the order of ``entries``."""
        index = self._num_finished % NUM_SLOTS
        self._num_finished += 1
        dist.barrier(group=self.group)
        begin = index * self._slot_bytes
        if any(tensor._version != version for tensor, version in self._given[index]):
            # Somebody wrote to the tensors that were here: his pages would hide what the ranks wrote since.
            self._private.madvise(mmap.MADV_DONTNEED, begin, self._slot_bytes)
        with torch.inference_mode(False):
            slot = torch.frombuffer(self._private, dtype=torch.uint8)[begin : begin + self._slot_bytes]
            tensors = [entry.whole(slot, start) for entry, start in zip(entries, place(entries)[0], strict=True)]
        self._given[index] = [(tensor, tensor._version) for tensor in tensors]
        return tensors


def _share_memory_file(group: dist.ProcessGroup, size: int, hello: dict) -> int:
    """A file descriptor of the same anonymous memory on every rank; rank 0 makes it and hands it out by socket."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    limit_s = torch_private.group_timeout(group).total_seconds()
    with contextlib.ExitStack() as stack:
        local = stack.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)))
        local.settimeout(limit_s)
        if rank == 0:
            local.bind("\0" + hello["socket"])
            local.listen(world)
        dist.barrier(group=group)
        if rank != 0:
            local.connect("\0" + hello["socket"])
            local.sendall(hello["token"])
            _, files, _, _ = socket.recv_fds(local, 1, 1)
            if not files:
                raise RuntimeError("fsdp2x.export.stream: rank 0 of the group ended before it shared its memory")
            return files[0]
        file = os.memfd_create("fsdp2x-export", os.MFD_CLOEXEC)
        undo = stack.enter_context(contextlib.ExitStack())
        undo.callback(os.close, file)
        os.ftruncate(file, size)
        num_served = 1
        while num_served < world:
            connection, _ = local.accept()
            with contextlib.closing(connection):
                connection.settimeout(limit_s)
                if connection.recv(len(hello["token"]), socket.MSG_WAITALL) == hello["token"]:
                    socket.send_fds(connection, [b"m"], [file])
                    num_served += 1
        undo.pop_all()
        return file
