"""Shared code of the optimizers that step through the engine: unsupported settings, pickling, and torch's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp2x.base.native import _C
from fsdp2x.base.optimizer_hooks import refuse_stale
from fsdp2x.optim.clip import check_clipping, measure_in_step
from fsdp2x.optim.local import loss_of
from fsdp2x.optim.moments import widened, widened_states

_UNSUPPORTED = ("capturable", "differentiable")


class EngineStep(torch.optim.Optimizer):
    """First base of such an optimizer; the second is torch's class. Messages call it ``_name``."""

    refuses_stale_params = True
    _name: str
    _kept: tuple[str, ...] = ("max_grad_norm", "error_if_nonfinite")  # attributes that a pickle contains

    def _prepare(self, settings: dict[str, Any], max_grad_norm: float | None, error_if_nonfinite: bool) -> None:
        """Runs before torch's constructor, which adds parameter groups."""
        self._refuse_unsupported(settings)
        check_clipping(self._name, max_grad_norm, error_if_nonfinite)
        self.max_grad_norm, self.error_if_nonfinite, self.grad_norm = max_grad_norm, error_if_nonfinite, None
        self._begin_afresh()

    def _begin_afresh(self) -> None:
        """Makes the parts that belong to this object alone and are neither copied nor pickled."""
        self._on_device = _C.DeviceSteps()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps every parameter that has a gradient. Returns the result of ``closure``."""
        loss = loss_of(closure)
        self.step_scaled(measure_in_step(self._name, self))
        return loss

    def step_scaled(self, grad_scale: Tensor | None) -> None:
        """Steps with gradients times ``grad_scale``, if there is one."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._refuse_unsupported(param_group)
        super().add_param_group(param_group)
        try:
            refuse_stale(f"optim.{self._name}", self.param_groups[-1]["params"])
        except ValueError:
            del self.param_groups[-1]
            raise

    moments_dtype: torch.dtype | str | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state dict, with values of 8-bit moments in float32."""
        with widened_states(self):
            return super().state_dict()

    def _widened_state(self, param: Tensor) -> dict[str, Any]:
        """Returns the state of one parameter in the form of ``state_dict`` and checkpoints."""
        return widened(self.state[param])

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            self._refuse_unsupported(group)
        super().__setstate__(state)
        self.__dict__.setdefault("grad_norm", None)
        self.__dict__.setdefault("error_if_nonfinite", False)
        self._begin_afresh()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._kept}}

    def _refuse_unsupported(self, settings: dict[str, Any]) -> None:
        """Raises NotImplementedError for a setting of a parameter group that this step would ignore."""
        for key in _UNSUPPORTED:
            if settings.get(key, False):
                raise NotImplementedError(
                    f"fsdp2x.optim.{self._name}: {key}=True is not supported. Pass {key}=False"
                    + (f", or use torch.optim.{self._name}." if hasattr(torch.optim, self._name) else ".")
                )

    def _left_to_torch(self, left_over: list[tuple[int, int]]) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """Yields each group with its parameters in ``left_over``, the (group, index) that the engine did not step."""
        for index in sorted({group for group, _ in left_over}):
            group = self.param_groups[index]
            yield group, [group["params"][i] for number, i in left_over if number == index]
