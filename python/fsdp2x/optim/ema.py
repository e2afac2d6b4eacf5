"""An exponential moving average of weights, kept in the optimizer's state."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from fsdp2x.base.arguments import checked
from fsdp2x.base.optimizer_hooks import swapped_values
from fsdp2x.lifecycle.tree import running_step, unit_states
from fsdp2x.optim.local import cut_like, local_tensor
from fsdp2x.sharding.offload import host_state

_KEY = "ema"  # in the optimizer's state


class EMA:
    """Averages the parameters of ``optimizer`` after each of its steps: ``ema = decay * ema + (1 - decay) * param``.

        ema = fsdp2x.optim.EMA(optimizer, decay=0.999)
        ...
        with ema.swapped(model):  # evaluate, export
            model.eval()(**batch)

    The averages are sharded like their parameters, as one more tensor in the optimizer's state. So checkpoints,
    ``fsdp2x.sleep`` and memory reports include them. It works with any optimizer, also with ``local_optimizer``, and is
    not collective. The first step copies the parameters, as ``torch.optim.swa_utils.AveragedModel`` does. A parameter
    without a gradient has no average. Load a checkpoint after making this; without averages in it they restart, with a
    warning.

    Args:
        optimizer: an optimizer over the model's current parameters.
        decay: a number in [0, 1), which you may change between steps.
        dtype: dtype of the averages: ``torch.float32``, or None for the parameter's. With a decay near 1, bfloat16
            averages do not change.

    Raises:
        ValueError: ``decay`` or ``dtype`` is not allowed, the optimizer has an average already, or its state is in CPU
            memory (``HostOffloadPolicy(mode="optimizer")``).
        RuntimeError: in ``step`` of the optimizer, if the averages are swapped in.
    """

    @checked
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        decay: float = 0.999,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"fsdp2x.optim.EMA: decay must be a number in [0, 1), got {decay}")
        if dtype not in (None, torch.float32):
            raise ValueError(f"fsdp2x.optim.EMA: dtype must be torch.float32 or None, got {dtype}")
        if "_fsdp2x_ema" in optimizer.__dict__ or any(_KEY in state for state in optimizer.state.values()):
            raise ValueError("fsdp2x.optim.EMA: the optimizer's state has averages already")
        for group in optimizer.param_groups:
            if any(host_state(param) is not None for param in group["params"]):
                raise ValueError(
                    "fsdp2x.optim.EMA: the optimizer's state of these parameters is in CPU memory. Use "
                    "HostOffloadPolicy(mode='all'), or another policy."
                )
        optimizer.__dict__["_fsdp2x_ema"] = True
        self.decay = decay
        self._optimizer, self._dtype, self._is_swapped = optimizer, dtype, False
        self._loading: dict[int, Tensor] = {}  # by position of their parameters
        optimizer.register_state_dict_pre_hook(self._refuse_if_swapped)
        optimizer.register_step_post_hook(self._update)
        optimizer.register_load_state_dict_pre_hook(self._begin_loading)
        optimizer.register_load_state_dict_post_hook(self._end_loading)

    @contextlib.contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Gives the parameters of ``model`` the values of their averages, and restores their own at the end.

        Call it on all ranks between two steps. Inside, forwards, ``save_hf``, exports, pushes and the model's state
        dict read the averages. Calls that would keep, move, or write the swapped values raise: steps, the optimizer's
        state dict, ``fsdp2x.checkpoint``, loads, ``sleep``, ``rebind_optimizer`` and ``model.to``. It takes the memory
        of one parameter, or of all parameters if averages have another dtype.

        Raises:
            RuntimeError: a forward or backward of ``model`` is running, or the averages are already swapped in.
        """
        if self._is_swapped:
            raise RuntimeError("fsdp2x.optim.EMA.swapped: the averages are already swapped in. Leave that block first.")
        states = unit_states(model)
        if running_step(model) is not None:
            raise RuntimeError("fsdp2x.optim.EMA.swapped: a forward or backward of the model is running. End it first.")
        for state in states:  # gathered parameters have the old values
            state.reshard()
        pairs = self._pairs(model)
        kept = _exchange(pairs)
        self._is_swapped = True
        try:
            with swapped_values(model.parameters()):
                yield
        finally:
            for state in states:
                state.reshard()
            _exchange(pairs, kept)
            self._is_swapped = False

    @torch.no_grad()
    def _update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        averages, values = [], []
        for group in optimizer.param_groups:
            for param in group["params"]:
                state = optimizer.state.get(param, {})
                if _KEY in state:
                    averages.append(local_tensor(state[_KEY]))
                    values.append(local_tensor(param).detach().to(averages[-1].dtype))
                elif param.grad is not None:  # it has its state, and some read an empty one as "begin"
                    copied = local_tensor(param).detach().to(_dtype_of(param, self._dtype), copy=True)
                    optimizer.state[param][_KEY] = cut_like(param, copied)
        if averages:
            torch._foreach_lerp_(averages, values, 1 - self.decay)

    def _pairs(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Returns local tensors of each parameter of ``model`` that has an average, and of the average."""
        here = {id(param) for param in model.parameters()}
        return [
            (local_tensor(param).detach(), local_tensor(state[_KEY]))
            for param, state in self._optimizer.state.items()
            if id(param) in here and _KEY in state
        ]

    def _refuse_if_swapped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_swapped:
            raise RuntimeError("fsdp2x.optim.EMA: state_dict() of the optimizer inside of swapped(). Leave it first.")

    def _begin_loading(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Keeps averages in their dtype, because torch converts states to the dtype of their parameters."""
        if self._is_swapped:
            raise RuntimeError("fsdp2x.optim.EMA: load_state_dict() inside of swapped(). Leave it first.")
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]  # numbers, or names
        states = [state_dict["state"].get(key, {}) for key in saved]
        self._loading = {place: state[_KEY] for place, state in enumerate(states) if _KEY in state}
        if state_dict["state"] and not self._loading:
            warnings.warn(
                "fsdp2x.optim.EMA: the loaded state has no 'ema', so the averages restart with the next step",
                stacklevel=4,
            )

    @torch.no_grad()
    def _end_loading(self, optimizer: torch.optim.Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        loaded, self._loading = self._loading, {}
        for place, average in loaded.items():
            param = params[place]
            dtype = _dtype_of(param, self._dtype)
            if optimizer.state[param][_KEY].dtype != dtype:
                optimizer.state[param][_KEY] = average.to(param.device, dtype, copy=True)


def _dtype_of(param: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and param.is_floating_point() else param.dtype


@torch.no_grad()
def _exchange(pairs: list[tuple[Tensor, Tensor]], kept: list[Tensor | None] | None = None) -> list[Tensor | None]:
    """Exchanges the values of each pair. Pairs of different dtypes are kept, and restored from ``kept``."""
    aside: list[Tensor | None] = []
    for index, (param, average) in enumerate(pairs):
        held: Any = param.clone() if kept is None or kept[index] is None else None
        if param.dtype == average.dtype:
            param.copy_(average)
            average.copy_(held)
            held = None
        else:
            param.copy_(average if kept is None else cast("Tensor", kept[index]))
        aside.append(held)
    return aside
