"""Upstream's private names that we have not: reading or writing one is an error that names it and the way out.

Without them a write would make an attribute of that name on our object, and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ENGINE = "it belongs to upstream's engine; use the public methods of FSDPModule"


class Refused:
    """A data descriptor of a name that is neither read nor written."""

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
        return AttributeError(f"fsdp2x: {type(instance).__name__} {what} upstream's {self._name!r}: {self._way_out}")


class _ReadOnly(property):
    way_out = _ENGINE

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, instance: Any, value: Any) -> None:
        kind = type(instance).__name__
        raise AttributeError(f"fsdp2x: {kind}.{self._name} is read-only, unlike upstream's: {self.way_out}")


def read_only(way_out: str = _ENGINE) -> Callable[[Callable], property]:
    """A property of which a write says ``way_out``."""

    def decorate(getter: Callable) -> property:
        made = _ReadOnly(getter)
        made.way_out = way_out
        return made

    return decorate


def refuse(names: dict[str, str]) -> Callable[[type], type]:
    """Class decorator: refuses ``names`` (name -> way out), but those that the class has."""

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
    "reset_sharded_param": "nothing is to be called: parameters that were replaced are taken at the next forward",
    "mp_policy": "pass mp_policy to fully_shard()",
    "offload_to_cpu": "pass offload_policy to fully_shard()",
    **dict.fromkeys(("mesh_info", "post_forward_mesh_info"), "it is the parameter group's"),
}
