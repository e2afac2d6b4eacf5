"""What a step of ``Muon`` has to do, planned once: who owns which matrices, over which process groups they travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2x.base import torch_private
from fsdp2x.base.failures import exchange
from fsdp2x.optim.dealing import Deal, Extent, MatrixJob, blocks_of, deal
from fsdp2x.optim.matrix_exchange import Round
from fsdp2x.sharding.mesh import covering_group

# What an owner receives at most in one round, or one matrix. Four times as much is taken at a time.
ROUND_BYTES = 64 * 2**20


@dataclass(frozen=True)
class MuonPlan:
    """For parameters by their number in ``params``. Jobs of ``local`` are this rank's own."""

    params: list[Tensor]
    first: list[int]  # of each, the first matrix of this rank's part
    dtype: torch.dtype
    rounds: list[Round]
    local: list[MatrixJob]

    def is_for(self, params: Sequence[Tensor], dtype: torch.dtype) -> bool:
        same = len(params) == len(self.params) and all(a is b for a, b in zip(params, self.params, strict=True))
        return same and dtype == self.dtype


def make_plan(params: list[Tensor], names: list[str], dtype: torch.dtype) -> MuonPlan:
    """Collective over the ranks of each mesh: they tell each other what they hold.

    Raises:
        RuntimeError: ranks have different matrices.
    """
    by_mesh: dict[DeviceMesh | None, list[int]] = {}
    for number, param in enumerate(params):
        by_mesh.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(number)
    pieces = [_piece(param) for param in params]
    loads: dict[int, int] = {}  # by rank of the default group
    rounds: list[Round] = []
    local: list[MatrixJob] = []
    for mesh, numbers in by_mesh.items():
        shapes = [_extent(params[number].shape) for number in numbers]
        group = covering_group(mesh) if mesh is not None and mesh.size() > 1 else None
        held = [[pieces[number] for number in numbers]]
        if group is not None:
            held = _exchange(group, shapes, held[0], [names[number] for number in numbers])
        ranks = [0] if group is None else dist.get_process_group_ranks(group)
        loads_here = {rank: loads.get(whole, 0) for rank, whole in enumerate(ranks)}
        blocks = [blocks_of([of_rank[index] for of_rank in held]) for index in range(len(numbers))]
        dealt: Deal = deal(
            dict(zip(numbers, zip(shapes, blocks, strict=True), strict=True)), ROUND_BYTES // dtype.itemsize, loads_here
        )
        loads.update((ranks[rank], load) for rank, load in loads_here.items())
        here = 0 if group is None else group.rank()
        local += [job for job in dealt.local if job.owner == here]
        if group is not None:
            assert mesh is not None, "a group has one"
            device = _device(mesh, [params[number] for number in numbers])
            rounds += [Round(jobs, group, dtype, device) for jobs in dealt.rounds]
    return MuonPlan(params, [start[0] for start, _ in pieces], dtype, rounds, local)


def _exchange(group: dist.ProcessGroup, shapes: list[Extent], pieces: list, names: list[str]) -> list[list]:
    told = exchange((shapes, pieces), group)
    for rank, (other, _) in enumerate(told):
        if other != shapes:
            differs = next(
                (name for name, a, b in zip(names, shapes, other, strict=False) if a != b), f"{len(other)} of them"
            )
            raise RuntimeError(
                f"fsdp2x.optim.Muon: rank {dist.get_global_rank(group, rank)} has other matrices than rank "
                f"{dist.get_rank()} ({differs} against {len(shapes)}): give all ranks of a mesh the same parameters "
                "in the same order"
            )
    return [of_rank for _, of_rank in told]


def _device(mesh: DeviceMesh, params: list[Tensor]) -> torch.device:
    """Where matrices are orthogonalised: where shards are, or with shards in host memory the current device."""
    return next(
        (param.device for param in params if param.device.type == mesh.device_type), torch.device(mesh.device_type)
    )


def _piece(param: Tensor) -> tuple[Extent, Extent]:
    """(start, shape) of what this rank holds."""
    if not isinstance(param, DTensor):
        return (0, 0, 0), _extent(param.shape)
    shape, start = torch_private.local_shape_and_offset(param.shape, param.device_mesh, param.placements)
    return _extent(start, 0), _extent(shape)


def _extent(sizes: Sequence[int], first: int = 1) -> Extent:
    """Sizes or places as [num, rows, columns]; those of a matrix have ``first`` in front."""
    num, rows, columns = (first, *sizes)[-3:]
    return num, rows, columns
