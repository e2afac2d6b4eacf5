"""A group of parameters that every rank of a unit has in full, and whose gradients are averaged over these ranks."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import nn

from fsdp2x.runtime import spec as specs
from fsdp2x.runtime import torch_private
from fsdp2x.runtime.collect import Owners
from fsdp2x.runtime.explain import explained
from fsdp2x.runtime.mesh import ShardGroup, covering_group
from fsdp2x.runtime.params import GroupParams, Placed
from fsdp2x.runtime.shapes import keeps_dtype
from fsdp2x.runtime.sharded_param import ShardedParam, user_attributes
from fsdp2x.runtime.stale import new_number


def replicated_ranks(ranks: ShardGroup) -> ShardGroup:
    """The ranks of a unit as replicas of one another. Collective at the first call for a mesh of several axes."""
    if ranks.group is None and not ranks.has_replicate_axis:
        return ranks
    group = ranks.group if ranks.mesh.ndim == 1 and ranks.group is not None else covering_group(ranks.mesh)
    return dataclasses.replace(
        ranks, group=None, rank=0, world=1, replicate_group=group, replicas=dist.get_world_size(group)
    )


class ReplicatedParams(GroupParams):
    """To the engine a group with one shard and as many replicas as there are ranks.

    The ``nn.Parameter`` objects stay plain tensors, and move into the group's pool. Modules register others, of the
    compute dtype, while the unit is gathered.
    """

    is_replicated = True
    is_shared = False  # every rank has the values of the first one

    def _shard(self, placed: Placed) -> None:
        param, owners = placed.owned.param, placed.owned.owners
        spec = specs.replicated_spec(param, self.ranks)
        keeps = keeps_dtype(param, self._mp_policy)
        self.params.append(ShardedParam(param, Owners(owners), spec, param.shape, user_attributes(param), keeps, False))

    def _take_places(self, placed: list[Placed]) -> None:
        for sharded in self.params:
            sharded.original = new_number()

    def _is_replacement(self, current: nn.Parameter, sharded: ShardedParam) -> bool:
        return type(current) is nn.Parameter and current is not sharded.param

    @torch.no_grad()
    def share(self) -> None:
        """Gives every rank the values of the first one. Collective, once."""
        if self.is_shared or self.pool is None:
            return
        group = self.ranks.replicate_group
        if group is not None and self.ranks.replicas > 1:
            values = self.pool.to(self.ranks.device)
            with torch_private.unobserved(), explained(group, "broadcast of parameters added after fully_shard"):
                dist.broadcast(values, src=dist.get_global_rank(group, 0), group=group)
            if values is not self.pool:
                self.pool.copy_(values)
        self.is_shared = True
