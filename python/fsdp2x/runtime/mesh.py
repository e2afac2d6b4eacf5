"""Which ranks share a unit's parameters: validation of the device mesh and the 1-D shard group taken from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2x.runtime import torch_private


@dataclass(frozen=True)
class ShardGroup:
    """The ranks among which a unit is sharded: one axis of a mesh."""

    mesh: DeviceMesh
    group: dist.ProcessGroup
    rank: int
    world: int
    device: torch.device


def default_mesh() -> DeviceMesh:
    """A 1-D mesh over all ranks on the machine's accelerator, else the CPU; starts torch.distributed if needed."""
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(torch_private.accelerator_type(), (dist.get_world_size(),))


def shard_group(mesh: DeviceMesh) -> ShardGroup:
    """Checks ``mesh`` and returns its shard axis.

    Raises:
        ValueError: the mesh has neither one nor two axes.
        NotImplementedError: the mesh has two axes (HSDP).
    """
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2:
        if mesh.mesh_dim_names is None:
            raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
        raise NotImplementedError(
            f"fsdp2x.fully_shard: 2-D meshes (HSDP) are not supported yet, got {mesh}; pass a 1-D mesh such as "
            f"mesh[{mesh.mesh_dim_names[-1]!r}]"
        )
    if mesh.device_type == "cpu":
        device = torch.device("cpu")
    else:
        device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
    group = mesh.get_group()
    return ShardGroup(mesh, group, group.rank(), group.size(), device)
