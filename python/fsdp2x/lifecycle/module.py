"""``FSDPModule``: the class that is mixed into a sharded module's class, and FSDP2's functions over such modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, cast

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.base.optimizer_hooks import refuse_swapped
from fsdp2x.lifecycle import pending_gradients
from fsdp2x.lifecycle.changes import moving
from fsdp2x.lifecycle.comms import own_collective, set_wire_formats, wire_formats_of
from fsdp2x.lifecycle.lazy_init import apply_comms, follow_modules, make_unit, remake_transports
from fsdp2x.lifecycle.tree import get_state, refuse_unregistered
from fsdp2x.lifecycle.unit import ShardedUnit
from fsdp2x.sharding.mesh import reduction_group
from fsdp2x.sharding.transport import has_streams

# Bound at import, because install() puts fsdp2x's classes under these names.
_TorchFSDPModule = torch_fsdp.FSDPModule
_TorchReductionHandle = getattr(torch_fsdp, "GradientReductionHandle", object)  # since 2.15


class UnshardHandle(torch_fsdp.UnshardHandle):
    """Handle of a gather that ``FSDPModule.unshard(async_op=True)`` started."""

    def __init__(self, state: ShardedUnit | None) -> None:
        self._state = state

    def wait(self) -> None:
        """Waits until the parameters are gathered and registers them on the modules.

        Has no effect after the unit's forward, which has waited.
        """
        if self._state is not None and self._state.unit is not None:
            self._state.unit.finish_unshard()
        self._state = None


class GradientReductionHandle(_TorchReductionHandle):
    """Handle of reductions that ``FSDPModule.finalize_backward(async_op=True)`` started."""

    def __init__(self, state: ShardedUnit | None) -> None:
        self._state = state
        if state is not None:
            self._generation = state.shared.generation
            state.shared.reduction_pending = True

    def wait(self) -> None:
        """Waits until all gradients are reduced and in ``.grad``.

        Raises:
            RuntimeError: ``reset_iter_state()`` was called in between.
        """
        if self._state is None:
            return
        if self._state.shared.generation != self._generation:
            raise RuntimeError("This gradient reduction handle was invalidated")
        assert self._state.root is not None, "finalize_backward needs a root"
        self._state.root.finalize_backward()
        self._state.shared.reduction_pending = False
        self._state = None


class FSDPModule(_TorchFSDPModule):
    """Adds the methods of FSDP2's ``FSDPModule`` to a module that ``fsdp2x.fully_shard`` sharded.

    Every public method of torch's ``FSDPModule`` either works as it does there or raises ``NotImplementedError``.
    """

    modules: Callable[..., Iterator[nn.Module]]  # like everything else, from the module that this is mixed into
    parameters: Callable[..., Iterator[nn.Parameter]]
    _orig_cls_mro_index = 3  # [FSDP<Orig>, this, torch's FSDPModule, Orig, ...]

    def __new__(cls, *args: Any, **kwargs: Any):
        # Indexing a ModuleList of sharded layers builds a new list, which must be of the original class.
        original = cls.__mro__[cls._orig_cls_mro_index]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    def _get_fsdp_state(self) -> ShardedUnit:
        state = get_state(cast("nn.Module", self))
        if state is None:
            raise AssertionError(f"No FSDP state found on {type(self).__name__}")
        return state

    def _states(self, recurse: bool) -> Iterator[ShardedUnit]:
        for module in self.modules() if recurse else (self,):
            if isinstance(module, FSDPModule):
                yield module._get_fsdp_state()

    def _set_option(self, name: str, value: Any, recurse: bool) -> None:
        for state in self._states(recurse):
            setattr(state.options, name, value)

    def reshard(self) -> None:
        """Frees this unit's full parameters and registers the sharded ones. Not recursive."""
        self._get_fsdp_state().reshard()

    @checked
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this unit's parameters now. Not recursive. Collective.

        Args:
            async_op: whether to return a handle at once. Its ``wait()`` registers the parameters. The unit's forward
                also waits.
        """
        state = self._get_fsdp_state()
        make_unit(state)
        if async_op:
            state.made_unit.begin_unshard()
            return UnshardHandle(state)
        state.made_unit.unshard()
        return None

    def reset_iter_state(self) -> None:
        """Drops the current iteration: every unit is sharded and idle, and all gradients are gone. Root only.

        Call it to begin a step again. Continuing after an exception does not need it: a failed forward leaves no trace,
        and a failed backward keeps only what it added to ``.grad``. Gradients of earlier backwards stay, unless one sum
        holds them together with gradients of the failed backward. Then the next forward under grad raises until you
        call this method. With several ranks, every rank must have failed in the same place.

        Raises:
            RuntimeError: not the root.
        """
        self._get_fsdp_state().reset()

    zero_grad = pending_gradients.zero_grad
    get_pending_gradients = pending_gradients.get_pending_gradients
    synchronize_gradients = pending_gradients.synchronize_gradients

    @checked
    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Sets whether the next backward is the last before the next forward. Until then the recorded order is kept."""
        self._get_fsdp_state().shared.settings.is_last_backward = is_last_backward

    @checked
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Sets whether backward reduces gradients, and all-reduces them on 2-D meshes. Acts from the next backward on.

        False keeps full, unreduced gradients in the reduce dtype until a backward with True. ``model.zero_grad()``
        clears them, ``optimizer.zero_grad()`` does not.
        """
        self._set_option("requires_gradient_sync", requires_gradient_sync, recurse)
        self._set_option("requires_all_reduce", requires_gradient_sync, recurse)

    @checked
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sets whether backward all-reduces over the replicas of a 2-D mesh. No effect on a 1-D mesh.

        False reduces over the shards only and keeps the sum, in the reduce dtype, for a later backward. ``.grad`` does
        not change until then.
        """
        self._set_option("requires_all_reduce", requires_all_reduce, recurse)

    @checked
    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Sets whether trainable parameters without a gradient are reduced as zeros, so ``.grad`` is zeros, not None.

        Ranks that use different parameters do not need it. It makes ``.grad`` exist on every rank.
        """
        self._set_option("reduce_unused_params", reduce_scatter_unused_params, recurse)

    @checked
    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], Any] | None, *, stream: Any = None) -> None:
        """Runs ``hook(rows)`` on this unit's reduced rows before ``.grad`` is set. Not recursive.

        On a 2-D mesh it runs after the all-reduce.

        Args:
            hook: function that changes ``rows``, a flat tensor in the reduce dtype with zero padding, in place. None:
                no hook.
            stream: device stream that is current while the hook runs, ordered after the reduction. None: the
                reduction's. No effect on the CPU.
        """
        state = self._get_fsdp_state()
        state.comms.all_reduce_hook = hook
        state.comms.all_reduce_hook_stream = stream if has_streams(state.ranks.device) else None
        apply_comms(state)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gathers this unit through ``comm`` over the process group. Not recursive.

        Args:
            comm: an object with torch's ``AllGather`` protocol. Its ``allocate`` returns contiguous memory of the size,
                dtype and device that it gets; otherwise the next gather raises ValueError. None: the transport's
                collective.

        Raises:
            TypeError: ``comm`` does not have the protocol's methods.
            ValueError: the model was sharded with ``transport="shm"``.
            RuntimeError: called during forward or backward.
        """
        state = self._get_fsdp_state()
        state.comms.all_gather = own_collective("set_custom_all_gather", comm)
        apply_comms(state)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduces through ``comm`` (torch's ``ReduceScatter`` protocol). See :meth:`set_custom_all_gather`."""
        state = self._get_fsdp_state()
        state.comms.reduce_scatter = own_collective("set_custom_reduce_scatter", comm)
        apply_comms(state)

    @checked
    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Makes :meth:`finalize_backward`, not backward, end reductions, for schedules of several backwards. Root only.

        Raises:
            RuntimeError: not the root, during backward, or while backwards wait for :meth:`finalize_backward`.
        """
        state = self._get_fsdp_state()
        if state.is_root is False:
            raise RuntimeError("set_manual_backward_finalization must be called on the root FSDP module")
        if state.root is not None and state.root.in_backward:
            raise RuntimeError("set_manual_backward_finalization cannot change mode during backward")
        if not enabled and state.awaits_finalization:
            raise RuntimeError(
                "set_manual_backward_finalization cannot change mode after backward starts. Call finalize_backward(), "
                "or reset_iter_state() to drop the gradients"
            )
        state.shared.settings.manual_finalization = enabled

    @checked
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Ends the reductions of all backwards since the last call. Root only, with manual finalization.

        Does nothing before the first forward.

        Args:
            async_op: whether to return a handle instead of waiting. Its ``wait()`` completes the reductions and sets
                ``.grad``.

        Raises:
            RuntimeError: not the root, no manual finalization, in backward, or before an earlier handle's ``wait()``.
        """
        state = self._get_fsdp_state()
        if state.root is None:
            return GradientReductionHandle(None) if async_op else None
        state.check_finalization()
        if async_op:
            return GradientReductionHandle(state)
        state.root.finalize_backward()
        return None

    @checked(own=("reshard_after_forward",))
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether forward frees the parameters, which backward gathers again. Acts from the next forward on."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}: {reshard_after_forward}"
            )
        for state in self._states(recurse):
            state.auto_reshard = False
            state.set_reshard_after_forward(reshard_after_forward)

    @checked
    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Sets whether backward frees the parameters. False keeps them for the next micro-batch."""
        self._set_option("reshard_after_backward", reshard_after_backward, recurse)

    @checked
    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Sets whether backward gathers this unit. An embedding's backward, for example, does not read its weight."""
        self._set_option("unshard_in_backward", unshard_in_backward, recurse=False)

    @checked
    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Sets whether full parameters have the same addresses at every unshard. Costs a gather buffer for each unit.

        The memory stays allocated between reshard and unshard, but using a parameter outside of its unit still raises.
        Acts from the next reshard on. Call it on every rank. After a step that failed, addresses may change once.

        Raises:
            NotImplementedError: a unit has an int ``reshard_after_forward``, so it gathers into two places.
        """
        for state in self._states(recurse):
            if keep and state.post_forward_world is not None:
                raise NotImplementedError(
                    f"fsdp2x.FSDPModule.set_keep_unsharded_storage: unit '{state.name}' reshards to "
                    f"{state.post_forward_world} ranks after forward and gathers into two places. Use "
                    "reshard_after_forward=True or False."
                )
        self._set_option("keep_unsharded_storage", bool(keep), recurse)

    @checked
    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Sets whether gradients are reduced over a separate process group, so that gathers need not wait for them.

        The first call with True is collective over the shard ranks. Units of one mesh share the new group. No effect
        with shared memory, whose gathers and reductions never wait for each other.

        Raises:
            RuntimeError: called during forward or backward.
            ValueError: the model's memory is registered with the group of its gathers. See
                :meth:`set_symm_mem_for_comm` and :meth:`set_allocate_memory_from_process_group_for_comm`.
        """
        refuse_unregistered("FSDPModule.set_separate_reduce_scatter_group", list(self._states(True)), separate=enable)
        for state in self._states(recurse):
            if state.is_running:
                raise RuntimeError("set_separate_reduce_scatter_group cannot be called during forward or backward")
            state.comms.separate_reduction = bool(enable)
            for group in state.groups:
                if enable:
                    reduction_group(group.ranks)
            apply_comms(state)

    def set_post_optim_event(self, event: Any) -> None:
        """Makes the gathers of the next forward wait for ``event`` instead of for all earlier work. Root only.

        Gather buffers stay allocated until a forward without an event, because gathers that start early must not reuse
        memory that is still in use. No effect on the CPU, where the optimizer has finished when its step returns.

        Args:
            event: a torch.Event or torch.cuda.Event that was recorded after the optimizer's step.

        Raises:
            TypeError: ``event`` is not an event.
        """
        if not hasattr(event, "wait"):
            raise TypeError(
                f"fsdp2x.FSDPModule.set_post_optim_event: event must be a torch.Event, got {event!r}. Record one "
                "after the optimizer's step."
            )
        self._get_fsdp_state().shared.settings.set_post_optimizer_event(event)

    @checked
    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Allocates gather and reduction buffers from the process group, registered with its network.

        It applies to the whole model if one unit asks for it, because units share gather buffers. If the backend has no
        such memory, as on the CPU, torch's allocator is used, as in FSDP2. Results do not depend on it.

        Raises:
            RuntimeError: called during forward or backward.
            ValueError: gradients are reduced over a separate group (:meth:`set_separate_reduce_scatter_group`).
        """
        caller = "FSDPModule.set_allocate_memory_from_process_group_for_comm"
        refuse_unregistered(caller, list(self._states(True)), registered=enable)
        state = self._get_fsdp_state()
        memory = "process_group" if enable else None
        if memory != state.comms.memory:
            state.comms.memory = memory
            remake_transports(state, "memory")

    @checked
    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Allocates gather and reduction buffers in symmetric memory, which the ranks of a group map into each other.

        It applies to the whole model. The ranks exchange the memory when they first use a buffer. Torch 2.15 frees it
        on all ranks together, so ``fsdp2x.sleep`` and leaving a block of ``rl.Reference`` are collective then.

        Args:
            backend: ``"NCCL"``, for its copy-engine and symmetric kernels. Its reductions only sum, so call
                :meth:`set_force_sum_reduction_for_comms`.

        Raises:
            ValueError: another backend, or gradients are reduced over a separate group
                (:meth:`set_separate_reduce_scatter_group`).
            NotImplementedError: the model is on the CPU, or this torch has no pool of symmetric memory.
            RuntimeError: called during forward or backward.
        """
        if backend != "NCCL":
            raise ValueError(f"set_symm_mem_for_comm: expected backend 'NCCL', got {backend!r}")
        self._use_symmetric_memory("FSDPModule.set_symm_mem_for_comm")

    @checked
    def set_copy_engine_all_gather(self, enable: bool) -> None:
        """Sets whether a GPU's copy engines gather parameters, which leaves its multiprocessors free. Default: no.

        It applies to the whole model. It allocates gather and reduction buffers in symmetric memory, so all that
        :meth:`set_symm_mem_for_comm` says applies. NCCL 2.28 gathers them by copy engines if you set the environment
        variable ``NCCL_CTA_POLICY=2``, or ``config.cta_policy`` in the ``ProcessGroupNCCL.Options`` of the process
        group to ``ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO``. ``False`` returns to torch's allocator.

        Raises:
            ValueError: NCCL would not use copy engines for a process group that gathers, or see
                :meth:`set_symm_mem_for_comm`.
            NotImplementedError: the model is on the CPU, or this torch has no pool of symmetric memory.
            RuntimeError: called during forward or backward.
        """
        caller, state = "FSDPModule.set_copy_engine_all_gather", self._get_fsdp_state()
        if not enable:
            if state.comms.memory == "symmetric":
                state.comms.memory = None
                remake_transports(state, "memory")
            return
        ranks = [group.ranks for one in self._states(True) for group in one.groups]
        if state.ranks.device.type != "cpu" and not all(
            torch_private.may_use_copy_engines(one.group, one.device) for one in ranks
        ):
            raise ValueError(
                f"fsdp2x.{caller}: NCCL would gather with kernels. Set the environment variable NCCL_CTA_POLICY=2 "
                "before init_process_group, or its option config.cta_policy to ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO."
            )
        self._use_symmetric_memory(caller)

    def _use_symmetric_memory(self, caller: str) -> None:
        state = self._get_fsdp_state()
        if state.ranks.device.type == "cpu" or not torch_private.has_symmetric_pool():
            raise NotImplementedError(
                f"fsdp2x.{caller}: symmetric memory needs CUDA devices, and a torch with "
                f"torch.distributed._symmetric_memory.get_mem_pool. Got torch {torch.__version__} and a model on "
                f"{state.ranks.device.type}."
            )
        refuse_unregistered(caller, list(self._states(True)), registered=True)
        state.comms.memory = "symmetric"
        remake_transports(state, "memory")

    @checked(own=("max_input_buffers",))
    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Sets how many packed units may wait for their reduction on a device. The largest value of all units counts.

        Default: two between two units, if that does not raise peak memory, and one during backward. On the CPU always
        one.

        Raises:
            ValueError: not a positive int.
        """
        if not isinstance(max_input_buffers, int) or isinstance(max_input_buffers, bool) or max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers!r}")
        for state in self._states(recurse):
            state.comms.max_reduce_buffers = max_input_buffers
            state.apply_reduce_buffers()

    @checked
    def set_wire_dtype(self, *, weights: str | None = None, gradients: str | None = None, recurse: bool = True) -> None:
        """Sets the dtypes in which weights are gathered and gradients reduced over a process group.

        It applies to parameters of at least two dims. Sharded parameters, ``.grad``, optimizers, and checkpoints do not
        change. Call it on every rank. docs/guides/precision.md says when it pays.

        Args:
            weights: ``"int8"`` or ``"fp8"`` (e4m3), with a float32 scale for each block of 256 elements. All ranks,
                including the sender, compute with the decoded values. The CPU encodes once for forward and backward, a
                device for each gather. None: the compute dtype.
            gradients: ``"bfloat16"``, or ``"int8"`` with error feedback, which adds the last step's rounding error and
                costs one byte for each element of the full model. Both are summed in float32, in rank order. None: a
                reduce-scatter in the reduce dtype.

        Raises:
            ValueError: a name is unknown, the transport is ``"shm"``, or gradients are not reduced in float32 or are
                reduced by :meth:`set_custom_reduce_scatter` or :meth:`set_separate_reduce_scatter_group`.
            NotImplementedError: fsdp2x has no kernels for the accelerator, or a unit with encoded weights has an int
                ``reshard_after_forward``.
            RuntimeError: called during forward or backward.
        """
        formats = wire_formats_of("fsdp2x.FSDPModule.set_wire_dtype", weights, gradients)
        set_wire_formats(list(self._states(recurse)), *formats, apply_comms)

    @checked
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides this unit's summed gradients by ``factor`` instead of the number of ranks. Not recursive.

        Raises:
            ValueError: not a positive number.
        """
        if not factor > 0:
            raise ValueError(f"fsdp2x.FSDPModule.set_gradient_divide_factor: factor must be positive, got {factor!r}")
        self._set_option("divide_factor", float(factor), recurse=False)

    @checked
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Sets the divisor under its deprecated name. Use :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    @checked
    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Sums in the collective and divides afterwards. Not recursive. Shared memory always does this."""
        self._set_option("force_sum_reduction", enable, recurse=False)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets the units to gather when this unit's forward starts, instead of the one recorded after it."""
        self._set_prefetch("set_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets the units to gather when this unit's backward starts, instead of the one recorded before it."""
        self._set_prefetch("set_backward_prefetch", modules)

    def _set_prefetch(self, setter: str, modules: list[FSDPModule]) -> None:
        modules = sharded_modules(f"FSDPModule.set_modules_to_{setter[4:]}", modules)
        self._get_fsdp_state().set_prefetch(setter, [module._get_fsdp_state() for module in modules])

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Has no effect: gathers never allocate, which this option of FSDP2 is about."""

    def _apply(self, fn, recurse: bool = True):
        refuse_swapped("FSDPModule.to", self.parameters())
        with moving(self._get_fsdp_state(), fn):
            return cast("Any", super(_TorchFSDPModule, self))._apply(fn, recurse=recurse)


def sharded_modules(caller: str, modules: Any) -> list[FSDPModule]:
    """Returns ``modules`` as a list. Raises FSDP2's type of error if one is not sharded."""
    given = list(modules) if isinstance(modules, Iterable) else [modules]
    wrong = next((one for one in given if not isinstance(one, FSDPModule)), None)
    if wrong is not None or not isinstance(modules, Iterable):
        kind = type(modules if wrong is None else wrong).__name__
        raise ValueError(f"fsdp2x.{caller}: modules: Expects a list of FSDPModules but got a {kind}")
    return given


@checked(own=("modules",))
def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Lets several roots share device streams, for pipeline stages. No effect on the CPU, which has none.

    Each root keeps separate gather and reduction buffers, as in FSDP2.

    Raises:
        ValueError: one of ``modules`` is not sharded.
        RuntimeError: called during forward or backward.
    """
    modules = sharded_modules("share_comm_ctx", modules)
    states = [module._get_fsdp_state() for module in modules]
    layers = next((state.comms.layers for state in states if state.comms.layers is not None), {})
    for state in states:
        state.comms.layers = layers
        remake_transports(state, "streams")


@checked
def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes ``module.method_name`` gather and free parameters as ``forward`` does. No effect on unsharded modules.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    original = getattr(module, method_name)

    def call_sharded_method(self, *args: Any, **kwargs: Any):
        state = self._get_fsdp_state()
        hooks = state.hooks
        try:
            follow_modules(state)
            if (changed := hooks.pre_forward(self, args, kwargs)) is not None:
                args, kwargs = changed
            output = original(*args, **kwargs)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                hooks.post_forward(self, args, None)
            raise
        changed = hooks.post_forward(self, args, output)
        return output if changed is None else changed

    call_sharded_method.__name__ = method_name
    setattr(module, method_name, call_sharded_method.__get__(module, type(module)))


def _not_implemented(name: str):
    def method(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"fsdp2x.FSDPModule.{name} is not supported yet. If you need it, use torch.distributed.fsdp.fully_shard."
        )

    method.__name__ = name
    method.__doc__ = "Raises NotImplementedError: not supported yet."
    return method


def _refuse_unknown_methods() -> None:
    """Makes methods that only FSDP2's class has raise, so that they do not use FSDP2's internals."""
    for name, value in vars(_TorchFSDPModule).items():
        if callable(value) and not name.startswith("__") and name not in vars(FSDPModule):
            setattr(FSDPModule, name, _not_implemented(name))


_refuse_unknown_methods()
