"""Lion in one call per step; its average of gradients belongs to the optimizer's state."""

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
    """Lion (Chen et al., 2023, arXiv 2302.06675): steps of one size, with the sign of an average of gradients.

    ``param = (1 - lr * weight_decay) * param - lr * sign(betas[0] * avg + (1 - betas[0]) * grad)``, then
    ``avg = betas[1] * avg + (1 - betas[1]) * grad``. All parameters of a step take one call, over their local shards;
    parameter groups, closures, hooks and ``state_dict`` are as torch's optimizers have them, with ``exp_avg`` for the
    average, in the dtype of its parameter.

    A kernel steps float32 parameters: on the CPU, and on CUDA devices where fsdp2x was built with kernels for them,
    with the same bits. Others are stepped by torch's operations, on the local tensors where possible; what has 16 bits
    is widened, stepped in float32 and rounded. Where the sign is that of NaN, the parameter becomes NaN.

    Args:
        params: as for ``torch.optim.AdamW``.
        lr: about a tenth of AdamW's; a number, or a tensor of one element.
        betas: decay of the average in the step's direction, and from step to step.
        weight_decay: times ``lr``; about ten times AdamW's.
        maximize: step along the gradients.
        max_grad_norm: clip the gradients of all groups together to this 2-norm within the step, as ``AdamW`` does.

    Raises:
        ValueError: settings out of range; parameters from before ``fully_shard``, or gathered ones, see ``AdamW``.
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
                f"fsdp2x.optim.Lion: lr is {number(lr)} and weight_decay {weight_decay}, expected zero or more"
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"fsdp2x.optim.Lion: betas are {betas}, expected two numbers in [0, 1)")
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
        # In 16 bits torch's operations round a vector's elements otherwise than those behind the last vector.
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
