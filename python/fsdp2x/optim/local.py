"""Helpers of the optimizers: the plain tensors of DTensors, for torch's own functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2x.base import torch_private


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Returns the result of a step's closure, run with gradients. None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def number(value: float | Tensor) -> float:
    """Returns a setting that may be a tensor of one element as a number."""
    return value.item() if isinstance(value, Tensor) else value


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns a DTensor's plain local tensor, after a collective that may still fill it. Others stay unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    return torch_private.wait_if_async(torch_private.local_tensor(tensor))


def cut_like(whole: Tensor, local: Tensor) -> Tensor:
    """Returns ``local`` as a DTensor if ``whole`` is one, cut like it."""
    return torch_private.dtensor_like(whole, local) if isinstance(whole, DTensor) else local


def local_tensors(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Returns the local tensors of DTensors that are all cut alike, or else the tensors themselves."""
    specs = [torch_private.spec_of(t) for t in tensors if isinstance(t, DTensor)]
    if not specs or any((spec.mesh, spec.placements) != (specs[0].mesh, specs[0].placements) for spec in specs):
        return list(tensors)
    return [None if t is None else local_tensor(t) for t in tensors]


def dense_gradient(caller: str, param: Tensor) -> Tensor:
    """Returns the gradient of ``param``. Raises RuntimeError that names the function ``caller`` if it is sparse."""
    grad = param.grad
    assert grad is not None
    refuse_sparse(caller, grad)
    return grad


def refuse_sparse(caller: str, grad: Tensor) -> None:
    """Raises RuntimeError for a sparse gradient. ``caller`` is the function of fsdp2x."""
    if grad.layout is not torch.strided:
        raise RuntimeError(f"fsdp2x.{caller}: expected a gradient of layout torch.strided, got {grad.layout}")
