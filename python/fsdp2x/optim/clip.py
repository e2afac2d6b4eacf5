"""Gradient clipping over local shards with one all-reduce per process group."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2x.base import torch_private
from fsdp2x.base.agreement import all_reduce_agreed, reported
from fsdp2x.base.arguments import checked
from fsdp2x.base.collectives import explained
from fsdp2x.base.native import _C
from fsdp2x.base.optimizer_hooks import refuse_unmeasured
from fsdp2x.base.processes import require_own_process
from fsdp2x.lifecycle.api import method_makers
from fsdp2x.optim.local import cut_like, dense_gradient, local_tensor, refuse_sparse


@checked
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales gradients in place so that their norm over all ranks is at most ``max_norm``. Collective.

    The norm is that of all full gradients as one vector, however they are sharded. Replicas count once. Every rank
    must call it with the same parameters. On a CUDA device the host does not wait, except with ``error_if_nonfinite``
    or if some gradients are in CPU memory.

    Args:
        parameters: a tensor or an iterable of tensors. Those without a gradient count as zero.
        max_norm: largest norm.
        norm_type: p of the p-norm, positive, or ``inf`` for the largest absolute value. The engine sums the 2-norm in
            float64 on the CPU and on CUDA devices for which fsdp2x has kernels. Otherwise torch computes it.
        error_if_nonfinite: whether to raise instead of scaling by an infinite or NaN norm.

    Returns:
        The norm before scaling, a plain tensor of shape []: float64 if a gradient is float64, else float32.

    Raises:
        ValueError: ``norm_type`` is not positive.
        RuntimeError: the norm is infinite or NaN and ``error_if_nonfinite`` is True; a gradient is sparse; parameters
            are gathered, or from before ``fully_shard``. The model's shards then have the gradients.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    refuse_unmeasured("clip_grad_norm_", params)
    norm_type = _checked_norm_type("clip_grad_norm_", float(norm_type))
    gradients, norm, factor = _measure("clip_grad_norm_", params, float(max_norm), norm_type)
    if error_if_nonfinite:
        _require_finite("clip_grad_norm_", norm, norm_type)
    _multiply(params, gradients, factor)
    return norm


def _clip_method(cls: type) -> Callable | None:
    """Returns FSDP1's method of the model, if its class has none."""

    def clip_own_grad_norm_(self: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the gradients of this module. See ``fsdp2x.clip_grad_norm_``."""
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    return None if hasattr(cls, "clip_grad_norm_") else clip_own_grad_norm_


method_makers["clip_grad_norm_"] = _clip_method


@reported("norm of gradients")
def norm_of(caller: str, tensors: list[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Returns the norm of full tensors as one vector, by torch on the local ones. Collective."""
    buckets = _buckets_of(caller, tensors, norm_type)
    norm = _root(buckets.total(local_tensor(tensors[0]).device), norm_type).to(_norm_dtype(tensors))
    if error_if_nonfinite:
        _require_finite(caller, norm, norm_type)
    return norm


def _buckets_of(caller: str, tensors: list[Tensor], norm_type: float) -> _Buckets:
    buckets = _Buckets(_checked_norm_type(caller, norm_type))
    for tensor in tensors:
        refuse_sparse(caller, tensor)
        buckets.add_gradient(tensor)
    return buckets


def _norm_dtype(tensors: list[Tensor]) -> torch.dtype:
    is_double = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)
    return torch.float64 if is_double else torch.float32


def _multiply(params: list[Tensor], gradients: _C.LocalGradients, factor: Tensor) -> None:
    """Multiplies the local gradients by ``factor`` (f64, no dimensions), in place."""
    for index in gradients.multiply(factor):
        local = local_tensor(dense_gradient("clip_grad_norm_", params[index]))
        local.mul_(factor.to(local.device))


def _checked_norm_type(caller: str, norm_type: float) -> float:
    if not norm_type > 0:
        raise ValueError(f"fsdp2x.{caller}: norm_type must be a positive number or inf, got {norm_type}")
    return norm_type


def _require_finite(caller: str, norm: Tensor, norm_type: float) -> None:
    if not torch.isfinite(norm):
        raise RuntimeError(
            f"fsdp2x.{caller}: the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot "
            "be clipped, and nothing was changed. Pass error_if_nonfinite=False to use them anyway."
        )


def _root(total: Tensor, norm_type: float) -> Tensor:
    """Returns the norm from the sum of powers or the largest value."""
    if math.isinf(norm_type):
        return total
    return total.sqrt() if norm_type == 2.0 else total.pow(1.0 / norm_type)


def check_clipping(name: str, max_grad_norm: float | None, error_if_nonfinite: bool) -> None:
    """Raises ValueError for a largest norm that is not positive, or a test of a norm that is not measured."""
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(
            f"fsdp2x.optim.{name}: max_grad_norm must be None, a positive number or inf, got {max_grad_norm}"
        )
    if error_if_nonfinite and max_grad_norm is None:
        raise ValueError(
            f"fsdp2x.optim.{name}: error_if_nonfinite needs max_grad_norm, without which the step measures no norm. "
            "Pass max_grad_norm=math.inf to measure the norm without clipping."
        )


def measure_in_step(name: str, optimizer: Any) -> Tensor | None:
    """Sets the ``grad_norm`` of ``optimizer``. Returns the factor of gradients in its step (f64), if any.

    Collective if its parameters are sharded. Neither this nor the step changes the gradients.
    """
    if optimizer.max_grad_norm is None:
        return None
    params = [param for group in optimizer.param_groups for param in group["params"]]
    _, optimizer.grad_norm, factor = _measure(f"optim.{name}", params, float(optimizer.max_grad_norm), 2.0)
    if optimizer.error_if_nonfinite:
        _require_finite(f"optim.{name}", optimizer.grad_norm, 2.0)
    return factor


def scaled(grad: Tensor, factor: Tensor | None) -> Tensor:
    """Returns ``grad`` times ``factor``, if there is one, for functions of torch."""
    if factor is None:
        return grad
    local = local_tensor(grad)
    return cut_like(grad, local * factor.to(local.device))


@reported("norm of gradients")
def _measure(
    caller: str, params: list[Tensor], max_norm: float, norm_type: float
) -> tuple[_C.LocalGradients, Tensor, Tensor]:
    """Returns local gradients, their norm over all ranks (see ``clip_grad_norm_``), and the clipping factor in f64."""
    on_device = _kernels_for(params)
    gradients = _C.LocalGradients(params, on_device)
    buckets = _Buckets(norm_type)
    if norm_type == 2.0:
        on_host, sums, left_over = gradients.sum_squares(buckets.index)
        for total in (on_host, () if sums is None else sums):
            for index, term in enumerate(total):
                buckets.add(index, term)
        slow = [params[i] for i in left_over]
    else:
        for param in params:
            tensor = param if param.grad is None else param.grad
            if isinstance(tensor, DTensor):
                buckets.index(torch_private.spec_of(tensor))
        slow = [param for param in params if param.grad is not None]
    for param in slow:
        buckets.add_gradient(dense_gradient(caller, param))
    device = gradients.device or (params[0].device if params else torch.device("cpu"))
    total = buckets.total(device)
    dtype = torch.float64 if gradients.any_double else torch.float32
    if norm_type == 2.0 and on_device.serves(device):
        norm, factor = on_device.clip_numbers(total, max_norm, dtype is torch.float64)
    else:
        norm = _root(total, norm_type).to(dtype)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).double()
    return gradients, norm, factor


# Objects of a device's kernels for the parameters that were clipped together, keyed by the first and freed with it. A
# DTensor is keyed by its local tensor, since `model.to()` cannot exchange a tensor that has a weak reference.
_kept = WeakIdKeyDictionary()


def _kernels_for(params: list[Tensor]) -> _C.DeviceClip:
    if not params:
        return _C.DeviceClip()
    first = local_tensor(params[0])
    if first not in _kept:
        _kept[first] = _C.DeviceClip()
    return _kept[first]


class _Buckets:
    """Sums of powers, one for each set of process groups over which it must still be reduced."""

    def __init__(self, norm_type: float) -> None:
        self._norm_type = norm_type
        self._groups: list[list[dist.ProcessGroup]] = []
        self._sums: list[list[float | Tensor]] = []
        self._mesh_device: str | None = None

    def index(self, spec: torch_private.DTensorSpec | None) -> int:
        """Returns the bucket of gradients with this spec, or -1 if they must be redistributed first."""
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
        grad = grad.abs() if grad.is_complex() else grad
        if math.isinf(self._norm_type):
            self.add(index, grad.abs().max().double())
        else:
            power = torch.linalg.vector_norm(grad, self._norm_type, dtype=torch.float64)
            self.add(index, power.pow(self._norm_type))

    def of_this_rank(self, device: torch.device) -> Tensor:
        """Returns each bucket of this rank alone, in f64."""
        merged = torch.zeros(len(self._groups), dtype=torch.float64, device=device)
        for row, terms in zip(merged, self._sums, strict=True):
            for term in terms:
                here: Any = term.to(device) if isinstance(term, Tensor) else term
                if math.isinf(self._norm_type):
                    torch.maximum(row, here, out=row)
                else:
                    row.add_(here)
        return merged

    def total(self, device: torch.device) -> Tensor:
        """Reduces every bucket over its groups, and the buckets to one number. Collective."""
        if len(self._groups) == 0:
            return torch.zeros((), dtype=torch.float64, device=device)
        largest = math.isinf(self._norm_type)
        merged = self.of_this_rank(device)
        # Each bucket is a separate view, because a list of indices would have to be copied to the device first.
        rows = list(merged)
        order: list[dist.ProcessGroup] = []
        for groups in self._groups:
            order.extend(group for group in groups if group not in order)
        require_own_process("clip gradients with the other ranks")
        for group in order:
            reduced = [row for row, groups in zip(rows, self._groups, strict=True) if group in groups]
            # Offloaded gradients are on the CPU, and their ranks may only be able to communicate on the device.
            part = torch.stack(reduced).to(device if device.type == self._mesh_device else self._mesh_device)
            part = _split_nan(part) if largest else part
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            with explained(group, "norm of gradients"):
                all_reduce_agreed(group, part, op, "sums the norm of gradients")
            part = _join_nan(part) if largest else part
            for row, value in zip(reduced, part, strict=True):
                row.copy_(value)
        return merged.max() if largest else merged.sum()


def replacements() -> list[tuple[Callable, Callable]]:
    """Returns functions of ``torch.nn.utils`` and replacements. torch's ``clip_grad_norm_`` calls the first two."""
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
        return theirs([_largest(tensors, norm_type)], norm_type, error_if_nonfinite, foreach)
    norm = norm_of("get_total_norm", tensors, norm_type, error_if_nonfinite)
    # A DTensor, like that of gradients that are all sharded, because callers may call its full_tensor().
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
    refuse_unmeasured("clip_grads_with_norm_", params)
    # A plain norm of no dimensions multiplies gradients of any mesh.
    others = [total_norm] if isinstance(total_norm, DTensor) else []
    if not _is_mixed([*_gradients(params), *others]):
        return theirs(params, max_norm, total_norm, foreach)
    norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0).double()
    _multiply(params, _C.LocalGradients(params, _kernels_for(params)), factor)


@torch.no_grad()
def _clip_grad_value(
    theirs: Callable, parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None
) -> None:
    params = _listed(parameters)
    refuse_unmeasured("clip_grad_value_", params)
    gradients = _gradients(params)
    if not _is_mixed(gradients):
        return theirs(params, clip_value, foreach)
    for grad in gradients:
        local_tensor(grad).clamp_(-float(clip_value), float(clip_value))


def _listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _gradients(params: list[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _largest(tensors: list[Tensor], norm_type: float) -> DTensor:
    """Returns the largest absolute value of ``tensors`` of one mesh, on every rank. Collective. Empty shards are 0."""
    require_own_process("clip gradients with the other ranks")
    mesh = cast("DTensor", tensors[0]).device_mesh
    buckets = _buckets_of("get_total_norm", tensors, norm_type)
    largest = buckets.of_this_rank(torch.device(mesh.device_type)).max().to(_norm_dtype(tensors))
    # One functional all-reduce for each axis, which tools that count collectives see.
    replicated = [Replicate()] * mesh.ndim
    partial = DTensor.from_local(_split_nan(largest), mesh, [Partial("max")] * mesh.ndim, run_check=False)
    whole = local_tensor(partial.redistribute(placements=replicated))
    return DTensor.from_local(_join_nan(whole), mesh, replicated, run_check=False)


def _split_nan(values: Tensor) -> Tensor:
    """Returns ``values`` with zeros for NaN, and a flag for each NaN, which an all-reduce of maxima may drop."""
    return torch.stack([values.masked_fill(values.isnan(), 0.0), values.isnan().to(values.dtype)])


def _join_nan(pair: Tensor) -> Tensor:
    return pair[0].masked_fill(pair[1] > 0, math.nan)


def _is_mixed(tensors: list[Tensor]) -> bool:
    return len({tensor.device_mesh if isinstance(tensor, DTensor) else None for tensor in tensors}) > 1
