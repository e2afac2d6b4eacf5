"""``FSDPModule``: the class a sharded module's class is mixed with, and upstream's functions over such modules."""

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
from fsdp2x.lifecycle.state import UnitState
from fsdp2x.lifecycle.tree import get_state, refuse_unregistered
from fsdp2x.sharding.mesh import reduction_group
from fsdp2x.sharding.transport import has_streams

# Bound once: install() puts our classes under these names.
_TorchFSDPModule = torch_fsdp.FSDPModule
_TorchReductionHandle = getattr(torch_fsdp, "GradientReductionHandle", object)  # since 2.15


class UnshardHandle(torch_fsdp.UnshardHandle):
    """Returned by ``FSDPModule.unshard(async_op=True)``."""

    def __init__(self, state: UnitState | None) -> None:
        self._state = state

    def wait(self) -> None:
        """Waits until the parameters are gathered and registers them on the modules.

        No effect after the unit's forward, which has waited.
        """
        if self._state is not None and self._state.unit is not None:
            self._state.unit.finish_unshard()
        self._state = None


class GradientReductionHandle(_TorchReductionHandle):
    """Returned by ``FSDPModule.finalize_backward(async_op=True)``."""

    def __init__(self, state: UnitState | None) -> None:
        self._state = state
        if state is not None:
            self._generation = state.generation
            state.reduction_pending = True

    def wait(self) -> None:
        """Waits until all gradients are reduced and in ``.grad``.

        Raises:
            RuntimeError: ``reset_iter_state()`` was called in between.
        """
        if self._state is None:
            return
        if self._state.generation != self._generation:
            raise RuntimeError("This gradient reduction handle was invalidated")
        assert self._state.root is not None, "finalize_backward has seen it"
        self._state.root.finalize_backward()
        self._state.reduction_pending = False
        self._state = None


class FSDPModule(_TorchFSDPModule):
    """Methods of a module that ``fsdp2x.fully_shard`` was applied to.

    Every public method of torch's ``FSDPModule`` either works as there or raises ``NotImplementedError`` with its name.
    """

    modules: Callable[..., Iterator[nn.Module]]  # and all else of the module that it is mixed with
    parameters: Callable[..., Iterator[nn.Parameter]]
    _orig_cls_mro_index = 3  # [FSDP<Orig>, this, torch's FSDPModule, Orig, ...]

    def __new__(cls, *args: Any, **kwargs: Any):
        # Indexing a ModuleList of sharded layers builds a new list: it must be of the original class.
        original = cls.__mro__[cls._orig_cls_mro_index]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    def _get_fsdp_state(self) -> UnitState:
        state = get_state(cast("nn.Module", self))
        if not isinstance(state, UnitState):
            raise AssertionError(f"No FSDP state found on {type(self).__name__}")
        return state

    def _states(self, recurse: bool) -> Iterator[UnitState]:
        for module in self.modules() if recurse else (self,):
            if isinstance(module, FSDPModule):
                yield module._get_fsdp_state()

    def _set_option(self, name: str, value: Any, recurse: bool) -> None:
        for state in self._states(recurse):
            setattr(state.live_options(), name, value)

    def reshard(self) -> None:
        """Frees this unit's unsharded parameters and registers the sharded ones. Not recursive."""
        self._get_fsdp_state().reshard()

    @checked
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this unit's parameters now. Not recursive.

        Args:
            async_op: return at once with a handle; ``handle.wait()`` registers the parameters (the unit's forward
                waits anyway).
        """
        state = self._get_fsdp_state()
        state.make_unit()
        if async_op:
            state.made_unit.begin_unshard()
            return UnshardHandle(state)
        state.made_unit.unshard()
        return None

    def reset_iter_state(self) -> None:
        """Drops the iteration: every unit is sharded and idle, all its gradients are gone. Root only.

        To begin a step again. It is not needed to go on after an exception: a forward that raised leaves the units as
        if it had not begun, a backward that raised leaves what it has put into ``.grad`` and nothing else. Gradients of
        earlier backwards (accumulated without gradient sync or all-reduce) stay; where they are in one sum with
        gradients of a backward that raised they are lost, and the next forward under grad raises until this is called.
        On several ranks every rank must have failed in the same place.
        """
        self._get_fsdp_state().reset()

    zero_grad = pending_gradients.zero_grad
    get_pending_gradients = pending_gradients.get_pending_gradients
    synchronize_gradients = pending_gradients.synchronize_gradients

    @checked
    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last before the next forward: until then the recorded order is kept."""
        self._get_fsdp_state().set_is_last_backward(is_last_backward)

    @checked
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward keeps the gradients packed and unreduced, in the reduce dtype, until a backward with True.

        ``model.zero_grad()`` drops them, ``optimizer.zero_grad()`` does not. Sets the all-reduce of 2-D meshes as well.
        """
        self._set_option("requires_gradient_sync", requires_gradient_sync, recurse)
        self._set_option("requires_all_reduce", requires_gradient_sync, recurse)

    @checked
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """On a 2-D mesh: False reduces over the shards only and keeps the sum, in the reduce dtype, for a later
        backward; ``.grad`` does not change until then. No effect on a 1-D mesh, which has no all-reduce."""
        self._set_option("requires_all_reduce", requires_all_reduce, recurse)

    @checked
    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Trainable parameters without a gradient are reduced as zeros: their ``.grad`` becomes zeros, not None.

        Ranks that use different parameters agree without this; it makes ``.grad`` exist everywhere.
        """
        self._set_option("reduce_unused_params", reduce_scatter_unused_params, recurse)

    @checked
    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], Any] | None, *, stream: Any = None) -> None:
        """Runs ``hook(rows)`` on this unit's reduced rows (flat, reduce dtype, pads are zero) before ``.grad`` is set.

        On a 2-D mesh it runs after the all-reduce. The hook changes ``rows`` in place. Not recursive. None: no hook.

        Args:
            stream: the device stream that is current while the hook runs, ordered behind the reduction and before
                whatever comes next. None: the reduction's own. No effect on the CPU, which has no streams.
        """
        state = self._get_fsdp_state()
        state.comms.all_reduce_hook = hook
        state.comms.all_reduce_hook_stream = stream if has_streams(state.ranks.device) else None
        state.apply_comms()

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gathers this unit through ``comm`` (torch's ``AllGather`` protocol) over the process group. Not recursive.

        Raises:
            TypeError: ``comm`` has not what the protocol asks for.
            ValueError: the model was sharded with ``transport="shm"``.
            RuntimeError: called during forward or backward.
        """
        state = self._get_fsdp_state()
        state.comms.all_gather = own_collective("set_custom_all_gather", comm)
        state.apply_comms()

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduces through ``comm`` (torch's ``ReduceScatter`` protocol), see :meth:`set_custom_all_gather`."""
        state = self._get_fsdp_state()
        state.comms.reduce_scatter = own_collective("set_custom_reduce_scatter", comm)
        state.apply_comms()

    @checked
    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """True: backward starts reductions, :meth:`finalize_backward` ends them, for schedules of several backwards.

        Root only.

        Raises:
            RuntimeError: not the root, or during backward.
        """
        state = self._get_fsdp_state()
        if state.is_root is False:
            raise RuntimeError("set_manual_backward_finalization must be called on the root FSDP module")
        if state.root is not None and state.root.in_backward:
            raise RuntimeError("set_manual_backward_finalization cannot change mode during backward")
        state.manual_finalization = enabled
        if state.root is not None:
            state.root.manual_finalization = enabled

    @checked
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Ends the reductions of all backwards since the last call. Root only, with manual finalization.

        Nothing happens before the first forward.

        Args:
            async_op: return a handle instead of waiting; the reductions are done, and ``.grad`` set, at its ``wait()``.

        Raises:
            RuntimeError: not the root; without manual finalization; during backward; while an earlier handle was not
                waited for.
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
        """Whether forward frees the parameters (gathered again in backward). Acts from the next forward on."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}: {reshard_after_forward}"
            )
        for state in self._states(recurse):
            state.auto_reshard = False
            state.set_reshard_after_forward(reshard_after_forward)

    @checked
    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether backward frees the parameters; False keeps them for the next micro-batch."""
        self._set_option("reshard_after_backward", reshard_after_backward, recurse)

    @checked
    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: do not gather this unit in backward (an embedding's backward does not read its weight)."""
        self._set_option("unshard_in_backward", unshard_in_backward, recurse=False)

    @checked
    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """True: unsharded parameters lie at the same addresses at every unshard, at the cost of a slot for each unit.

        Between reshard and unshard the memory is kept, but a parameter used outside its unit stays an error. Acts from
        the next reshard on. Call it alike on every rank.

        Raises:
            NotImplementedError: a unit with an int ``reshard_after_forward``, which gathers into two places.
        """
        for state in self._states(recurse):
            if keep and state.post_forward_world is not None:
                raise NotImplementedError(
                    f"fsdp2x.FSDPModule.set_keep_unsharded_storage: unit '{state.name}' reshards to "
                    f"{state.post_forward_world} ranks after forward and gathers into two places; use "
                    "reshard_after_forward=True or False"
                )
        self._set_option("keep_unsharded_storage", bool(keep), recurse)

    @checked
    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """True: gradients are reduced over a process group of their own, so that gathers need not wait for them.

        Collective over the shard ranks at the first call with True; units of one mesh share the new group. No effect on
        shared memory, whose gathers and reductions never wait for each other.

        Raises:
            RuntimeError: called during forward or backward.
            ValueError: the model's memory is registered with the group of its gathers, see
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
            state.apply_comms()

    def set_post_optim_event(self, event: Any) -> None:
        """The next forward's gathers wait for ``event`` instead of everything enqueued before that forward.

        Root only; for one forward. ``event`` (torch.Event or torch.cuda.Event) was recorded behind the optimizer. No
        effect on the CPU, where the optimizer has finished when its step returns. Slots are kept until a forward comes
        without an event, since gathers that start early cannot have memory that is still in use before it.
        """
        if not hasattr(event, "wait"):
            raise TypeError(
                f"fsdp2x.FSDPModule.set_post_optim_event: event must be a torch.Event, got {event!r}; record one "
                "behind the optimizer's step"
            )
        state = self._get_fsdp_state()
        if state.root is None:
            state.post_optimizer_event = event
        else:
            state.root.set_post_optimizer_event(event)

    @checked
    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Slots and reduction buffers are memory that the process group allocates, registered with its network.

        For the whole model, as soon as one of its units asks: units share their slots. Where the backend has no such
        memory, on the CPU for one, torch's allocator serves, as upstream. Results do not depend on it.

        Raises:
            RuntimeError: called during forward or backward.
            ValueError: gradients are reduced over a group of their own (:meth:`set_separate_reduce_scatter_group`).
        """
        caller = "FSDPModule.set_allocate_memory_from_process_group_for_comm"
        refuse_unregistered(caller, list(self._states(True)), registered=enable)
        state = self._get_fsdp_state()
        memory = "process_group" if enable else None
        if memory != state.comm_memory:
            state.comm_memory = memory
            state.remake_transports("memory")

    @checked
    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Slots and reduction buffers are symmetric memory, which the ranks of a group map into each other.

        For the whole model, see :meth:`set_allocate_memory_from_process_group_for_comm`. Memory is exchanged between
        the ranks when a slot is first used. Torch 2.15 frees it on all ranks together, so that ``fsdp2x.sleep`` and
        the end of a block of ``rl.Reference`` are collective then.

        Args:
            backend: ``"NCCL"``, for its copy-engine and symmetric kernels; its reductions sum only: call
                :meth:`set_force_sum_reduction_for_comms`.

        Raises:
            ValueError: another backend, or gradients are reduced over a group of their own
                (:meth:`set_separate_reduce_scatter_group`).
            NotImplementedError: the model is on the CPU, or this torch has no pool of symmetric memory.
            RuntimeError: called during forward or backward.
        """
        if backend != "NCCL":
            raise ValueError(f"set_symm_mem_for_comm: expected backend 'NCCL', got {backend!r}")
        state = self._get_fsdp_state()
        if state.ranks.device.type == "cpu" or not torch_private.has_symmetric_pool():
            raise NotImplementedError(
                "fsdp2x.FSDPModule.set_symm_mem_for_comm: symmetric memory needs CUDA devices and a torch with "
                f"torch.distributed._symmetric_memory.get_mem_pool; this model is on {state.ranks.device.type}"
            )
        refuse_unregistered("FSDPModule.set_symm_mem_for_comm", list(self._states(True)), registered=True)
        state.comm_memory = "symmetric"
        state.remake_transports("memory")

    @checked(own=("max_input_buffers",))
    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many packed units may be in flight to their reduction on a device; the largest of all units counts.

        By default two between two units, where that does not raise the peak of memory, and one beside backward. On the
        CPU one waits at most, always.

        Raises:
            ValueError: not a positive int.
        """
        if not isinstance(max_input_buffers, int) or isinstance(max_input_buffers, bool) or max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers!r}")
        for state in self._states(recurse):
            state.max_reduce_buffers = max_input_buffers
            state.apply_reduce_buffers()

    @checked
    def set_wire_dtype(self, *, weights: str | None = None, gradients: str | None = None, recurse: bool = True) -> None:
        """In how few bits weights are gathered and gradients reduced over a process group.

        Parameters of two dims or more; norms and biases travel as they are. Sharded parameters, ``.grad``, optimizers
        and checkpoints stay what they are. Call it alike on every rank; docs/guides/precision.md says when it pays.

        Args:
            weights: ``"int8"`` or ``"fp8"`` (e4m3): blocks of 256 elements of a rank's rows with a float32 scale each,
                encoded once for a forward and its backward on the CPU, and for each gather on a device, which keeps no
                codes. All ranks compute with the same bits, those a rank sends among them. None: the dtype of compute.
                A single rank sends nothing and encodes nothing.
            gradients: ``"bfloat16"``, or ``"int8"``, where each rank adds what the last step has rounded away (error
                feedback) and keeps one byte for each element of the whole model for that. Both are summed in float32,
                in rank order. None: a reduce-scatter in the reduce dtype.

        Raises:
            ValueError: another name; ``transport="shm"``; gradients that are not reduced in float32, or by
                :meth:`set_custom_reduce_scatter` or :meth:`set_separate_reduce_scatter_group`.
            NotImplementedError: a unit on an accelerator that fsdp2x has no kernels for, or weights of one with an int
                ``reshard_after_forward``.
            RuntimeError: called during forward or backward.
        """
        formats = wire_formats_of("fsdp2x.FSDPModule.set_wire_dtype", weights, gradients)
        set_wire_formats(list(self._states(recurse)), *formats)

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
        """Deprecated name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    @checked
    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Sums on the wire and divides afterwards. Not recursive; the shared-memory transport always does."""
        self._set_option("force_sum_reduction", enable, recurse=False)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units whose gather starts when this unit's forward starts, instead of the one recorded after it."""
        self._set_prefetch("set_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units whose gather starts when this unit's backward starts, instead of the one recorded before it."""
        self._set_prefetch("set_backward_prefetch", modules)

    def _set_prefetch(self, setter: str, modules: list[FSDPModule]) -> None:
        modules = sharded_modules(f"FSDPModule.set_modules_to_{setter[4:]}", modules)
        self._get_fsdp_state().set_prefetch(setter, [module._get_fsdp_state() for module in modules])

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """No effect: gathers never allocate, which is what this knob of upstream's is about."""

    def _apply(self, fn, recurse: bool = True):
        refuse_swapped("FSDPModule.to", self.parameters())
        with moving(self._get_fsdp_state(), fn):
            return cast("Any", super(_TorchFSDPModule, self))._apply(fn, recurse=recurse)


def sharded_modules(caller: str, modules: Any) -> list[FSDPModule]:
    """``modules`` as a list, all of them sharded; upstream's type of error."""
    given = list(modules) if isinstance(modules, Iterable) else [modules]
    wrong = next((one for one in given if not isinstance(one, FSDPModule)), None)
    if wrong is not None or not isinstance(modules, Iterable):
        kind = type(modules if wrong is None else wrong).__name__
        raise ValueError(f"fsdp2x.{caller}: modules: Expects a list of FSDPModules but got a {kind}")
    return given


@checked(own=("modules",))
def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Lets several roots share device streams, for pipeline stages. No effect on the CPU, which has none.

    Slots and reduction buffers stay each root's own, as upstream's gathered parameters do.

    Raises:
        ValueError: one of ``modules`` is not sharded.
        RuntimeError: called during forward or backward.
    """
    modules = sharded_modules("share_comm_ctx", modules)
    states = [module._get_fsdp_state() for module in modules]
    layers = next((state.layers for state in states if state.layers is not None), {})
    for state in states:
        state.layers = layers
        state.remake_transports("streams")


@checked
def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes ``module.method_name`` gather and free the parameters as ``forward`` does. No-op on unsharded modules.

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
            state.follow_modules()
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
            f"fsdp2x.FSDPModule.{name} is not supported yet; use torch.distributed.fsdp.fully_shard where you need it"
        )

    method.__name__ = name
    method.__doc__ = "Not supported yet: raises NotImplementedError."
    return method


def _refuse_unknown_methods() -> None:
    """What upstream's class has and ours has not must not reach for upstream's internals."""
    for name, value in vars(_TorchFSDPModule).items():
        if callable(value) and not name.startswith("__") and name not in vars(FSDPModule):
            setattr(FSDPModule, name, _not_implemented(name))


_refuse_unknown_methods()
