"""What the optimizers share: the plain tensors behind DTensors for torch's own functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2x.base import torch_private


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure of a step returns, run with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def number(value: float | Tensor) -> float:
    """A setting that may be a tensor of one element."""
    return value.item() if isinstance(value, Tensor) else value


def local_tensor(tensor: Tensor) -> Tensor:
    """The plain local tensor of a DTensor, after the collective that may still be filling it; any other as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    return torch_private.wait_if_async(torch_private.local_tensor(tensor))


def cut_like(whole: Tensor, local: Tensor) -> Tensor:
    """``local`` for a tensor that is cut like ``whole``: a DTensor over it where that is one."""
    return torch_private.dtensor_like(whole, local) if isinstance(whole, DTensor) else local


def local_tensors(tensors: Sequence[Tensor | None]) -> list[Any]:
    """The local tensors of DTensors that are all cut alike; the tensors themselves when they are not."""
    specs = [torch_private.spec_of(t) for t in tensors if isinstance(t, DTensor)]
    if not specs or any((spec.mesh, spec.placements) != (specs[0].mesh, specs[0].placements) for spec in specs):
        return list(tensors)
    return [None if t is None else local_tensor(t) for t in tensors]


def dense_gradient(caller: str, param: Tensor) -> Tensor:
    """The gradient of ``param``, which has one; RuntimeError where it is sparse. ``caller``: the function of fsdp2x."""
    grad = param.grad
    assert grad is not None
    refuse_sparse(caller, grad)
    return grad


def refuse_sparse(caller: str, grad: Tensor) -> None:
    """Raises RuntimeError for a sparse gradient; ``caller``: the function of fsdp2x."""
    if grad.layout is not torch.strided:
        raise RuntimeError(f"fsdp2x.{caller}: a gradient has layout {grad.layout}, expected torch.strided")
