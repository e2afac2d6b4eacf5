"""Upstream's private names for a unit's state, as far as frameworks are known to use them.

They describe our objects in upstream's words. What can be written acts as upstream's does; all others are refused by
name (``refused_names.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Shard

from fsdp2x.runtime import torch_private
from fsdp2x.runtime.mesh import ShardGroup, post_forward_group
from fsdp2x.runtime.refused_names import CONTEXT, GROUP, PARAM, STATE, read_only, refuse

_TRAINING_STATES = {"IDLE": "IDLE", "FORWARD": "FORWARD", "BACKWARD": "PRE_BACKWARD", "REDUCED": "POST_BACKWARD"}


@refuse(CONTEXT)
class _StateContext:
    """What the units of a root share."""

    def __init__(self, state: StateNames) -> None:
        self._unit_state = state

    @read_only()
    def all_states(self) -> list:
        root_state = self._unit_state.root_state()
        return list(root_state.tree) if root_state is not None else []

    @property
    def is_last_backward(self) -> bool:
        return (self._unit_state.root_state() or self._unit_state).is_last_backward

    @is_last_backward.setter
    def is_last_backward(self, value: bool) -> None:
        self._unit_state.set_is_last_backward(value)


@refuse(STATE)
class StateNames:
    """Mixed into ``UnitState``."""

    def _lazy_init(self) -> None:
        self.lazy_init()

    def _root_post_backward_final_callback(self) -> None:
        """Pipeline stages of frameworks call it by hand after ``group.post_backward()`` of all units."""
        self.finish_held_backwards()

    @read_only("the first module to run forward is the root")
    def _is_root(self) -> bool | None:
        return self.is_root

    @read_only()
    def _fsdp_param_groups(self) -> list:
        return self.groups

    @read_only()
    def _fsdp_param_group(self):
        groups = [group for group in self.groups if not group.is_replicated]
        if len(groups) > 1:
            raise AssertionError(f"unit '{self.name}' has {len(groups)} parameter groups, not one")
        return groups[0] if groups else None

    @property
    def _training_state(self):
        return torch_private.TrainingState[_TRAINING_STATES[self.unit.phase if self.unit is not None else "IDLE"]]

    @_training_state.setter
    def _training_state(self, value) -> None:
        if value != self._training_state:
            raise AttributeError(
                f"fsdp2x: unit '{self.name}' is in {self._training_state} and cannot be told to be in {value}; call "
                "reset_iter_state() on the root module to drop what it is doing"
            )

    @property
    def _auto_reshard_after_forward(self) -> bool:
        return self.auto_reshard

    @_auto_reshard_after_forward.setter
    def _auto_reshard_after_forward(self, value: bool) -> None:
        self.auto_reshard = bool(value)

    @read_only("pass mp_policy to fully_shard()")
    def _mp_policy(self):
        return self.mp_policy

    @read_only()
    def _modules(self):
        return self.modules

    @read_only()
    def _device(self) -> torch.device:
        return self.ranks.device

    @read_only("call fsdp2x.share_comm_ctx()")
    def _comm_ctx(self):
        # Roots that share one are told apart from those that do not: ours never share.
        return self.root

    @read_only()
    def _state_ctx(self) -> _StateContext:
        return _StateContext(self)


@refuse(GROUP)
class GroupNames:
    """Mixed into ``GroupParams``."""

    @read_only()
    def fsdp_params(self) -> list:
        return self.params

    @read_only("pass mesh to fully_shard()")
    def mesh_info(self):
        return mesh_info_of(self.ranks)

    @property
    def post_forward_mesh_info(self):
        state = self.unit_state()
        if state.post_forward_world is not None:
            return mesh_info_of(post_forward_group(self.ranks, state.post_forward_world))
        return self.mesh_info if state.live_options().reshard_after_forward else None

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, info: Any) -> None:
        if info is not None and not hasattr(info, "shard_mesh_size"):
            raise TypeError(f"fsdp2x: post_forward_mesh_info is None or FSDPMeshInfo, not {type(info).__name__}")
        state, world = self.unit_state(), None if info is None else info.shard_mesh_size
        if len(state.groups) > 1:
            way_out = "call set_reshard_after_forward() on its module"
            raise AttributeError(
                f"fsdp2x: unit '{state.name}' has {len(state.groups)} parameter groups, which reshard together; its "
                f"post_forward_mesh_info cannot be set for one of them: {way_out}"
            )
        if world not in (None, self.ranks.world):
            raise AttributeError(
                f"fsdp2x: unit '{state.name}' cannot be told by post_forward_mesh_info to keep parameters on {world} "
                f"of {self.ranks.world} ranks: pass reshard_after_forward={world} to fully_shard()"
            )
        state.set_reshard_after_forward(world is not None)

    @property
    def _training_state(self):
        return self.unit_state()._training_state

    @_training_state.setter
    def _training_state(self, value) -> None:
        self.unit_state()._training_state = value

    @read_only("call module.set_reshard_after_forward()")
    def _reshard_after_forward(self) -> bool:
        return self.post_forward_mesh_info is not None

    @read_only("call module.set_reshard_after_backward()")
    def reshard_after_backward(self) -> bool:
        return self.unit_state().live_options().reshard_after_backward

    @read_only()
    def modules(self) -> tuple:
        return self.unit_state().modules

    @read_only("pass mesh to fully_shard()")
    def device(self) -> torch.device:
        return self.ranks.device

    @read_only("pass mesh to fully_shard()")
    def _is_hsdp(self) -> bool:
        return self.ranks.group is not None and self.ranks.has_replicate_axis

    @read_only("call module.reshard()")
    def is_sharded(self) -> bool:
        return not self.is_unsharded

    @read_only("call module.unshard()")
    def is_unsharded(self) -> bool:
        module, name = self.params[0].owners[0]
        return module._parameters[name] is not self.params[0].param

    @read_only()
    def _module_fqn(self) -> str:
        return self.module_fqn

    def post_backward(self) -> None:
        """Pipeline stages of frameworks call it by hand on the group of every unit, after their last micro-batch.

        Upstream reduces what backwards without gradient sync have left in this group; here the first of these calls
        does so for all units of the root, and the others find nothing to do.
        """
        self.unit_state().finish_held_backwards()


@refuse(PARAM)
class ParamNames:
    """Mixed into ``ShardedParam``."""

    @read_only("assign with module.load_state_dict(state, assign=True), or write in place")
    def sharded_param(self):
        return self.param

    @read_only("write in place")
    def _sharded_local_tensor(self) -> torch.Tensor:
        return torch_private.local_tensor(self.param)

    @read_only()
    def _param_fqn(self) -> str:
        return self.fqn

    @read_only()
    def _sharding_spec(self):
        return self.spec.sharded

    @read_only()
    def _orig_size(self):
        return self.local_size

    @read_only()
    def sharded_size(self) -> torch.Size:
        return self.spec.local_shape

    @read_only("convert the model before fully_shard()")
    def orig_dtype(self) -> torch.dtype:
        return self.param.dtype

    @read_only("pass mesh to fully_shard()")
    def device(self) -> torch.device:
        return self.param.device

    @read_only("pass shard_placement_fn to fully_shard()")
    def fsdp_placement(self) -> Shard:
        return Shard(self.spec.shard_dim)

    @read_only()
    def is_dtensor(self) -> bool:
        return self.spec.unsharded is not None


def mesh_info_of(ranks: ShardGroup):
    """The same as upstream's dataclass, an equal one at each call."""
    axes = {ranks.mesh.get_group(axis): axis for axis in range(ranks.mesh.ndim)}
    spmd = {"dp_mesh_dims": ranks.dp_mesh_dims, "spmd_mesh": ranks.spmd_mesh} if ranks.spmd_mesh is not None else {}
    return torch_private.mesh_info(ranks.mesh, axes.get(ranks.group), axes.get(ranks.replicate_group), **spmd)
