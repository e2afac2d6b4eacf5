"""Lion in one call per step. Its average of gradients belongs to the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fsdp2x.base.arguments import checked
from fsdp2x.base.native import _C
from fsdp2x.optim.clip import scaled
from fsdp2x.optim.engine_step import EngineStep
from fsdp2x.optim.local import dense_gradient, local_tensors, number

_SIXTEEN_BITS = {torch.bfloat16, torch.float16}


class Lion(EngineStep):
    """Steps of one size in the direction of an average gradient's sign (Lion, Chen et al., 2023, arXiv 2302.06675).

    ``param = (1 - lr * weight_decay) * param - lr * sign(betas[0] * avg + (1 - betas[0]) * grad)``, then
    ``avg = betas[1] * avg + (1 - betas[1]) * grad``. One call steps all parameters over their local shards. Parameter
    groups, closures, hooks and ``state_dict`` are torch's, with ``exp_avg`` for the average in its parameter's dtype.

    A kernel steps float32 parameters on the CPU and, if fsdp2x was built for them, on CUDA devices, with the same bits.
    torch steps others; 16-bit values are updated in float32 and rounded back. If the sign is NaN, the parameter becomes
    NaN.

    Args:
        params: see ``torch.optim.AdamW``.
        lr: learning rate, about a tenth of AdamW's, as a number or a tensor of one element.
        betas: decay of the average in the step's direction, and from step to step.
        weight_decay: factor of ``lr``, about ten times AdamW's.
        maximize: whether to step along the gradients.
        max_grad_norm: largest 2-norm of all gradients together. See ``AdamW``.

    Raises:
        ValueError: a setting is out of range, or parameters are from before ``fully_shard`` or gathered.
    """

    _name = "Lion"

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        if number(lr) < 0 or weight_decay < 0:
            raise ValueError(
                f"fsdp2x.optim.Lion: lr and weight_decay must be at least 0, got {number(lr)} and {weight_decay}"
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"fsdp2x.optim.Lion: betas must be two numbers in [0, 1), got {betas}")
        self._prepare({}, max_grad_norm)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    def step_scaled(self, grad_scale: Tensor | None) -> None:
        settings = [_settings(group) for group in self.param_groups]
        left_over = _C.lion_step(settings, self.state, self._make_average, self._on_device, grad_scale)
        for group, params in self._left_to_torch(left_over):
            for param in params:
                self._step_by_torch(group, param, grad_scale)

    def _make_average(self, group: int, index: int) -> None:
        self._average_of(self.param_groups[group]["params"][index])

    def _average_of(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state["exp_avg"]

    def _step_by_torch(self, group: dict[str, Any], param: Tensor, grad_scale: Tensor | None) -> None:
        gradient = dense_gradient("optim.Lion", param)
        stored = local_tensors([param, scaled(gradient, grad_scale), self._average_of(param)])
        # In 16 bits torch's operations round elements of a vector differently from those after the last vector.
        target, grad, average = (tensor.float() if tensor.dtype in _SIXTEEN_BITS else tensor for tensor in stored)
        grad = -grad if group["maximize"] else grad
        beta1, beta2 = group["betas"]
        lr = number(group["lr"])
        direction = (average * beta1).add_(grad, alpha=1 - beta1)
        direction = torch.where(direction.isnan(), direction, direction.sign())
        target.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
        average.mul_(beta2).add_(grad, alpha=1 - beta2)
        for tensor, wide in ((stored[0], target), (stored[2], average)):
            if wide is not tensor:
                tensor.copy_(wide)


def _settings(group: dict[str, Any]) -> tuple:
    lr = number(group["lr"])
    return group["params"], lr, *group["betas"], 1 - lr * group["weight_decay"], group["maximize"]
