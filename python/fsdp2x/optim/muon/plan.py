"""Plans a step of ``Muon`` once: which rank orthogonalizes which matrices, and how their blocks are exchanged.

A parameter is a stack of matrices [num, rows, columns], num = 1 for a matrix. Ranks hold blocks of it. Each round of
matrices takes one all-to-all to the owners and one back. With rows over two ranks, and bfloat16:

    parameter      blocks                        owner    what its owner receives from the other rank, and sends back
    0: 1 x 6 x 4   rank 0: rows 0-2, 1: 3-5      0        24 bytes
    1: 1 x 2 x 4   rank 0: row 0,    1: row 1    1        8 bytes
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import with_memory
from fsdp2x.base.collectives import explained
from fsdp2x.base.failures import exchange, odd_rank
from fsdp2x.base.memory_file import aligned_starts, tensor_at
from fsdp2x.optim.muon.newton_schulz import flops
from fsdp2x.optim.muon.split import Split
from fsdp2x.sharding.mesh import covering_group
from fsdp2x.sharding.spec import lines_of, strided_axes

Extent = tuple[int, int, int]


class Piece(NamedTuple):
    """A rank's part of a stack: its start in the stack, its shape, and its start in the local tensor."""

    start: Extent
    shape: Extent
    local_start: Extent = (0, 0, 0)


@dataclass(frozen=True)
class MatrixBlock:
    """A part of a stack: its start, its shape, and the ranks that hold it (replicas), in order."""

    start: Extent
    shape: Extent
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class MatrixJob:
    """Matrices of one parameter that their owner orthogonalizes at once, as blocks that make them up."""

    param: int
    first: int  # first matrix of the parameter
    shape: Extent  # full matrices
    blocks: tuple[MatrixBlock, ...]
    owner: int

    @property
    def is_local(self) -> bool:
        """Whether only the owner takes part."""
        return all(block.ranks == (self.owner,) for block in self.blocks)

    def sender(self, block: MatrixBlock) -> int:
        """Returns the rank that sends ``block`` to the owner: among replicas the one in the owner's own."""
        replica = next(held.ranks.index(self.owner) for held in self.blocks if self.owner in held.ranks)
        return block.ranks[replica % len(block.ranks)]


@dataclass(frozen=True)
class Deal:
    """``rounds`` are jobs whose blocks are exchanged together. ``local`` are those without an exchange."""

    rounds: list[list[MatrixJob]]
    local: list[MatrixJob]


def blocks_of(pieces: Sequence[Sequence[Piece]]) -> list[MatrixBlock]:
    """The different blocks among the pieces of each rank, without empty ones."""
    ranks: dict[tuple[Extent, Extent], list[int]] = defaultdict(list)
    for rank, held in enumerate(pieces):
        for piece in held:
            if 0 not in piece.shape:
                ranks[piece.start, piece.shape].append(rank)
    return [MatrixBlock(*piece, tuple(held)) for piece, held in sorted(ranks.items())]


def deal(params: dict[int, tuple[Extent, list[MatrixBlock], int]], round_numel: int, loads: dict[int, int]) -> Deal:
    """Deals the matrices of ``params`` (number -> shape, blocks, cost of a matrix) to ranks that hold blocks of them.

    The longest job goes to the rank with the least work, and so on (Graham, 1969). If every rank may take every job, no
    rank has more than 4/3 of the optimum. A stack is cut into as many jobs as there are ranks for it.

    Args:
        params: parameters by number.
        round_numel: elements that an owner takes in a round, or one job.
        loads: work that each rank already has. Updated in place.
    """
    candidates = [job for number, (shape, blocks, _) in params.items() for job in _jobs(number, shape, blocks)]
    costs = [shape[0] * params[number][2] for number, _, shape, _ in candidates]
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
    """Returns (parameter, first matrix, shape, blocks): matrices that the same ranks hold, cut for all of these."""
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


# Writes a block, or nothing if a replica sends it.
Fill = Callable[[MatrixJob, MatrixBlock, Tensor | None], None]
# Waits, and yields blocks of this rank.
Arrival = Callable[[], Iterator[tuple[MatrixJob, MatrixBlock, Tensor]]]
Wholes = list[tuple[MatrixJob, Tensor]]


class _Parcels:
    """Bytes that one rank sends to all ranks or receives from them, by rank. Blocks are in the order of jobs."""

    def __init__(self, world: int, dtype: torch.dtype) -> None:
        self._by_peer: list[list[tuple[MatrixJob, MatrixBlock]]] = [[] for _ in range(world)]
        self._dtype = dtype

    def add(self, peer: int, job: MatrixJob, block: MatrixBlock) -> None:
        self._by_peer[peer].append((job, block))

    @property
    def split_bytes(self) -> list[int]:
        return [self._starts(parcels)[1] for parcels in self._by_peer]

    def blocks(self, buffer: Tensor) -> Iterator[tuple[MatrixJob, MatrixBlock, Tensor]]:
        """Yields each block with its memory in ``buffer``, of the block's shape."""
        begin = 0
        for parcels in self._by_peer:
            starts, begin = self._starts(parcels, begin)
            for (job, block), start in zip(parcels, starts, strict=True):
                yield job, block, tensor_at(buffer, start, block.shape, self._dtype)

    def _starts(self, parcels: list[tuple[MatrixJob, MatrixBlock]], begin: int = 0) -> tuple[list[int], int]:
        return aligned_starts((math.prod(block.shape) * self._dtype.itemsize for _, block in parcels), begin)


class Round:
    """The blocks of one round on this rank. Buffers live from the start of an exchange to its end."""

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
        """Starts sending blocks to their owners. ``fill`` writes those of this rank."""
        arrive = self._start(self._sent, self._received, fill)
        for job, block in self._held_alike:
            fill(job, block, None)

        def finish() -> Wholes:
            wholes = {id(job): torch.empty(job.shape, dtype=self._dtype, device=self._device) for job in self.owned}
            for job, block, part in arrive():
                part_of(wholes[id(job)], job, block).copy_(part)
            return [(job, wholes[id(job)]) for job in self.owned]

        return finish

    def give_back(self, wholes: Wholes) -> Arrival:
        """Starts sending full matrices to all holders of their blocks. The result waits and yields this rank's."""
        by_job = {id(job): whole for job, whole in wholes}

        def fill(job: MatrixJob, block: MatrixBlock, part: Tensor | None) -> None:
            assert part is not None, "every block of a whole matrix goes somewhere"
            part.copy_(part_of(by_job[id(job)], job, block))

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


def part_of(whole: Tensor, job: MatrixJob, block: MatrixBlock) -> Tensor:
    num, rows, columns = block.shape
    first, row, column = block.start
    first -= job.first
    return whole[first : first + num, row : row + rows, column : column + columns]


# The most that an owner receives in one round, or one matrix. Four times as much is processed at a time.
ROUND_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Matrices:
    """A parameter of ``Muon``, its name, its blocks, and the iteration of its group. Ranks agree on all but names."""

    param: Tensor
    name: str
    split: Split
    ns_steps: int
    ns_method: str

    @property
    def shape(self) -> Extent:
        return _extent(self.param.shape)

    @property
    def flops(self) -> int:
        """The cost of one of its matrices. Only plans need it, not steps."""
        _, rows, columns = self.shape
        return sum(flops(*part, self.ns_steps, self.ns_method) for part in self.split.parts(rows, columns))


@dataclass(frozen=True)
class MuonPlan:
    """A plan for parameters by their number in ``params``. Jobs of ``local`` belong to this rank."""

    params: list[Matrices]
    pieces: list[list[Piece]]  # of each, what this rank holds
    dtype: torch.dtype
    rounds: list[Round]
    local: list[MatrixJob]

    def is_for(self, params: Sequence[Matrices], dtype: torch.dtype) -> bool:
        def same(one: Matrices, other: Matrices) -> bool:
            return one.param is other.param and one.split == other.split

        return dtype == self.dtype and len(params) == len(self.params) and all(map(same, params, self.params))


def make_plan(params: list[Matrices], dtype: torch.dtype) -> MuonPlan:
    """Collective over the ranks of each mesh: they tell each other what they hold."""
    by_mesh: dict[DeviceMesh | None, list[int]] = {}
    for number, one in enumerate(params):
        by_mesh.setdefault(one.param.device_mesh if isinstance(one.param, DTensor) else None, []).append(number)
    pieces = [_pieces(one) for one in params]
    loads: dict[int, int] = {}  # by rank of the default group
    rounds: list[Round] = []
    local: list[MatrixJob] = []
    for mesh, numbers in by_mesh.items():
        group = covering_group(mesh) if mesh is not None and mesh.size() > 1 else None
        held = [[pieces[number] for number in numbers]]
        if group is not None:
            held = _exchange(group, [params[number] for number in numbers], held[0])
        ranks = [0] if group is None else dist.get_process_group_ranks(group)
        loads_here = {rank: loads.get(whole, 0) for rank, whole in enumerate(ranks)}
        matrices = {
            number: (params[number].shape, blocks_of([of_rank[index] for of_rank in held]), params[number].flops)
            for index, number in enumerate(numbers)
        }
        dealt: Deal = deal(matrices, ROUND_BYTES // dtype.itemsize, loads_here)
        loads.update((ranks[rank], load) for rank, load in loads_here.items())
        here = 0 if group is None else group.rank()
        local += [job for job in dealt.local if job.owner == here]
        if group is not None:
            assert mesh is not None, "a group has one"
            device = _device(mesh, [params[number].param for number in numbers])
            rounds += [Round(jobs, group, dtype, device) for jobs in dealt.rounds]
    return MuonPlan(params, pieces, dtype, rounds, local)


def _exchange(group: dist.ProcessGroup, params: list[Matrices], pieces: list) -> list[list]:
    here = [(one.shape, one.split, one.flops) for one in params]
    told = exchange((here, pieces), group)
    everywhere = [theirs for theirs, _ in told]
    if (odd := odd_rank(everywhere)) is not None:
        pairs = zip(params, everywhere[0], everywhere[odd], strict=False)
        differs = next((repr(one.name) for one, a, b in pairs if a != b), "another number of them")
        raise RuntimeError(
            f"fsdp2x.optim.Muon: rank {dist.get_global_rank(group, odd)} has other matrices than rank "
            f"{dist.get_global_rank(group, 0)} ({differs}): give all ranks of a mesh the same parameters in the same "
            "order, with the same settings"
        )
    return [of_rank for _, of_rank in told]


def _device(mesh: DeviceMesh, params: list[Tensor]) -> torch.device:
    """Returns where matrices are orthogonalized: on the shards' device, or for offloaded shards the current device."""
    return next(
        (param.device for param in params if param.device.type == mesh.device_type), torch.device(mesh.device_type)
    )


@with_memory()
def _pieces(matrices: Matrices) -> list[Piece]:
    """Returns this rank's pieces. There are several if tensor parallelism cut each block of a fused matrix."""
    param = matrices.param
    if not isinstance(param, DTensor):
        return [Piece((0, 0, 0), _extent(param.shape))]
    packed, _ = strided_axes(param)
    if not packed:
        shape, start = torch_private.local_shape_and_offset(param.shape, param.device_mesh, param.placements)
        return [Piece(_extent(start, 0), _extent(shape))]
    for axis in packed:
        placement: Any = param.placements[axis]
        size = param.shape[placement.dim]
        if size % (placement.split_factor * param.device_mesh.size(axis)):
            raise ValueError(
                f"fsdp2x.optim.Muon: {matrices.name} of shape {tuple(param.shape)} has placements {param.placements}, "
                f"which do not cut {size} lines evenly. Use a tensor-parallel size that divides each block."
            )
    lines = [torch.arange(1, device="cpu")] * (3 - param.ndim) + lines_of(param)
    runs = itertools.product(*(list(_runs(line.tolist())) for line in lines))
    return [Piece(*zip(*ranges, strict=True)) for ranges in runs]


def _runs(line: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first, size, place in ``line``) of each run of numbers that follow each other."""
    begins = [place for place, number in enumerate(line) if place == 0 or number != line[place - 1] + 1]
    for begin, end in itertools.pairwise([*begins, len(line)]):
        yield line[begin], end - begin, begin


def _extent(sizes: Sequence[int], first: int = 1) -> Extent:
    """Returns sizes or places as [num, rows, columns]. Those of a matrix begin with ``first``."""
    num, rows, columns = (first, *sizes)[-3:]
    return num, rows, columns
