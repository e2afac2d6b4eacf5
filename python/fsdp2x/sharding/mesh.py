"""Finds the ranks that share parameters: validates device meshes and picks their shard and replicate axes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2x.base import torch_private
from fsdp2x.base.failures import exchange
from fsdp2x.base.native import _C


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that shard parameters, and the ranks that hold copies of the same shards.

    ``mesh`` is the data-parallel mesh: 1-D (shard) or 2-D (replicate, shard). With ``dp_mesh_dims`` it is a slice of
    ``spmd_mesh``, the mesh of the parameters, which already are DTensors.
    """

    mesh: DeviceMesh
    group: dist.ProcessGroup | None  # None: a world of one rank, nothing is sharded
    rank: int
    world: int
    replicate_group: dist.ProcessGroup | None
    replicas: int
    device: torch.device
    spmd_mesh: DeviceMesh | None = None
    dp_mesh_dims: Any = None

    @property
    def has_replicate_axis(self) -> bool:
        return self.replicate_group is not None

    def rows(self, size: Sequence[int], dim: int, rank: int | None = None) -> tuple[list[int], list[int]]:
        """Returns start and sizes of ``rank``'s (default: this rank's) part of a ``size`` tensor cut along ``dim``."""
        begin, end = _C.shard_rows(size[dim], self.world, self.rank if rank is None else rank)
        start, sizes = [0] * len(size), list(size)
        start[dim], sizes[dim] = begin, end - begin
        return start, sizes


def default_mesh() -> DeviceMesh:
    """Returns a 1-D mesh over all ranks on the accelerator, or else the CPU. Initializes torch.distributed if needed.

    Raises:
        RuntimeError: there is no process group, and the environment variables to make one are missing.
    """
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise RuntimeError(
                "fully_shard: there is no process group, and the environment variables to make one are not set "
                f"({', '.join(missing)}). Start the script with torchrun --nproc_per_node=N, or call "
                "torch.distributed.init_process_group first. In a notebook, use accelerate.notebook_launcher."
            )
        dist.init_process_group()
    return init_device_mesh(torch_private.accelerator_type(), (dist.get_world_size(),))


def shard_group(mesh: DeviceMesh, dp_mesh_dims: Any = None) -> ShardGroup:
    """Checks ``mesh`` and returns its data-parallel axes.

    Raises:
        ValueError: the mesh does not contain this rank, does not have one or two axes, or lacks an axis of
            ``dp_mesh_dims``.
        AssertionError: a 2-D mesh has no axis names (the type that FSDP2 raises).
    """
    _check_member(mesh)
    if dp_mesh_dims is not None:
        return _from_named_axes(mesh, dp_mesh_dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 1:
        return _make(mesh, shard_axis=0, replicate_axis=None)
    if mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
    return _make(mesh, shard_axis=1, replicate_axis=0)


# Keyed by shard group, so units of one mesh share them. Freed with the group.
_post_forward_groups: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def post_forward_group(ranks: ShardGroup, world: int) -> ShardGroup:
    """Returns groups of ``world`` consecutive ranks of ``ranks.mesh``. Collective at a mesh and size's first call."""
    made = _post_forward_groups.setdefault(ranks.group, {})
    key = (ranks.mesh, world)
    if key not in made:
        mesh = DeviceMesh(ranks.mesh.device_type, ranks.mesh.mesh.view(-1, world))
        made[key] = _make(mesh, shard_axis=1, replicate_axis=None)
    return made[key]


# Keyed by shard group, freed with it.
_reduction_groups: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def reduction_group(ranks: ShardGroup) -> dist.ProcessGroup | None:
    """Returns a second process group over the ranks of ``ranks.group``, or None. Collective at the first call.

    Raises:
        RuntimeError: the ranks have created different numbers of process groups, so the new one would never connect.
    """
    if ranks.group is not None and ranks.group not in _reduction_groups:
        _reduction_groups[ranks.group] = _group_of_members(
            "set_separate_reduce_scatter_group", [ranks.group], ranks.device, "fsdp_reduce_scatter"
        )
    return _reduction_groups.get(ranks.group) if ranks.group is not None else None


# Keyed by the process group of a mesh's last axis, then by the mesh. Freed with the group.
_covering_groups: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def covering_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Returns a process group over all ranks of ``mesh``. Collective at the first call for a mesh of several axes.

    Raises:
        RuntimeError: see ``reduction_group``.
    """
    if mesh.ndim == 1:
        return mesh.get_group()
    world = dist.group.WORLD
    if world is not None and mesh.size() == world.size():
        return world
    made = _covering_groups.setdefault(mesh.get_group(mesh.ndim - 1), {})
    if mesh not in made:
        made[mesh] = _group_of_members("optim.Muon", mesh.get_all_groups(), _device(mesh), "mesh_of_matrices")
    return made[mesh]


def _group_of_members(
    caller: str, axes: list[dist.ProcessGroup], device: torch.device, description: str
) -> dist.ProcessGroup:
    """Makes a process group of all ranks that ``axes`` reach one after the other. Only those ranks take part.

    It has the timeout and the NCCL options of the first of ``axes``.
    """

    def told_along_axes(own: str) -> dict[int, str]:
        told = {dist.get_rank(): own}
        for group in axes:
            for others in exchange(told, group):
                told.update(others)
        return told

    members = sorted(told_along_axes(""))
    names = told_along_axes(torch_private.next_group_name(members))
    if len(set(names.values())) > 1:
        like_first = [rank for rank in members if names[rank] == names[members[0]]]
        raise RuntimeError(
            f"{caller}: ranks {like_first} have made another number of process groups than the others of {members}. "
            "torch.distributed names groups by this number, so the ranks would wait for each other forever. Make "
            "process groups on all ranks alike, or make groups of some ranks only after this call."
        )
    with torch_private.without_splits() as bound:
        made = dist.new_group(
            members,
            timeout=torch_private.group_timeout(axes[0], device),
            use_local_synchronization=True,
            pg_options=torch_private.nccl_options_like(axes[0], device),
            group_desc=description,
            device_id=bound,
        )
    assert isinstance(made, dist.ProcessGroup), "every caller is a member"
    return made


def from_mesh_info(info: Any) -> ShardGroup:
    """Returns the ranks of the ``mesh_info`` in a ``ShardPlacementResult`` of ``shard_placement_fn``."""
    return _make(
        info.mesh,
        shard_axis=getattr(info, "shard_mesh_dim", None),
        replicate_axis=getattr(info, "replicate_mesh_dim", None),
        spmd_mesh=getattr(info, "spmd_mesh", None),
        dp_mesh_dims=getattr(info, "dp_mesh_dims", None),
    )


def _check_member(mesh: DeviceMesh) -> None:
    if mesh.get_coordinate() is None:
        ranks = mesh.mesh.flatten().tolist()
        shown = ", ".join(map(str, ranks[:8])) + (f", .. ({len(ranks)} of them)" if len(ranks) > 8 else "")
        raise ValueError(
            f"fully_shard: rank {dist.get_rank()} is not in the mesh, whose ranks are {shown}. Call fully_shard on "
            "ranks of the mesh only."
        )


def _make(mesh: DeviceMesh, shard_axis: int | None, replicate_axis: int | None, **spmd: Any) -> ShardGroup:
    group = mesh.get_group(shard_axis) if shard_axis is not None else None
    replicate_group = mesh.get_group(replicate_axis) if replicate_axis is not None else None
    return ShardGroup(
        mesh=mesh,
        group=group,
        rank=group.rank() if group is not None else 0,
        world=group.size() if group is not None else 1,
        replicate_group=replicate_group,
        replicas=replicate_group.size() if replicate_group is not None else 1,
        device=_device(mesh),
        **spmd,
    )


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _from_named_axes(mesh: DeviceMesh, dp_mesh_dims: Any) -> ShardGroup:
    shard, replicate = dp_mesh_dims.shard_names, dp_mesh_dims.replicate_names
    if not shard and not replicate:
        raise ValueError("At least one of shard or replicate must be set in dp_mesh_dims")
    if mesh.mesh_dim_names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided. Pass them to init_device_mesh.")
    for name in (*shard, *replicate):
        if name not in mesh.mesh_dim_names:
            raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}")
    for given in (shard, replicate):
        if sorted(given, key=mesh.mesh_dim_names.index) != list(given):
            raise ValueError(f"fully_shard: dp_mesh_dims must name axes in the order of the mesh, got {given}.")
    if len(given := (*shard, *replicate)) > len(set(given)):
        raise ValueError(f"fully_shard: dp_mesh_dims names an axis twice: {given}. Each axis shards or replicates.")
    spmd = {"spmd_mesh": mesh, "dp_mesh_dims": dp_mesh_dims}
    if not shard:
        return _make(_one_axis(mesh, replicate), shard_axis=None, replicate_axis=0, **spmd)
    if not replicate:
        return _make(_one_axis(mesh, shard), shard_axis=0, replicate_axis=None, **spmd)
    both = torch_private.concatenate_meshes([_one_axis(mesh, replicate), _one_axis(mesh, shard)])
    return _make(both, shard_axis=1, replicate_axis=0, **spmd)


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else torch_private.flatten_mesh(mesh[names], "_".join(names))


@dataclass(frozen=True)
class Keep:
    """What ranks keep of a unit's parameters from forward to backward. ``Keep()`` is ``reshard_after_forward=True``."""

    ranks: int | None = None  # over which they stay sharded; None: all, 1: each rank keeps them in full
    fully_in_root: bool = False  # each rank keeps them in full if the unit is the root
    until_backward: bool = False  # a forward without grad, which has no backward, frees them

    @staticmethod
    def of(reshard_after_forward: bool | int | None) -> Keep:
        """Decodes the argument of ``fully_shard``."""
        if reshard_after_forward is None or reshard_after_forward is True:
            return Keep(fully_in_root=reshard_after_forward is None)
        if not isinstance(reshard_after_forward, int):
            raise ValueError(
                "reshard_after_forward should be a bool or an int representing the group size to reshard to, not "
                f"{reshard_after_forward!r}"
            )
        return Keep(1 if reshard_after_forward is False else reshard_after_forward)

    def in_unit(self, reshard_after_forward: bool | None) -> Keep:
        """Returns what a unit keeps whose plan has its own ``reshard_after_forward``. None: it has none."""
        if reshard_after_forward is None:
            return self
        return Keep() if reshard_after_forward else Keep(1, until_backward=self != Keep(1))

    def smaller_world(self, world: int) -> int | None:
        """Returns over how many ranks of ``world`` parameters stay sharded. None: over all, or they are kept in full.

        Raises:
            ValueError: the number does not divide ``world``.
        """
        if self.ranks is None:
            return None
        if not 1 <= self.ranks <= world or world % self.ranks:
            raise ValueError(
                f"If passing reshard_after_forward as an int, it should be a factor of {world}, not {self.ranks}"
            )
        return None if self.ranks in (1, world) else self.ranks
