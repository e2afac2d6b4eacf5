"""What tensors moments are, where they lie, and where the elements of a local shard lie in the whole parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2x.base import torch_private
from fsdp2x.base.native import _C
from fsdp2x.optim.local import cut_like, local_tensor

INT8 = "int8"  # stands for a dtype: codes in 8 bits with a scale for each block of them
CODES, SCALES = "_codes", "_scales"  # behind the name of a moment


_NARROWED = {torch.float32, torch.bfloat16, torch.float16}  # parameters whose moments may be of another dtype


def moments_dtype_of(dtype: torch.dtype, wanted: torch.dtype | str | None) -> torch.dtype | str:
    """What the moments of a parameter of ``dtype`` are kept in, with ``moments_dtype=wanted``."""
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
    """The tensors of a parameter's moments, in the order of ``names``."""
    if dtype != INT8:
        return [MomentTensor(name, _plain(dtype)) for name in names]
    num_blocks = _C.num_moment_blocks(local_tensor(param).numel())
    return [
        piece
        for name in names
        for piece in (MomentTensor(name + CODES, torch.uint8), MomentTensor(name + SCALES, torch.float32, num_blocks))
    ]


def moment_bytes(numel: int, dtype: torch.dtype | str) -> list[int]:
    """Bytes of each tensor of a moment of so many elements."""
    if dtype != INT8:
        return [numel * _plain(dtype).itemsize]
    return [numel, _C.num_moment_blocks(numel) * torch.float32.itemsize]


def new_pieces(params_and_pieces: Sequence[tuple[Tensor, MomentTensor]]) -> list[Tensor]:
    """Zeros for each piece of a parameter."""
    pairs = []
    for param, piece in params_and_pieces:
        if piece.numel is None:
            pairs.append((param, piece.dtype))
        else:
            pairs.append((torch.empty(piece.numel, dtype=piece.dtype, device=param.device), piece.dtype))
    return zeros_like_all(pairs)


def zeros_like_all(pairs: Iterable[tuple[Tensor, torch.dtype]]) -> list[Tensor]:
    """Zeros shaped and cut like each tensor, in the dtype given with it.

    Those whose local tensor is contiguous and on the CPU share one block of memory, each with a storage of its own, so
    that saving or copying one of them does not take the others along.
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


def place_in_whole(param: Tensor) -> tuple[int, int, int]:
    """(first, run, stride): local element i is number ``first + i // run * stride + i % run`` of the whole.

    What several ranks hold in common has the same numbers on all of them.

    Raises:
        NotImplementedError: a parameter cut along so many dims that its elements follow no such rule.
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
            f"fsdp2x.optim.AdamW: stochastic_rounding with a parameter of shape {tuple(whole)} cut along dims {cut}; "
            "cut it along dim 0 and one other at most, or pass stochastic_rounding=False"
        )
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    first = sum(at * stride for at, stride in zip(offset, strides, strict=True))
    return first, math.prod(local[last:]), math.prod(whole[last:])
