"""Cuts a parameter: this rank's rows of it, and the sharded parameter over them. Owns nothing."""

from __future__ import annotations

import torch
from torch import nn

from fsdp2x.runtime import torch_private
from fsdp2x.runtime.extensions import is_wrapper
from fsdp2x.runtime.mesh import ShardGroup
from fsdp2x.runtime.native import _C
from fsdp2x.runtime.spec import ParamSpec


def cut(full: torch.Tensor, ranks: ShardGroup, dim: int) -> torch.Tensor:
    """This rank's rows. Of a tensor subclass with an extension: a narrow of a padded copy, as the extension expects."""
    start, sizes = ranks.rows(full.shape, dim)
    begin, num = start[dim], sizes[dim]
    if not is_wrapper(full):
        return full.narrow(dim, begin, num) if num else full.narrow(dim, 0, 0)
    _, padded_size = ranks.rows(full.shape, dim, rank=0)
    rows = full.new_zeros(padded_size).narrow(dim, 0, num)
    if num:
        rows.copy_(full.narrow(dim, begin, num))
    return rows


def parameter_over(rows: torch.Tensor, spec: ParamSpec, *, requires_grad: bool) -> nn.Parameter:
    """The sharded parameter over ``rows`` of the whole tensor.

    A DTensor takes over the storage offset of the tensor it is made from, and has an address by it that is nobody's. So
    it is made from a tensor that begins where its storage does, as the shard will in its pool.
    """
    if is_wrapper(rows):
        return spec.parameter(rows, requires_grad=requires_grad)
    if rows.is_meta:
        return spec.parameter(rows.new_empty(rows.shape), requires_grad=requires_grad)
    stand_in = _C.tensor_without_memory(list(rows.shape), rows.dtype, rows.device)
    param = spec.parameter(stand_in, requires_grad=requires_grad)
    torch_private.set_local_tensor(param, rows)
    return param
