"""What ``FSDPModule`` hands out for work that goes on: ``wait()`` ends it."""

from __future__ import annotations

import torch.distributed.fsdp as torch_fsdp

from fsdp2x.lifecycle.state import UnitState

# Bound once: install() puts our classes under these names.
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
