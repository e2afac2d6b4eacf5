"""FSDP2's private names for a unit's state, as far as frameworks are known to use them.

They show fsdp2x's objects under FSDP2's names. Writing a writable name has the same effect as in FSDP2. Reading or
writing any other private name of FSDP2 raises an error that says what to use. Otherwise a write would silently create
an attribute that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Shard

from fsdp2x.base import torch_private
from fsdp2x.sharding.mesh import ShardGroup, post_forward_group

_ENGINE = "it belongs to FSDP2's engine. Use the public methods of FSDPModule"


class Refused:
    """Descriptor of a name that can neither be read nor written."""

    def __init__(self, way_out: str) -> None:
        self._way_out = way_out

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise self._error(instance, "has no")

    def __set__(self, instance: Any, value: Any) -> None:
        raise self._error(instance, "cannot set")

    def _error(self, instance: Any, what: str) -> AttributeError:
        return AttributeError(f"fsdp2x: {type(instance).__name__} {what} FSDP2's {self._name!r}: {self._way_out}.")


class _ReadOnly(property):
    way_out = _ENGINE

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, instance: Any, value: Any) -> None:
        kind = type(instance).__name__
        raise AttributeError(f"fsdp2x: {kind}.{self._name} is read-only, unlike FSDP2's: {self.way_out}.")


def read_only(way_out: str = _ENGINE) -> Callable[[Callable], property]:
    """Makes a property whose setter raises and names ``way_out``."""

    def decorate(getter: Callable) -> property:
        made = _ReadOnly(getter)
        made.way_out = way_out
        return made

    return decorate


def refuse(names: dict[str, str]) -> Callable[[type], type]:
    """Class decorator that adds a raising descriptor for each of ``names`` (name -> way out) the class lacks."""

    def decorate(cls: type) -> type:
        for name, way_out in names.items():
            if name not in vars(cls):
                made = Refused(way_out)
                made.__set_name__(cls, name)
                setattr(cls, name, made)
        return cls

    return decorate


def _engines(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), _ENGINE)


STATE = {
    **_engines(
        "_cast_forward_inputs _cast_output_dtype _device_handle _end_backward_iteration "
        "_force_complete_incomplete_states _get_state_for_module _init_fqns _init_shared_state _modules_to_run_forward "
        "_post_forward _post_forward_hook_handle _pre_backward _pre_forward _pre_forward_hook_handle "
        "_register_pre_backward_hook _register_root_post_backward_final_callback _root_pre_forward _state_name "
        "_validate_finalize_backward _validate_no_duplicate_params init"
    ),
    "_states_to_backward_prefetch": "call module.set_modules_to_backward_prefetch()",
    "_states_to_forward_prefetch": "call module.set_modules_to_forward_prefetch()",
    "_reset_iter_state": "call module.reset_iter_state()",
    "finalize_backward": "call module.finalize_backward()",
    "wait_for_gradient_reduction": "wait for the handle of module.finalize_backward()",
}
CONTEXT = {
    **_engines("iter_forward_root manual_backward_finalization_active post_backward_final_callback_queued"),
    "gradient_reduction_pending": "wait for the handle of module.finalize_backward()",
    "manual_backward_finalization": "call module.set_manual_backward_finalization()",
    "post_optim_event": "call module.set_post_optim_event()",
}
GROUP = {
    **_engines(
        "_all_gather_output _all_gather_output_fn _all_gather_result _all_reduce_state "
        "_fsdp_params_with_wider_grad_dtype _module_to_pre_load_state_dict_hook_handle "
        "_module_to_pre_save_state_dict_hook_handle _num_param_groups _param_group_index _partial_reduce_output "
        "_partial_reduce_output_layout _post_backward_pending _post_forward_indices _post_reduce_event "
        "_prepare_reduce_scatter_inputs _reduce_scatter_param_indices _reset_sharded_params "
        "_reshard_after_forward_event _sharded_state device_handle _all_gather_process_group _all_reduce_process_group "
        "_reduce_scatter_process_group _use_post_forward_mesh is_sharded_post_forward _backward_prefetch "
        "_get_partial_reduce_grad _get_reduce_dtype _get_unsharded_grad_to_reduce _init_mp_dtypes "
        "_init_reduce_scatter_param_order _prefetch_unshard _prepare_partial_reduce_output _record_post_forward "
        "_register_post_backward_hook _register_state_dict_hooks _set_unsharded_grad_dtypes "
        "_take_unsharded_grads_to_reduce _to_sharded_post_forward _validate_cpu_offload_params "
        "_validate_no_meta_params _validate_reduce_scatter_max_input_buffers _validate_unused_param_grad_dtypes "
        "_wait_for_post_backward _with_fqn lazy_init post_forward pre_backward pre_forward "
        "use_training_state comm_ctx"
    ),
    **dict.fromkeys(("unshard", "wait_for_unshard", "_to_unsharded"), "call module.unshard()"),
    **dict.fromkeys(("reshard", "_to_sharded"), "call module.reshard()"),
    **dict.fromkeys(("_reset_iter_state",), "call module.reset_iter_state()"),
    "reduce_grads": "call module.set_requires_gradient_sync()",
    "all_reduce_grads": "call module.set_requires_all_reduce()",
    "gradient_divide_factor": "call module.set_gradient_divide_factor()",
    "reduce_scatter_unused_params": "call module.set_reduce_scatter_unused_params()",
    "reduce_scatter_max_input_buffers": "call module.set_reduce_scatter_max_input_buffers()",
    "force_sum_reduction_for_comms": "call module.set_force_sum_reduction_for_comms()",
    "unshard_async_op": "call module.unshard(async_op=True)",
    "unshard_in_backward": "call module.set_unshard_in_backward()",
    "_reduce_dtype": "pass mp_policy to fully_shard()",
    "offload_policy": "pass offload_policy to fully_shard()",
    "_all_reduce_hook": "call module.set_all_reduce_hook()",
    "_all_reduce_hook_stream": "call module.set_all_reduce_hook(hook, stream=stream)",
    "_all_gather_comm": "call module.set_custom_all_gather()",
    "_reduce_scatter_comm": "call module.set_custom_reduce_scatter()",
    "_set_separate_reduce_scatter_group": "call module.set_separate_reduce_scatter_group()",
    "set_allocate_memory_from_process_group": "call module.set_allocate_memory_from_process_group_for_comm()",
    "set_symm_mem": "call module.set_symm_mem_for_comm()",
    "finalize_backward": "call module.finalize_backward()",
}
PARAM = {
    **_engines(
        "_contiguous_orig_stride _has_sharded_grad_dtype_override _orig_param_uid _post_load_hook_handle "
        "_release_all_gather_outputs_after_post_all_gather _shard_mesh _sharding_spec_by_dtype _spmd_mesh "
        "_spmd_placements _unsharded_dtensor_spec _unsharded_inner_tensors all_gather_outputs all_gather_inputs "
        "contiguous_sharded_post_forward_stride contiguous_sharded_stride grad_offload_event is_spmd_types "
        "keep_unsharded_storage padded_sharded_param_size param_dtype reduce_dtype sharded_grad_dtype "
        "sharded_post_forward_size sharded_state may_reduce_grad_outside_dp unsharded_accumulated_grad "
        "unsharded_grad_data unsharded_grad_dtype unsharded_zero_grad_data _assert_in_states _build_spmd_sharding_spec "
        "_capture_grad_dtype_policy _get_grad_inner_tensor _init_extensions _init_shard_mesh _init_sharded_param "
        "_init_sharded_post_forward_param_metadata _init_sharding_spec _init_sharding_spec_plain "
        "_init_sharding_spec_spmd _init_sharding_spec_tp _release_all_gather_outputs_if_needed "
        "_resolve_spmd_types_for_storage _restore_spmd_types _setattr_on_modules _unflatten_all_gather_outputs "
        "alloc_all_gather_outputs free_all_gather_outputs free_unsharded_param init_all_gather_outputs "
        "init_dtype_attrs init_unsharded_param to_sharded_dtensor to_sharded_post_forward "
        "to_sharded_post_forward_dtensor shard_mesh shard_mesh_from_root pin_memory"
    ),
    "_module_info": "look for the parameter in module.named_parameters()",
    "_sharded_param_data": "read sharded_param.to_local()",
    **dict.fromkeys(("_unsharded_param", "unsharded_param"), "read the module's own attribute after module.unshard()"),
    "to_unsharded": "call module.unshard()",
    "to_sharded": "call module.reshard()",
    "reset_sharded_param": "no call is needed. The next forward takes over replaced parameters",
    "mp_policy": "pass mp_policy to fully_shard()",
    "offload_to_cpu": "pass offload_policy to fully_shard()",
    **dict.fromkeys(("mesh_info", "post_forward_mesh_info"), "it belongs to the parameter group"),
}

_TRAINING_STATES = {"IDLE": "IDLE", "FORWARD": "FORWARD", "BACKWARD": "PRE_BACKWARD", "REDUCED": "POST_BACKWARD"}


@refuse(CONTEXT)
class _StateContext:
    """State that the units of a root share."""

    def __init__(self, state: StateNames) -> None:
        self._unit_state = state

    @read_only()
    def all_states(self) -> list:
        return list(self._unit_state.shared.tree)

    @property
    def is_last_backward(self) -> bool:
        return self._unit_state.root_settings.is_last_backward

    @is_last_backward.setter
    def is_last_backward(self, value: bool) -> None:
        self._unit_state.root_settings.is_last_backward = value


@refuse(STATE)
class StateNames:
    """Mixed into ``ShardedUnit``, which has these attributes."""

    root_settings: Any
    shared: Any
    hooks: Any
    finish_held_backwards: Any
    is_root: Any
    groups: Any
    name: Any
    unit: Any
    auto_reshard: Any
    mp_policy: Any
    modules: Any
    ranks: Any
    root: Any

    def _lazy_init(self) -> None:
        self.hooks.lazy_init()

    def _root_post_backward_final_callback(self) -> None:
        """Reduces pending gradients. Pipeline frameworks call it after ``group.post_backward()`` of all units."""
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
                f"fsdp2x: unit '{self.name}' is in {self._training_state} and cannot be set to {value}. Call "
                "reset_iter_state() on the root module to drop what it is doing."
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
        # Callers compare contexts to see whether roots share one. fsdp2x's roots never do.
        return self.root

    @read_only()
    def _state_ctx(self) -> _StateContext:
        return _StateContext(self)


@refuse(GROUP)
class GroupNames:
    """Mixed into ``ShardedParamGroup``, which has these attributes."""

    params: Any
    ranks: Any
    unit_state: Any
    module_fqn: Any

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

    @read_only("call module.set_reshard_after_forward()")
    def _reshard_after_forward(self) -> bool:
        return self.post_forward_mesh_info is not None

    @read_only("call module.set_reshard_after_backward()")
    def reshard_after_backward(self) -> bool:
        return self.unit_state().options.reshard_after_backward

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
        """Reduces pending gradients. Pipeline frameworks call it on every unit's group after their last micro-batch.

        FSDP2 reduces what backwards without gradient sync have left in this group. In fsdp2x the first of these calls
        does so for all units of the root, and later calls find nothing to do.
        """
        self.unit_state().finish_held_backwards()


@refuse(PARAM)
class ParamNames:
    """Mixed into ``ShardedParam``, which has these attributes."""

    param: Any
    fqn: Any
    spec: Any
    local_size: Any

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
    """Returns a new, equal instance of FSDP2's dataclass at each call."""
    axes: dict[Any, int] = {ranks.mesh.get_group(axis): axis for axis in range(ranks.mesh.ndim)}
    spmd = {"dp_mesh_dims": ranks.dp_mesh_dims, "spmd_mesh": ranks.spmd_mesh} if ranks.spmd_mesh is not None else {}
    return torch_private.mesh_info(ranks.mesh, axes.get(ranks.group), axes.get(ranks.replicate_group), **spmd)
