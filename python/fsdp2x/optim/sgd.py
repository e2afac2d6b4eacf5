"""SGD with momentum in one call per step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd as torch_sgd

from fsdp2x.base.arguments import checked
from fsdp2x.base.native import _C
from fsdp2x.optim.clip import scaled
from fsdp2x.optim.engine_step import EngineStep
from fsdp2x.optim.local import cut_like, dense_gradient, local_tensors, number


class SGD(EngineStep, torch.optim.SGD):
    """Steps like ``torch.optim.SGD``, with all parameters in one call over their local shards.

    Arguments, parameter groups, closures and ``state_dict`` are torch's. A kernel steps float32 parameters on the CPU
    and, if fsdp2x was built for them, on CUDA devices. Its bits are those of torch on processors with fused
    multiply-add (otherwise within 1e-6). torch steps others.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: see ``torch.optim.SGD``. ``lr`` and
            ``weight_decay`` may be tensors of one element.
        foreach, fused: accepted for compatibility, without effect.
        differentiable: must be False.
        max_grad_norm: largest 2-norm of all gradients together. See ``AdamW``.

    Raises:
        NotImplementedError: ``differentiable`` is set.
        ValueError: a setting is out of range, or parameters are from before ``fully_shard`` or gathered.
    """

    _name = "SGD"

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._prepare({"differentiable": differentiable}, max_grad_norm)
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize)

    def step_scaled(self, grad_scale: Tensor | None) -> None:
        settings = [
            (
                group["params"],
                number(group["lr"]),
                group["momentum"],
                group["dampening"],
                number(group["weight_decay"]),
                group["nesterov"],
                group["maximize"],
            )
            for group in self.param_groups
        ]
        left_over = _C.sgd_step(settings, self.state, self._make_buffer, self._on_device, grad_scale)
        for group, params in self._left_to_torch(left_over):
            self._step_by_torch(group, params, grad_scale)

    def _make_buffer(self, group: int, index: int) -> None:
        param = self.param_groups[group]["params"][index]
        self.state[param]["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def _step_by_torch(self, group: dict[str, Any], params: list[Tensor], grad_scale: Tensor | None) -> None:
        targets, grads, buffers = [], [], []
        for param in params:
            gradient = dense_gradient("optim.SGD", param)
            buffer = self.state[param].get("momentum_buffer") if group["momentum"] != 0 else None
            target, grad, local = local_tensors([param, scaled(gradient, grad_scale), buffer])
            targets.append(target)
            grads.append(grad)
            buffers.append(local)
        had = [buffer is not None for buffer in buffers]
        torch_sgd(
            targets,
            grads,
            buffers,
            weight_decay=number(group["weight_decay"]),
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if group["momentum"] == 0:
            return
        for param, target, buffer, existed in zip(params, targets, buffers, had, strict=True):
            if not existed:  # torch made it from the gradient
                self.state[param]["momentum_buffer"] = buffer if target is param else cut_like(param, buffer)
