"""torch's gradient clipping over gradients that its operators refuse together: of several meshes, or sharded and plain.

``install()`` puts these functions in place of torch's. Gradients of one mesh, and plain ones alone, go to torch's own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from fsdp2x.optim.clip import multiply_gradients, norm_of
from fsdp2x.optim.local import local_tensor


def replacements() -> list[tuple[Callable, Callable]]:
    """Functions of ``torch.nn.utils`` and what takes their place; torch's ``clip_grad_norm_`` calls the first two."""
    utils = torch.nn.utils
    pairs: tuple[tuple[Callable, Callable], ...] = (
        (utils.get_total_norm, _get_total_norm),
        (utils.clip_grads_with_norm_, _clip_grads_with_norm),
        (utils.clip_grad_value_, _clip_grad_value),
    )
    return [(theirs, functools.wraps(theirs)(functools.partial(ours, theirs))) for theirs, ours in pairs]


@torch.no_grad()
def _get_total_norm(
    theirs: Callable,
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    tensors = _listed(tensors)
    norm_type = float(norm_type)
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    if not _is_mixed(tensors):
        if not meshes or not math.isinf(norm_type):
            return theirs(tensors, norm_type, error_if_nonfinite, foreach)
        # torch's operators raise for an empty shard, and return the largest value of this rank's shards only.
        return theirs([_largest(cast("list[DTensor]", tensors))], norm_type, error_if_nonfinite, foreach)
    norm = norm_of("get_total_norm", tensors, norm_type, error_if_nonfinite)
    # A DTensor, as that of gradients which are all sharded: callers may ask it for its full_tensor().
    norm = norm.to(meshes[0].device_type)
    return DTensor.from_local(norm, meshes[0], [Replicate()] * meshes[0].ndim, run_check=False)


@torch.no_grad()
def _clip_grads_with_norm(
    theirs: Callable,
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    params = _listed(parameters)
    # A plain norm of no dimensions multiplies gradients of any mesh.
    others = [total_norm] if isinstance(total_norm, DTensor) else []
    if not _is_mixed([*_gradients(params), *others]):
        return theirs(params, max_norm, total_norm, foreach)
    norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
    multiply_gradients(params, torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0).double())


@torch.no_grad()
def _clip_grad_value(
    theirs: Callable, parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    params = _listed(parameters)
    gradients = _gradients(params)
    if not _is_mixed(gradients):
        return theirs(params, clip_value, foreach)
    for grad in gradients:
        local_tensor(grad).clamp_(-float(clip_value), float(clip_value))


def _listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _gradients(params: list[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _largest(tensors: list[DTensor]) -> DTensor:
    """The largest absolute value of ``tensors`` of one mesh, on every rank. An empty shard counts as 0. Collective."""
    mesh = tensors[0].device_mesh
    values = [torch.zeros((), device=mesh.device_type)]
    for tensor in tensors:
        is_partial = any(placement.is_partial() for placement in tensor.placements)
        part = tensor.full_tensor() if is_partial else local_tensor(tensor)
        if part.numel() > 0:
            values.append(part.abs().max().to(mesh.device_type))
    dtype = functools.reduce(torch.promote_types, [value.dtype for value in values])
    largest = torch.stack([value.to(dtype) for value in values]).max()
    # As one functional all-reduce for each axis, which tools that count collectives see.
    partial = DTensor.from_local(largest, mesh, [Partial("max")] * mesh.ndim, run_check=False)
    return partial.redistribute(placements=[Replicate()] * mesh.ndim)


def _is_mixed(tensors: list[Tensor]) -> bool:
    return len({tensor.device_mesh if isinstance(tensor, DTensor) else None for tensor in tensors}) > 1
