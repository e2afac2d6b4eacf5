"""The two autograd nodes of a unit's call, for torch.func's transforms, which follow functions of Python only.

Outside of transforms both are the engine's own. Owns no state.
"""

from __future__ import annotations

from typing import Any

import torch


def mark_inputs(call, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors`` as they are; their backward ends ``call``, a ``_C.UnitCall``."""
    return list(_EndOfBackward.apply(call, *tensors))


def mark_output(unit, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as it is; its backward begins that of ``unit``, a ``_C.Unit``."""
    return _BeginOfBackward.apply(unit, tensor)


class _EndOfBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(call, *tensors: torch.Tensor):
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.call = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        ctx.call.end()
        return None, *grads

    @staticmethod
    def jvp(ctx: Any, _, *tangents: torch.Tensor):
        return tangents


class _BeginOfBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(unit, tensor: torch.Tensor):
        return tensor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.unit = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        ctx.unit.pre_backward()
        return None, grad

    @staticmethod
    def jvp(ctx: Any, _, tangent: torch.Tensor | None):
        # The tangent may be differentiated, too.
        return None if tangent is None else _BeginOfBackward.apply(ctx.unit, tangent)
