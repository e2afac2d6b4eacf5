"""Brings blocks of matrices to the ranks that own them, and back: one all-to-all each way for a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2x.base import torch_private
from fsdp2x.base.collectives import explained
from fsdp2x.base.memory_file import aligned_starts, tensor_at
from fsdp2x.optim.dealing import MatrixBlock, MatrixJob

# Writes a block; to nowhere where a replica sends it.
Fill = Callable[[MatrixJob, MatrixBlock, Tensor | None], None]
# Waits, and yields blocks of this rank.
Arrival = Callable[[], Iterator[tuple[MatrixJob, MatrixBlock, Tensor]]]
Wholes = list[tuple[MatrixJob, Tensor]]


class _Parcels:
    """What one rank sends to all, or receives from all: bytes by peer, blocks in the order of jobs."""

    def __init__(self, world: int, dtype: torch.dtype) -> None:
        self._by_peer: list[list[tuple[MatrixJob, MatrixBlock]]] = [[] for _ in range(world)]
        self._dtype = dtype

    def add(self, peer: int, job: MatrixJob, block: MatrixBlock) -> None:
        self._by_peer[peer].append((job, block))

    @property
    def split_bytes(self) -> list[int]:
        return [self._starts(parcels)[1] for parcels in self._by_peer]

    def blocks(self, buffer: Tensor) -> Iterator[tuple[MatrixJob, MatrixBlock, Tensor]]:
        """Each block with its memory in ``buffer``, of the block's shape."""
        begin = 0
        for parcels in self._by_peer:
            starts, begin = self._starts(parcels, begin)
            for (job, block), start in zip(parcels, starts, strict=True):
                yield job, block, tensor_at(buffer, start, block.shape, self._dtype)

    def _starts(self, parcels: list[tuple[MatrixJob, MatrixBlock]], begin: int = 0) -> tuple[list[int], int]:
        return aligned_starts((math.prod(block.shape) * self._dtype.itemsize for _, block in parcels), begin)


class Round:
    """The blocks of one round on this rank. Buffers live from the start of a way to its end."""

    def __init__(
        self, jobs: list[MatrixJob], group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._group, self._dtype, self._device = group, dtype, device
        world, rank = group.size(), group.rank()
        self.owned = [job for job in jobs if job.owner == rank]
        self._sent, self._received, self._returned, self._awaited = (_Parcels(world, dtype) for _ in range(4))
        self._held_alike: list[tuple[MatrixJob, MatrixBlock]] = []  # blocks of this rank that a replica of it sends
        for job in jobs:
            for block in job.blocks:
                sender = job.sender(block)
                if sender == rank:
                    self._sent.add(job.owner, job, block)
                elif rank in block.ranks:
                    self._held_alike.append((job, block))
                if job.owner == rank:
                    self._received.add(sender, job, block)
                    for holder in block.ranks:
                        self._returned.add(holder, job, block)
                if rank in block.ranks:
                    self._awaited.add(job.owner, job, block)

    def send(self, fill: Fill) -> Callable[[], Wholes]:
        """Starts to bring blocks to their owners; ``fill`` writes those of this rank.

        The result waits, and returns the whole matrices of this rank's jobs.
        """
        arrive = self._start(self._sent, self._received, fill)
        for job, block in self._held_alike:
            fill(job, block, None)

        def finish() -> Wholes:
            wholes = {id(job): torch.empty(job.shape, dtype=self._dtype, device=self._device) for job in self.owned}
            for job, block, part in arrive():
                _part_of(wholes[id(job)], job, block).copy_(part)
            return [(job, wholes[id(job)]) for job in self.owned]

        return finish

    def give_back(self, wholes: Wholes) -> Arrival:
        """Starts to bring whole matrices to all holders of their blocks; the result waits, and yields this rank's."""
        by_job = {id(job): whole for job, whole in wholes}

        def fill(job: MatrixJob, block: MatrixBlock, part: Tensor | None) -> None:
            assert part is not None, "every block of a whole matrix goes somewhere"
            part.copy_(_part_of(by_job[id(job)], job, block))

        return self._start(self._returned, self._awaited, fill)

    def _start(self, outgoing: _Parcels, incoming: _Parcels, fill: Fill) -> Arrival:
        sent, received = outgoing.split_bytes, incoming.split_bytes
        source, target = (torch.empty(sum(split), dtype=torch.uint8, device=self._device) for split in (sent, received))
        for job, block, part in outgoing.blocks(source):
            fill(job, block, part)
        what = "exchange of matrices of optim.Muon"
        with torch_private.unobserved(), explained(self._group, what):
            work: Any = dist.all_to_all_single(target, source, received, sent, group=self._group, async_op=True)

        def arrive() -> Iterator[tuple[MatrixJob, MatrixBlock, Tensor]]:
            with explained(self._group, what):
                work.wait()
            nonlocal source
            source = None
            return incoming.blocks(target)

        return arrive


def _part_of(whole: Tensor, job: MatrixJob, block: MatrixBlock) -> Tensor:
    num, rows, columns = block.shape
    first, row, column = block.start
    first -= job.first
    return whole[first : first + num, row : row + rows, column : column + columns]
