"""Describes moments of an optimizer: their tensors, their 8-bit codes, and where shards are in the full parameter.

A state in 8 bits holds ``exp_avg_codes`` and ``exp_avg_scales`` in place of ``exp_avg``. The codes are sharded like
their parameter. The scales are a plain tensor, with a scale for each 256 local elements. Decoding and encoding again
gives the same codes at the same world size. At another one, blocks begin elsewhere and values are rounded again.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import with_memory
from fsdp2x.base.native import _C
from fsdp2x.optim.local import cut_like, local_tensor

INT8 = "int8"  # in place of a dtype: codes in 8 bits with a scale for each block of them
CODES, SCALES = "_codes", "_scales"  # suffixes of a moment's name


_NARROWED = {torch.float32, torch.bfloat16, torch.float16}  # parameters whose moments may have another dtype


def moments_dtype_of(dtype: torch.dtype, wanted: torch.dtype | str | None) -> torch.dtype | str:
    """Returns the dtype of the moments of a parameter of ``dtype``, with ``moments_dtype=wanted``."""
    return dtype if wanted is None or dtype not in _NARROWED else wanted


@dataclass(frozen=True)
class MomentTensor:
    """One tensor of a moment in a parameter's state."""

    name: str
    dtype: torch.dtype
    numel: int | None = None  # of a plain tensor; None: it is shaped and cut like its parameter


def _plain(dtype: torch.dtype | str) -> torch.dtype:
    assert isinstance(dtype, torch.dtype), "INT8 is the only string"
    return dtype


def pieces(param: Tensor, names: Sequence[str], dtype: torch.dtype | str) -> list[MomentTensor]:
    """Returns the tensors of a parameter's moments, in the order of ``names``."""
    if dtype != INT8:
        return [MomentTensor(name, _plain(dtype)) for name in names]
    num_blocks = _C.num_moment_blocks(local_tensor(param).numel())
    return [
        piece
        for name in names
        for piece in (MomentTensor(name + CODES, torch.uint8), MomentTensor(name + SCALES, torch.float32, num_blocks))
    ]


def moment_bytes(numel: int, dtype: torch.dtype | str) -> list[int]:
    """Returns the bytes of each tensor of a moment of ``numel`` elements."""
    if dtype != INT8:
        return [numel * _plain(dtype).itemsize]
    return [numel, _C.num_moment_blocks(numel) * torch.float32.itemsize]


def new_pieces(params_and_pieces: Sequence[tuple[Tensor, MomentTensor]]) -> list[Tensor]:
    """Returns zeros for each piece of a parameter."""
    pairs = []
    for param, piece in params_and_pieces:
        if piece.numel is None:
            pairs.append((param, piece.dtype))
        else:
            pairs.append((torch.empty(piece.numel, dtype=piece.dtype, device=param.device), piece.dtype))
    return zeros_like_all(pairs)


def zeros_like_all(pairs: Iterable[tuple[Tensor, torch.dtype]]) -> list[Tensor]:
    """Returns zeros shaped and cut like each tensor, in the dtype given with it.

    Those whose local tensor is contiguous and on the CPU share one block of memory. Each has a separate storage, so
    saving or copying one of them does not include the others.
    """
    pairs = list(pairs)
    locals_ = [local_tensor(tensor) for tensor, _ in pairs]
    pooled = [
        type(local) in (Tensor, torch.nn.Parameter)
        and local.device.type == "cpu"
        and local.layout is torch.strided
        and local.is_contiguous()
        for local in locals_
    ]
    rows = zip(locals_, pairs, pooled, strict=True)
    zeros = iter(_C.pooled_zeros([(list(local.shape), dtype) for local, (_, dtype), is_pooled in rows if is_pooled]))
    result = []
    for (tensor, dtype), is_pooled in zip(pairs, pooled, strict=True):
        if not is_pooled:
            result.append(torch.zeros_like(tensor, memory_format=torch.preserve_format, dtype=dtype))
        else:
            result.append(cut_like(tensor, next(zeros)))
    return result


@with_memory()
def place_in_whole(param: Tensor) -> tuple[int, int, int]:
    """Returns (first, run, stride): local element i is number ``first + i // run * stride + i % run`` of the full one.

    Copies on several ranks have the same numbers on all of them.
    """
    if not isinstance(param, DTensor):
        return 0, max(param.numel(), 1), 0
    whole = param.shape
    local, offset = torch_private.local_shape_and_offset(whole, param.device_mesh, param.placements)
    cut = [dim for dim, size in enumerate(whole) if local[dim] != size]
    if not cut or 0 in local:
        return 0, max(math.prod(local), 1), 0
    last = cut[-1]
    if any(0 < dim < last for dim in cut):
        raise NotImplementedError(
            f"fsdp2x.optim.AdamW: stochastic_rounding with a parameter of shape {tuple(whole)} cut along dims {cut}. "
            "Cut it along dim 0 and at most one other, or pass stochastic_rounding=False."
        )
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    first = sum(at * stride for at, stride in zip(offset, strides, strict=True))
    return first, math.prod(local[last:]), math.prod(whole[last:])


_SIGNED = {"exp_avg"}


def widened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state with float32 values in place of codes and scales, or the same object without codes."""
    result: dict[str, Any] = {}
    for key, value in state.items():
        if key.endswith(CODES):
            name = key.removesuffix(CODES)
            result[name] = _decoded(value, state[name + SCALES], name in _SIGNED)
        elif not (key.endswith(SCALES) and key.removesuffix(SCALES) + CODES in state):
            result[key] = value
    return result


@contextlib.contextmanager
def widened_states(optimizer: Any) -> Iterator[None]:
    """Gives states of ``optimizer`` float32 values in place of codes and scales inside the block, if it keeps those."""
    if optimizer.moments_dtype != INT8:
        yield
        return
    narrow = optimizer.state
    optimizer.state = defaultdict(dict, {param: widened(state) for param, state in narrow.items()})
    try:
        yield
    finally:
        optimizer.state = narrow


def narrowed(param: Tensor, state: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the state with codes and scales in place of the values under ``names``, if it has them."""
    result: dict[str, Any] = {}
    for key, value in state.items():
        if key in names:
            result[key + CODES], result[key + SCALES] = _encoded(param, key, value)
        else:
            result[key] = value
    return result


def _decoded(codes: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    local = local_tensor(codes)
    return cut_like(codes, _C.decode_moments(local.cpu(), scales.cpu(), is_signed).to(local.device))


@torch.no_grad()
def _encoded(param: Tensor, name: str, value: Tensor) -> tuple[Tensor, Tensor]:
    own = local_tensor(param).detach()
    if isinstance(value, DTensor) and isinstance(param, DTensor) and value.placements != param.placements:
        value = value.redistribute(param.device_mesh, param.placements)
    local = local_tensor(value)
    if local.shape != own.shape:
        raise ValueError(
            f"fsdp2x.optim.AdamW: expected local shape {tuple(own.shape)} of {name} of a parameter of shape "
            f"{tuple(param.shape)}, got {tuple(local.shape)}. Load a state that is cut like the parameter."
        )
    values = torch.empty_like(own, dtype=torch.float32, device="cpu").copy_(local)
    codes, scales = _C.encode_moments(values, name in _SIGNED)
    return cut_like(param, codes.to(own.device)), scales.to(own.device)
