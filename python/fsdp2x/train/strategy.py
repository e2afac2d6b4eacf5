"""Strategies by name and `fsdp_size` -> the mesh and the resharding that `fully_shard` is called with.

    name                 mesh over N ranks, axes      freed after forward     what it is
    FULL_SHARD           (N,)        [fsdp]           all but the last unit   ZeRO-3
    SHARD_GRAD_OP        (N,)        [fsdp]           no                      ZeRO-2: gathered from forward to backward
    NO_SHARD             (N, 1)      [ddp, fsdp]      no                      every rank has everything, as DDP
    HYBRID_SHARD         (N/S, S)    [ddp, fsdp]      all but the last unit   shards inside a node, copies across nodes
    HYBRID_SHARD_ZERO2   (N/S, S)    [ddp, fsdp]      no

S is `fsdp_size`, by default the ranks of one node. Without a name, `fsdp_size` decides: at most 1, or at least N: one
axis over all ranks; anything between: HSDP. `reshard_after_forward` may then be set by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config import ConfigError, ParallelConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
RESHARD: dict[str, bool | None] = {
    "FULL_SHARD": None,
    "SHARD_GRAD_OP": False,
    "NO_SHARD": False,
    "HYBRID_SHARD": None,
    "HYBRID_SHARD_ZERO2": False,
}


@dataclass(frozen=True)
class MeshPlan:
    """A mesh before its process groups exist; `str()` is the line that a run prints when it starts."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    reshard_after_forward: bool | int | None
    sequence_parallel: int = 1

    @property
    def num_replicas(self) -> int:
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def shard_size(self) -> int:
        return self.shape[-1]

    def make(self, device_type: str) -> DeviceMesh:
        """The process groups; collective."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device_type, self.shape, mesh_dim_names=self.axes)

    def __str__(self) -> str:
        freed = {
            None: "all units but the last freed after forward",
            True: "freed after forward",
            False: "gathered from forward to backward",
        }
        reshard = self.reshard_after_forward
        kept = freed[reshard] if reshard in freed else f"kept over {reshard} ranks after forward"
        kept = "nothing to gather" if self.shard_size == 1 else kept
        sp = f"; sequences over {self.sequence_parallel} ranks" if self.sequence_parallel > 1 else ""
        copies = f"{self.num_replicas} copies of " if self.num_replicas > 1 else ""
        shards = "the whole" if self.shard_size == 1 else f"{self.shard_size} shards"
        return f"{self.name}: mesh {self.shape} [{', '.join(self.axes)}], {copies}{shards}, {kept}{sp}"


def plan_mesh(config: ParallelConfig, world_size: int, local_world_size: int) -> MeshPlan:
    """The mesh of a run of `world_size` ranks, `local_world_size` of which are on this node.

    Raises:
        ConfigError: sizes that do not divide each other, and settings that contradict the strategy's name.
    """
    plan_expert_mesh(config, world_size)
    name, size, reshard = config.strategy, config.fsdp_size, config.reshard_after_forward
    sp = config.sequence_parallel
    if world_size % sp:
        raise ConfigError(f"parallel.sequence_parallel: got {sp}, expected a divisor of the {world_size} ranks")
    if name is not None and reshard is not None and reshard != RESHARD[name]:
        raise ConfigError(
            f"parallel.reshard_after_forward: got {reshard!r} with parallel.strategy={name}, which means "
            f"{_yaml(RESHARD[name])}; leave one of the two out"
        )
    if name is None:
        split = size is not None and 1 < size < world_size
        name = "FSDP" if not split else "HSDP"
    else:
        reshard = RESHARD[name]
        split = name in HYBRID
        _check_size(name, size, world_size)
        if name == "NO_SHARD":
            return MeshPlan(name, (world_size, 1), ("ddp", "fsdp"), reshard, sp)
    if not split:
        return MeshPlan(name, (world_size,), ("fsdp",), reshard, sp)
    if size is None:
        size = local_world_size
    if size > world_size or world_size % size:
        where = "parallel.fsdp_size" if config.fsdp_size is not None else "ranks of this node"
        raise ConfigError(f"{where}: got {size}, expected a divisor of the {world_size} ranks")
    return MeshPlan(name, (world_size // size, size), ("ddp", "fsdp"), reshard, sp)


def plan_expert_mesh(config: ParallelConfig, world_size: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Shape and axes of the experts' mesh: (efsdp, ep), with copies (replicate, efsdp, ep) when efsdp is smaller.

    Raises:
        ConfigError: sizes that do not divide the ranks.
    """
    ep = config.expert_parallel
    if world_size % ep:
        raise ConfigError(f"parallel.expert_parallel: got {ep}, expected a divisor of the {world_size} ranks")
    rest = world_size // ep
    efsdp = config.expert_fsdp_size or rest
    if rest % efsdp:
        raise ConfigError(
            f"parallel.expert_fsdp_size: got {efsdp}, expected a divisor of the {rest} ranks that expert_parallel={ep} "
            f"leaves of {world_size}"
        )
    if efsdp == rest:
        return (rest, ep), ("efsdp", "ep")
    return (rest // efsdp, efsdp, ep), ("replicate", "efsdp", "ep")


def usual_node(world_size: int) -> int:
    """Ranks of a node when nobody says it: 8 where there are more and 8 divides them."""
    return 8 if world_size % 8 == 0 and world_size else world_size


def _check_size(name: str, size: int | None, world_size: int) -> None:
    if size is None:
        return
    if name == "NO_SHARD" and size > 1:
        raise ConfigError(f"parallel.fsdp_size: got {size} with NO_SHARD, which shards nothing; leave fsdp_size out")
    if name in ("FULL_SHARD", "SHARD_GRAD_OP") and 1 < size < world_size:
        hybrid = "HYBRID_SHARD" if name == "FULL_SHARD" else "HYBRID_SHARD_ZERO2"
        raise ConfigError(
            f"parallel.fsdp_size: got {size} with {name}, which shards over all {world_size} ranks; for groups of "
            f"{size} ranks use {hybrid}"
        )
    if name in HYBRID and size <= 1:
        raise ConfigError(
            f"parallel.fsdp_size: got {size} with {name}, expected the ranks of one shard group; leave it out for the "
            "ranks of one node, or use NO_SHARD for copies only"
        )


def _yaml(value: bool | None) -> str:
    return {None: "null (all units but the last)", True: "true", False: "false"}[value]
