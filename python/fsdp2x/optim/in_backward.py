"""Steps that begin while backward runs: when a gradient has arrived in host memory, on threads of the optimizer.

    backward   unit 2's gradients arrive | unit 1's | unit 0's | wait for the threads | backward returns
    threads                               step of unit 2 | step of unit 1 | step of unit 0
    step()     checks that the step was the one that was meant, and steps all other parameters

Outside of backward no thread runs, so parameters and states have their new values there.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2x.base import torch_private
from fsdp2x.base.native import _C
from fsdp2x.base.optimizer_hooks import refuse_swapped
from fsdp2x.optim.local import local_tensor
from fsdp2x.sharding.offload import host_state

# A batch has this many elements, or this part of all: each takes a walk over all parameters.
_BATCH_NUMEL, _MAX_BATCHES = 1 << 20, 64


class StepInBackward:
    """The steps that one optimizer has begun in ``threads``."""

    def __init__(self, name: str, threads: _C.StepThreads) -> None:
        self._name, self.threads = name, threads
        self._batch_numel = 0
        self._forget()

    def _forget(self) -> None:
        self._arrived: list[Tensor] = []
        self._arrived_numel = 0
        self._begun: dict[Tensor, tuple[Tensor, tuple, tuple]] = {}  # gradients, their versions, and their checksums
        self._settings: Any = None
        self._writable: list[_C.WritableShards] = []
        self._awaits_end = self._has_failed = False

    def take(self, optimizer: Any, param: Tensor) -> None:
        """The gradient of ``param`` is there."""
        if not torch_private.inside_backward() or local_tensor(param).device.type != "cpu" or host_state(param):
            return  # step() steps it
        if self._has_failed:
            raise RuntimeError(self._failure())
        if param in self._begun:
            raise RuntimeError(self._text("a parameter got another gradient before step()"))
        if not self._awaits_end:
            torch_private.call_after_backward(_End(self, optimizer))
            self._awaits_end = True
        self._arrived.append(param)
        self._arrived_numel += local_tensor(param).numel()
        if self._batch_numel == 0:
            params = (param for group in optimizer.param_groups for param in group["params"])
            self._batch_numel = max(sum(local_tensor(one).numel() for one in params) // _MAX_BATCHES, _BATCH_NUMEL)
        if self._arrived_numel >= self._batch_numel:
            self._begin(optimizer)

    def _begin(self, optimizer: Any) -> None:
        params, self._arrived, self._arrived_numel = self._arrived, [], 0
        refuse_swapped(f"{self._name}(step_in_backward=True)", params)
        if self._settings is None:
            self._settings = optimizer._group_settings()
        self._writable.append(_C.WritableShards([{"params": params}]))
        left_over = optimizer._begin_step(params, self.threads)
        for param in params:
            if param.grad is not None and id(param) not in left_over:
                # The threads only read gradients, so this may read them at the same time.
                self._begun[param] = (param.grad, _versions(param.grad), _checksum(param.grad))

    def end(self, optimizer: Any) -> None:
        """Backward has ended."""
        self._has_failed, self._awaits_end = True, False
        if self._arrived:
            self._begin(optimizer)
        try:
            self.threads.finish()
        finally:
            self._writable.clear()
        self._has_failed = False

    def abandon(self) -> None:
        """Backward has raised."""
        self.threads.wait()
        self._arrived, self._arrived_numel, self._awaits_end = [], 0, False
        self._writable.clear()
        self._has_failed = bool(self._begun)

    def settle(self, settings: Any) -> set[int]:
        """The ids of the parameters that have stepped with these settings, for ``step()``."""
        begun, expected, has_failed = self._begun, self._settings, self._has_failed
        self._forget()
        if has_failed:
            raise RuntimeError(self._failure())
        if expected is not None and expected != settings:
            raise RuntimeError(self._text("settings of a parameter group, such as lr, changed between both"))
        # torch's foreach functions, which clip and unscale, leave the versions of DTensors as they are.
        if any(
            param.grad is not grad or _versions(grad) != versions or _checksum(grad) != checksum
            for param, (grad, versions, checksum) in begun.items()
        ):
            raise RuntimeError(self._text("gradients changed between both, as by clipping, GradScaler, or zero_grad()"))
        return {id(param) for param in begun}

    def refuse_loading(self) -> None:
        """Raises RuntimeError if parameters have stepped that ``step()`` would then step again."""
        if self._begun and not self._has_failed:
            raise RuntimeError(
                f"fsdp2x.optim.{self._name}.load_state_dict: backward has begun a step with step_in_backward=True. "
                "Call step() before you load a state."
            )

    def _failure(self) -> str:
        return (
            f"fsdp2x.optim.{self._name}: a backward raised after steps had begun in it, so some parameters have "
            "stepped and others have not. Load a checkpoint"
        )

    def _text(self, what: str) -> str:
        return (
            f"fsdp2x.optim.{self._name}(step_in_backward=True): {what}, but the step began in backward with what was "
            "there then. Leave out step_in_backward, set lr before backward, or accumulate in fsdp2x.accumulate()"
        )


class _End:
    """The callback of a backward; dropped without a call if that raises."""

    def __init__(self, steps: StepInBackward, optimizer: Any) -> None:
        self._steps: StepInBackward | None = steps
        self._optimizer = optimizer

    def __call__(self) -> None:
        steps, self._steps = self._steps, None
        assert steps is not None, "called once"
        steps.end(self._optimizer)

    def __del__(self) -> None:
        if self._steps is not None:
            self._steps.abandon()


def _versions(grad: Tensor) -> tuple[int, int]:
    return grad._version, local_tensor(grad)._version


def _checksum(grad: Tensor) -> tuple[int, list[int]]:
    """Returns the wrapping sum of the gradient's words of 64 bits, and the bytes before and after them.

    It compares bits, so NaN equals itself. Sums of shorter words are 25 times slower, because torch widens a copy.
    """
    flat = local_tensor(grad).detach().reshape(-1)
    memory = (flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)
    begin = min(-memory.storage_offset() % 8, memory.numel())
    end = memory.numel() - (memory.numel() - begin) % 8
    edges = memory[:begin].tolist() + memory[end:].tolist()
    return int(memory[begin:end].view(torch.int64).sum()) if begin < end else 0, edges


def watch(optimizer: Any, params: Iterable[Tensor]) -> None:
    """Hooks the parameters that train and are not hooked yet."""
    watched = optimizer.__dict__.setdefault("_watched_params", WeakIdKeyDictionary())
    arrive = functools.partial(_arrive, weakref.ref(optimizer))
    for param in params:
        if param.requires_grad and param not in watched:
            watched[param] = None
            param.register_post_accumulate_grad_hook(arrive)


def _arrive(optimizer_ref: Callable[[], Any], param: Tensor) -> None:
    optimizer = optimizer_ref()
    if optimizer is not None:
        optimizer._in_backward.take(optimizer, param)


def _steps_in_backward(param: Tensor) -> bool:
    arriving = [hook for hook in torch_private.gradient_hooks(param) if isinstance(hook, functools.partial)]
    return any(hook.func is _arrive and hook.args[0]() is not None for hook in arriving)


def refuse_clipping(caller: str, params: Iterable[Tensor]) -> None:
    """Raises RuntimeError if a step of one of ``params`` begins before its gradient could be clipped."""
    if any(_steps_in_backward(param) for param in params):
        raise RuntimeError(
            f"fsdp2x.{caller}: an optimizer with step_in_backward=True steps these parameters before the norm of all "
            "gradients is known. Leave out step_in_backward, or do not clip"
        )
