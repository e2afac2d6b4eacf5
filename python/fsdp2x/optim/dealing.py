"""Which rank orthogonalises which matrices, and in which rounds their blocks travel. Numbers only, no tensors.

A parameter is a stack of matrices [num, rows, columns], num = 1 for a matrix. Ranks hold blocks of it. With rows over
two ranks, and bfloat16:

    parameter      blocks                        owner    what its owner receives from the other rank, and sends back
    0: 1 x 6 x 4   rank 0: rows 0-2, 1: 3-5      0        24 bytes
    1: 1 x 2 x 4   rank 0: row 0,    1: row 1    1        8 bytes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp2x.optim.newton_schulz import step_flops

Extent = tuple[int, int, int]


@dataclass(frozen=True)
class MatrixBlock:
    """A part of a stack: where it begins, its shape, and the ranks that hold it (replicas), in order."""

    start: Extent
    shape: Extent
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class MatrixJob:
    """Matrices of one parameter that their owner orthogonalises at once, as blocks that make them up."""

    param: int
    first: int  # matrix of the parameter
    shape: Extent  # whole matrices
    blocks: tuple[MatrixBlock, ...]
    owner: int

    @property
    def is_local(self) -> bool:
        """Whether only the owner has to do with it."""
        return all(block.ranks == (self.owner,) for block in self.blocks)

    def sender(self, block: MatrixBlock) -> int:
        """The rank that sends ``block`` to the owner: of replicas the one in the owner's own."""
        replica = next(held.ranks.index(self.owner) for held in self.blocks if self.owner in held.ranks)
        return block.ranks[replica % len(block.ranks)]


@dataclass(frozen=True)
class Deal:
    """``rounds``: jobs whose blocks travel together. ``local``: those that need no travel."""

    rounds: list[list[MatrixJob]]
    local: list[MatrixJob]


def blocks_of(pieces: Sequence[tuple[Extent, Extent]]) -> list[MatrixBlock]:
    """The different blocks among what each rank holds, (start, shape); empty ones are nobody's."""
    ranks: dict[tuple[Extent, Extent], list[int]] = defaultdict(list)
    for rank, piece in enumerate(pieces):
        if 0 not in piece[1]:
            ranks[piece].append(rank)
    return [MatrixBlock(*piece, tuple(held)) for piece, held in sorted(ranks.items())]


def deal(params: dict[int, tuple[Extent, list[MatrixBlock]]], round_numel: int, loads: dict[int, int]) -> Deal:
    """Deals the matrices of ``params`` (number -> shape, blocks) to the ranks that hold blocks of them.

    The longest job goes to the rank with the least to do, and so on (Graham, 1969): no rank has more than 4/3 of the
    best there is where every rank may take every job. A stack is cut into as many jobs as there are ranks for it.

    Args:
        round_numel: elements that an owner takes in a round, or one job.
        loads: what each rank has to do already; brought up to date.
    """
    candidates = [job for number, (shape, blocks) in params.items() for job in _jobs(number, shape, blocks)]
    costs = [step_flops(*shape) for _, _, shape, _ in candidates]
    rounds: list[list[MatrixJob]] = []
    local: list[MatrixJob] = []
    taken: dict[int, tuple[int, int]] = {}  # by owner: its round, and elements in it
    for index in sorted(range(len(candidates)), key=lambda index: -costs[index]):
        number, first, shape, blocks = candidates[index]
        owner = min({rank for block in blocks for rank in block.ranks}, key=lambda rank: (loads.get(rank, 0), rank))
        loads[owner] = loads.get(owner, 0) + costs[index]
        job = MatrixJob(number, first, shape, blocks, owner)
        if job.is_local:
            local.append(job)
            continue
        numel = shape[0] * shape[1] * shape[2]
        at, held = taken.get(owner, (0, 0))
        if held and held + numel > round_numel:
            at, held = at + 1, 0
        taken[owner] = at, held + numel
        rounds.extend([] for _ in range(at + 1 - len(rounds)))
        rounds[at].append(job)
    return Deal(rounds, local)


def _jobs(number: int, shape: Extent, blocks: list[MatrixBlock]) -> list[tuple[int, int, Extent, tuple]]:
    """(parameter, first matrix, shape, blocks): matrices that the same ranks hold, cut for all of these."""
    by_matrices: dict[tuple[int, int], list[MatrixBlock]] = defaultdict(list)
    for block in blocks:
        by_matrices[block.start[0], block.shape[0]].append(block)
    jobs = []
    for (begin, num), held in by_matrices.items():
        num_parts = min(num, len({rank for block in held for rank in block.ranks}))
        for part in range(num_parts):
            first, end = (begin + num * (part + i) // num_parts for i in (0, 1))
            cut = tuple(
                MatrixBlock((first, *block.start[1:]), (end - first, *block.shape[1:]), block.ranks) for block in held
            )
            jobs.append((number, first, (end - first, *shape[1:]), cut))
    return jobs
