"""What the optimizers that step through the engine share: what they refuse, pickle, and leave to torch's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp2x.base.cores import step_cores
from fsdp2x.base.native import _C
from fsdp2x.base.optimizer_hooks import refuse_stale
from fsdp2x.optim.clip import check_max_grad_norm, measure_in_step
from fsdp2x.optim.local import loss_of
from fsdp2x.optim.moments import widened, widened_states

_UNSUPPORTED = ("capturable", "differentiable")


class EngineStep(torch.optim.Optimizer):
    """The first base of such an optimizer, torch's class is the second. ``_name`` is what messages call it."""

    refuses_stale_params = True
    _name: str
    _kept: tuple[str, ...] = ("max_grad_norm",)  # attributes that a pickle has

    def _prepare(self, settings: dict[str, Any], max_grad_norm: float | None) -> None:
        """Before torch's constructor, which adds parameter groups."""
        self._refuse_unsupported(settings)
        check_max_grad_norm(self._name, max_grad_norm)
        self.max_grad_norm, self.grad_norm = max_grad_norm, None
        self._begin_afresh()

    def _begin_afresh(self) -> None:
        """What belongs to this object alone, and to its state of the moment."""
        cores = step_cores()
        self._threads = _C.StepThreads(cores.num_threads, list(cores.cores))
        self._on_device = _C.DeviceSteps(threads=self._threads if cores.cores else None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over every parameter that has a gradient; returns what ``closure`` returned."""
        loss = loss_of(closure)
        self.step_scaled(measure_in_step(self._name, self))
        return loss

    def step_scaled(self, grad_scale: Tensor | None) -> None:
        """A step of gradients times ``grad_scale``, if there is one."""
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
        """As torch's; moments in 8 bits come as their values, in float32."""
        with widened_states(self):
            return super().state_dict()

    def _widened_state(self, param: Tensor) -> dict[str, Any]:
        """The state of one parameter as checkpoints have it: as in ``state_dict``."""
        return widened(self.state[param])

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            self._refuse_unsupported(group)
        super().__setstate__(state)
        self.__dict__.setdefault("grad_norm", None)
        self._begin_afresh()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._kept}}

    def _refuse_unsupported(self, settings: dict[str, Any]) -> None:
        """Raises NotImplementedError for a setting of a parameter group that our step would not act on."""
        for key in _UNSUPPORTED:
            if settings.get(key, False):
                raise NotImplementedError(
                    f"fsdp2x.optim.{self._name}: {key}=True is not supported; pass {key}=False"
                    + (f", or use torch.optim.{self._name}" if hasattr(torch.optim, self._name) else "")
                )

    def _left_to_torch(self, left_over: list[tuple[int, int]]) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """Each group with its parameters among ``left_over``, the (group, index) that the engine left as they are."""
        for index in sorted({group for group, _ in left_over}):
            group = self.param_groups[index]
            yield group, [group["params"][i] for number, i in left_over if number == index]
