"""FSDP2's private names for a unit's state, as far as frameworks are known to use them.

They show fsdp2x's objects under FSDP2's names. Writing a writable name has the same effect as in FSDP2. Reading or
writing any other private name of FSDP2 raises an error that says what to use. Otherwise a write would silently create
an attribute that changes nothing.
"""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from torch.distributed.fsdp import FSDPModule

from fsdp2x.base import torch_private
from fsdp2x.sharding.mesh import ShardGroup, post_forward_group


class PrivateNames:
    """Raises for names that a class lacks, and when other code writes names that it does not know.

    A subclass calls ``seal`` when an object has its attributes.
    """

    # Name -> what to do instead, unless a method of FSDPModule has that name.
    instead: ClassVar[dict[str, str]] = {}

    def seal(self) -> None:
        """From now on, no attribute can be added that the class does not declare."""
        self.__dict__["_is_sealed"] = True

    if not TYPE_CHECKING:  # checkers would take any name

        def __getattr__(self, name: str) -> Any:
            raise self._error(f"{type(self).__name__} has no FSDP2's {name!r}", name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__ and "_is_sealed" in self.__dict__:
            declared = inspect.getattr_static(type(self), name, None)
            if isinstance(declared, property) and declared.fset is None:
                raise self._error(f"{type(self).__name__}.{name} is read-only, unlike FSDP2's", name)
            if declared is None and not any(name in inspect.get_annotations(kind) for kind in type(self).__mro__):
                raise self._error(f"{type(self).__name__} cannot set FSDP2's {name!r}", name)
        super().__setattr__(name, value)

    def _error(self, what: str, name: str) -> AttributeError:
        plain = name.removeprefix("_")
        methods = [method for method in (plain, f"set_{plain}", f"{plain}_for_comm") if hasattr(FSDPModule, method)]
        if name in self.instead:
            instead = self.instead[name]
        elif methods:
            instead = f"call module.{methods[0]}()"
        else:
            instead = "it belongs to FSDP2's engine. Use the public methods of FSDPModule"
        return AttributeError(f"fsdp2x: {what}: {instead}.")


_TRAINING_STATES = {"IDLE": "IDLE", "FORWARD": "FORWARD", "BACKWARD": "PRE_BACKWARD", "REDUCED": "POST_BACKWARD"}


class _StateContext(PrivateNames):
    """State that the units of a root share."""

    instead = {
        "gradient_reduction_pending": "wait for the handle of module.finalize_backward()",
    }

    def __init__(self, state: StateNames) -> None:
        self._unit_state = state
        self.seal()

    @property
    def all_states(self) -> list:
        return list(self._unit_state.shared.tree)

    @property
    def is_last_backward(self) -> bool:
        return self._unit_state.shared.settings.is_last_backward

    @is_last_backward.setter
    def is_last_backward(self, value: bool) -> None:
        self._unit_state.shared.settings.is_last_backward = value


class StateNames(PrivateNames):
    """Mixed into ``ShardedUnit``, which has these attributes."""

    instead = {
        "_comm_ctx": "call fsdp2x.share_comm_ctx()",
        "_is_root": "the first module to run forward is the root",
        "_mp_policy": "pass mp_policy to fully_shard()",
        "_states_to_backward_prefetch": "call module.set_modules_to_backward_prefetch()",
        "_states_to_forward_prefetch": "call module.set_modules_to_forward_prefetch()",
        "wait_for_gradient_reduction": "wait for the handle of module.finalize_backward()",
    }

    shared: Any
    finish_held_backwards: Any
    groups: Any
    name: Any
    unit: Any
    auto_reshard: Any

    _is_root = property(attrgetter("is_root"))
    _fsdp_param_groups = property(attrgetter("groups"))
    _mp_policy = property(attrgetter("settings.mp_policy"))
    # Callers compare contexts to see whether roots share one. fsdp2x's roots never do.
    _comm_ctx = property(attrgetter("root"))
    _state_ctx = property(_StateContext)

    def _root_post_backward_final_callback(self) -> None:
        """Reduces pending gradients. Pipeline frameworks call it after ``group.post_backward()`` of all units."""
        self.finish_held_backwards()

    @property
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
                f"fsdp2x: unit '{self.name}' is in {self._training_state} and cannot be set to {value}. Call "
                "reset_iter_state() on the root module to drop what it is doing."
            )

    @property
    def _auto_reshard_after_forward(self) -> bool:
        return self.auto_reshard

    @_auto_reshard_after_forward.setter
    def _auto_reshard_after_forward(self, value: bool) -> None:
        self.auto_reshard = bool(value)


class GroupNames(PrivateNames):
    """Mixed into ``ShardedParamGroup``, which has these attributes."""

    instead = {
        **dict.fromkeys(("mesh_info", "device", "_is_hsdp"), "pass mesh to fully_shard()"),
        **dict.fromkeys(("wait_for_unshard", "_to_unsharded", "is_unsharded"), "call module.unshard()"),
        **dict.fromkeys(("_to_sharded", "is_sharded"), "call module.reshard()"),
        "reduce_grads": "call module.set_requires_gradient_sync()",
        "all_reduce_grads": "call module.set_requires_all_reduce()",
        "unshard_async_op": "call module.unshard(async_op=True)",
        "_reduce_dtype": "pass mp_policy to fully_shard()",
        "offload_policy": "pass offload_policy to fully_shard()",
        "_all_reduce_hook_stream": "call module.set_all_reduce_hook(hook, stream=stream)",
        "_all_gather_comm": "call module.set_custom_all_gather()",
        "_reduce_scatter_comm": "call module.set_custom_reduce_scatter()",
    }

    ranks: Any
    unit_state: Any

    fsdp_params = property(attrgetter("params"))

    @property
    def mesh_info(self):
        return mesh_info_of(self.ranks)

    @property
    def post_forward_mesh_info(self):
        state = self.unit_state()
        if state.post_forward_world is not None:
            return mesh_info_of(post_forward_group(self.ranks, state.post_forward_world))
        return self.mesh_info if state.options.reshard_after_forward else None

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, info: Any) -> None:
        if info is not None and not hasattr(info, "shard_mesh_size"):
            raise TypeError(f"fsdp2x: post_forward_mesh_info must be None or FSDPMeshInfo, got {type(info).__name__}.")
        state, world = self.unit_state(), None if info is None else info.shard_mesh_size
        if len(state.groups) > 1:
            way_out = "call set_reshard_after_forward() on its module"
            raise AttributeError(
                f"fsdp2x: unit '{state.name}' has {len(state.groups)} parameter groups, which reshard together. Its "
                f"post_forward_mesh_info cannot be set for one of them: {way_out}."
            )
        if world not in (None, self.ranks.world):
            raise AttributeError(
                f"fsdp2x: unit '{state.name}': post_forward_mesh_info must cover all {self.ranks.world} ranks, got "
                f"{world}. Pass reshard_after_forward={world} to fully_shard() instead."
            )
        state.set_reshard_after_forward(world is not None)

    @property
    def _training_state(self):
        return self.unit_state()._training_state

    @_training_state.setter
    def _training_state(self, value) -> None:
        self.unit_state()._training_state = value

    @property
    def reshard_after_backward(self) -> bool:
        return self.unit_state().options.reshard_after_backward

    def post_backward(self) -> None:
        """Reduces pending gradients. Pipeline frameworks call it on every unit's group after their last micro-batch.

        FSDP2 reduces what backwards without gradient sync have left in this group. In fsdp2x the first of these calls
        does so for all units of the root, and later calls find nothing to do.
        """
        self.unit_state().finish_held_backwards()


class ParamNames(PrivateNames):
    """Mixed into ``ShardedParam``, which has these attributes."""

    instead = {
        "sharded_param": "assign with module.load_state_dict(state, assign=True), or write in place",
        "_sharded_local_tensor": "write in place",
        "_sharded_param_data": "read sharded_param.to_local()",
        "_module_info": "look for the parameter in module.named_parameters()",
        **dict.fromkeys(
            ("_unsharded_param", "unsharded_param"), "read the module's own attribute after module.unshard()"
        ),
        "to_unsharded": "call module.unshard()",
        "to_sharded": "call module.reshard()",
        "reset_sharded_param": "no call is needed. The next forward takes over replaced parameters",
        "orig_dtype": "convert the model before fully_shard()",
        "mp_policy": "pass mp_policy to fully_shard()",
        "offload_to_cpu": "pass offload_policy to fully_shard()",
        "device": "pass mesh to fully_shard()",
        "fsdp_placement": "pass shard_placement_fn to fully_shard()",
        **dict.fromkeys(("mesh_info", "post_forward_mesh_info"), "it belongs to the parameter group"),
    }

    sharded_param = property(attrgetter("param"))
    _orig_size = property(attrgetter("local_size"))


def mesh_info_of(ranks: ShardGroup):
    """Returns a new, equal instance of FSDP2's dataclass at each call."""
    axes: dict[Any, int] = {ranks.mesh.get_group(axis): axis for axis in range(ranks.mesh.ndim)}
    spmd = {"dp_mesh_dims": ranks.dp_mesh_dims, "spmd_mesh": ranks.spmd_mesh} if ranks.spmd_mesh is not None else {}
    return torch_private.mesh_info(ranks.mesh, axes.get(ranks.group), axes.get(ranks.replicate_group), **spmd)
