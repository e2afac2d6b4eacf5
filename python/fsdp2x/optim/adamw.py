"""AdamW in one call per step; the moments belong to the optimizer's state, as torch's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from fsdp2x.optim.local import by_group, local_tensors, loss_of, number, refuse_sparse, refuse_unsupported
from fsdp2x.runtime.native import _C

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` with all parameters of a step in one call, over their local shards.

    Arguments, parameter groups, closures and ``state_dict`` are torch's: states load both ways, and through
    ``torch.distributed.checkpoint.state_dict``. Parameters may be DTensors or plain tensors, of any size (zero too).

    A CPU kernel steps float32 parameters, and bfloat16 and float16 ones whose moments are float32. Its moments are
    torch's bit for bit on processors with fused multiply-add (otherwise within 1e-6). Its parameters are within 1e-6:
    the square root of torch's default implementation comes from MKL and is not correctly rounded, ours is, so that
    every processor computes the same. Parameters of other dtypes, on other devices, or whose gradients are cut
    otherwise are stepped by torch's functions, on the local tensors where possible.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in ``torch.optim.AdamW``; ``lr`` and ``betas`` may
            be tensors of one element.
        foreach, fused: accepted for compatibility and without a meaning: every step is fused.
        capturable, differentiable: must be False.
        moments_dtype: ``torch.float32`` keeps the moments of 16-bit parameters in float32; None (default) gives
            moments the dtype of their parameter, as torch does.

    Raises:
        NotImplementedError: ``capturable`` or ``differentiable``, here, in a group, or in a loaded state.
        ValueError: settings out of range, or another ``moments_dtype``.
    """

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        moments_dtype: torch.dtype | None = None,
    ) -> None:
        refuse_unsupported("AdamW", {"capturable": capturable, "differentiable": differentiable})
        if moments_dtype not in (None, torch.float32):
            raise ValueError(f"fsdp2x.optim.AdamW: moments_dtype is {moments_dtype}, expected None or torch.float32")
        self.moments_dtype = moments_dtype
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        refuse_unsupported("AdamW", param_group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            refuse_unsupported("AdamW", group)
        super().__setstate__(state)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "moments_dtype": self.moments_dtype}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; float32 moments are not rounded to their 16-bit parameter on the way."""
        super().load_state_dict(state_dict)
        if self.moments_dtype is None:
            return
        saved = (index for group in state_dict["param_groups"] for index in group["params"])
        params = (param for group in self.param_groups for param in group["params"])
        for index, param in zip(saved, params, strict=True):
            for name in _MOMENTS:
                if name in self.state.get(param, {}):
                    value = state_dict["state"][index][name].to(self._moments_dtype_of(param), copy=True)
                    self.state[param][name] = value.to(param.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over every parameter that has a gradient; returns what ``closure`` returned."""
        loss = loss_of(closure)
        left_over = _C.adamw_step([_settings(group) for group in self.param_groups], self.state, self._make_state)
        for group, params in by_group(self.param_groups, left_over):
            self._step_by_torch(group, params)
        return loss

    def _moments_dtype_of(self, param: Tensor) -> torch.dtype:
        if self.moments_dtype is not None and param.dtype in (torch.bfloat16, torch.float16):
            return self.moments_dtype
        return param.dtype

    def _make_state(self, group: int, index: int) -> None:
        param = self.param_groups[group]["params"][index]
        names = _MOMENTS if self.param_groups[group]["amsgrad"] else _MOMENTS[:2]
        dtype = self._moments_dtype_of(param)
        state = self.state[param]
        state["step"] = torch.tensor(0.0, dtype=torch.float32)
        for name in names:
            state[name] = torch.zeros_like(param, memory_format=torch.preserve_format, dtype=dtype)

    def _step_by_torch(self, group: dict[str, Any], params: list[Tensor]) -> None:
        columns: list[list[Tensor]] = [[], [], [], [], []]
        rounded = []
        for param in params:
            refuse_sparse("AdamW", param.grad)
            state = self.state[param]
            moments = [state[name] for name in (_MOMENTS if group["amsgrad"] else _MOMENTS[:2])]
            target, grad, *moments = local_tensors([param, param.grad, *moments])
            if moments[0].dtype != target.dtype or grad.dtype != target.dtype:
                wide = target.to(moments[0].dtype)
                rounded.append((target, wide))
                target, grad = wide, grad.to(wide.dtype)
            for column, tensor in zip(columns, [target, grad, *moments], strict=False):
                column.append(tensor)
        torch_adamw(
            *columns,
            [self.state[param]["step"] for param in params],
            has_complex=any(param.is_complex() for param in params),
            amsgrad=group["amsgrad"],
            beta1=number(group["betas"][0]),
            beta2=number(group["betas"][1]),
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        for target, wide in rounded:
            target.copy_(wide)


def _settings(group: dict[str, Any]) -> tuple:
    lr = group["lr"]
    beta1, beta2 = group["betas"]
    return (
        group["params"],
        number(lr),
        isinstance(lr, Tensor) and lr.dtype == torch.float32,
        number(beta1),
        number(beta2),
        group["eps"],
        number(1 - lr * group["weight_decay"]),
        group["amsgrad"],
        group["maximize"],
    )
