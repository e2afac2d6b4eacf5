"""Gradient clipping over local shards with one all-reduce per process group."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fsdp2x.optim.local import local_tensor
from fsdp2x.runtime import torch_private
from fsdp2x.runtime.native import _C


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales gradients in place so that their norm over all ranks is at most ``max_norm``; returns the norm before.

    The norm is that of all whole gradients as one vector, however they are sharded: over several mesh axes, over
    different meshes, or not at all. What ranks hold in common is counted once. One all-reduce per process group.
    Collective: every rank must call it, with the same parameters.

    Args:
        parameters: a tensor or an iterable of tensors; those without a gradient count as zero.
        max_norm: the largest norm.
        norm_type: p of the p-norm, positive; ``inf`` for the largest absolute value. The norm of 2 is summed in float64
            by the engine, on the CPU; others, and other devices, use torch on the local tensors.
        error_if_nonfinite: raise instead of scaling by a norm that is infinite or NaN.

    Returns:
        A plain tensor of no dimensions: float64 if a gradient is float64, else float32.

    Raises:
        ValueError: ``norm_type`` is not positive.
        RuntimeError: the norm is infinite or NaN and ``error_if_nonfinite`` is True.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"fsdp2x.clip_grad_norm_: norm_type is {norm_type}, expected a positive number or inf")
    gradients = _C.LocalGradients(params)
    buckets = _Buckets(norm_type)
    if norm_type == 2.0:
        sums, left_over = gradients.sum_squares(buckets.index)
        for index, total in enumerate(sums):
            buckets.add(index, total)
        slow = [params[i].grad for i in left_over]
    else:
        for param in params:
            tensor = param if param.grad is None else param.grad
            if isinstance(tensor, DTensor):
                buckets.index(torch_private.spec_of(tensor))
        slow = [param.grad for param in params if param.grad is not None]
    for grad in slow:
        buckets.add_gradient(grad)
    device = gradients.device or (params[0].device if params else torch.device("cpu"))
    total = buckets.total(device)
    norm = total if math.isinf(norm_type) else total.pow(1.0 / norm_type) if norm_type != 2.0 else total.sqrt()
    norm = norm.to(torch.float64 if gradients.any_double else torch.float32)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"fsdp2x.clip_grad_norm_: the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot "
            "be clipped; pass error_if_nonfinite=False to scale them by it anyway"
        )
    _multiply(params, gradients, torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))
    return norm


def _multiply(params: list[Tensor], gradients: _C.LocalGradients, factor: Tensor) -> None:
    if factor.device.type != "cpu":
        slow = [param.grad for param in params if param.grad is not None]
    else:
        value = factor.item()
        if value == 1.0:
            return
        slow = [params[i].grad for i in gradients.multiply(value)]
    for grad in slow:
        local = local_tensor(grad) if isinstance(grad, DTensor) else grad
        local.mul_(factor.to(local.device))


class _Buckets:
    """Sums of powers, one for each set of process groups that a sum has yet to be reduced over."""

    def __init__(self, norm_type: float) -> None:
        self._norm_type = norm_type
        self._groups: list[list[dist.ProcessGroup]] = []
        self._sums: list[list[float | Tensor]] = []
        self._mesh_device: str | None = None

    def index(self, spec: torch_private.DTensorSpec | None) -> int:
        """The bucket of gradients with this spec; -1 when they must be redistributed first."""
        groups = []
        if spec is not None:
            if any(isinstance(placement, Partial) for placement in spec.placements):
                return -1
            self._mesh_device = spec.mesh.device_type
            groups = [
                spec.mesh.get_group(axis)
                for axis, placement in enumerate(spec.placements)
                if isinstance(placement, (Shard, torch_private.StridedShard)) and spec.mesh.size(axis) > 1
            ]
        if groups not in self._groups:
            self._groups.append(groups)
            self._sums.append([])
        return self._groups.index(groups)

    def add(self, index: int, total: float | Tensor) -> None:
        self._sums[index].append(total)

    def add_gradient(self, grad: Tensor) -> None:
        if isinstance(grad, DTensor):
            whole = [Replicate() if isinstance(placement, Partial) else placement for placement in grad.placements]
            if whole != list(grad.placements):
                grad = grad.redistribute(placements=whole)
            index = self.index(torch_private.spec_of(grad))
            grad = local_tensor(grad)
        else:
            index = self.index(None)
        if grad.numel() == 0:
            return
        if math.isinf(self._norm_type):
            self.add(index, grad.abs().max().double())
        else:
            power = torch.linalg.vector_norm(grad, self._norm_type, dtype=torch.float64)
            self.add(index, power.pow(self._norm_type))

    def total(self, device: torch.device) -> Tensor:
        """Reduces every bucket over its groups, and the buckets to one number. Collective."""
        largest = math.isinf(self._norm_type)
        merged = torch.zeros(len(self._groups), dtype=torch.float64, device=device)
        for index, terms in enumerate(self._sums):
            for term in terms:
                if largest:
                    merged[index] = torch.maximum(merged[index], torch.as_tensor(term, device=device))
                else:
                    merged[index] += term
        order: list[dist.ProcessGroup] = []
        for groups in self._groups:
            order.extend(group for group in groups if group not in order)
        for group in order:
            rows = [index for index, groups in enumerate(self._groups) if group in groups]
            # Gradients that are offloaded lie on the host, and their ranks may only talk on the device.
            part = merged[rows].to(device if device.type == self._mesh_device else self._mesh_device)
            dist.all_reduce(part, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
            merged[rows] = part.to(device)
        if len(self._groups) == 0:
            return torch.zeros((), dtype=torch.float64, device=device)
        return merged.max() if largest else merged.sum()
