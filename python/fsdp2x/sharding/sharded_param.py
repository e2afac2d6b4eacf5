"""One parameter of a group: cut into rows, sharded as modules register it between forwards, and gathered."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2x.base import torch_private
from fsdp2x.base.annotations import ATTRIBUTES
from fsdp2x.base.native import _C
from fsdp2x.base.optimizer_hooks import MARKS, mark_gathered
from fsdp2x.sharding.collect import Owners
from fsdp2x.sharding.extensions import Extension, is_wrapper
from fsdp2x.sharding.mesh import ShardGroup
from fsdp2x.sharding.offload import MARK
from fsdp2x.sharding.shapes import ParamFacts
from fsdp2x.sharding.spec import ParamSpec
from fsdp2x.sharding.upstream_names import ParamNames

# What DTensor, spmd_types and we keep on parameters.
_NOT_THE_USERS = ("_local_tensor", "_spec", "_is_param", *ATTRIBUTES, *MARKS, MARK)


@dataclass
class ShardedParam(ParamNames):
    """One parameter after sharding. ``param``, over a DTensor, is what modules register while the unit is sharded."""

    param: nn.Parameter
    owners: Owners
    spec: ParamSpec
    local_size: torch.Size  # of the unsharded local tensor: the parameter's, or its tensor-parallel part
    attributes: dict  # what users hung on the parameter (weight-decay flags and the like), kept visible
    keeps_dtype: bool  # computes in its original dtype, whatever the policy says
    is_wrapper: bool  # the shard is a tensor subclass that keeps its own storages
    original: int = 0  # number of the original parameter, to find one that two units claim
    extension: Extension | None = None
    is_alias: bool = False  # registered by another group too, in whose pool it lies
    storage: torch.UntypedStorage | None = None  # of the local tensor, as it was put into the pool
    fqn: str = ""
    shown: dict = field(default_factory=dict)  # weak references to the pending gradients that users were given

    @property
    def facts(self) -> ParamFacts:
        """What the layout of its group is made from."""
        return ParamFacts(
            self.fqn, self.local_size, self.spec.shard_dim, self.param.dtype, self.keeps_dtype, self.is_wrapper
        )

    def was_moved(self, local: torch.Tensor) -> bool:
        """Whether ``local`` still has the storage that was put into the pool, wherever its memory is by now.

        ``share_memory_()`` and queues of ``torch.multiprocessing`` give a storage other memory, which belongs to other
        processes, too: it stays there, and the engine copies it into the pool before it gathers.
        """
        return self.storage is not None and local.untyped_storage()._cdata == self.storage._cdata

    def gathered_dtype(self, shape: _C.ParamShape) -> torch.dtype:
        """Of the gathered parameter; ``shape`` is what the engine's layout wants of it."""
        return self.param.dtype if self.param.is_complex() else shape.compute


def user_attributes(param: nn.Parameter) -> dict:
    """What users hung on a parameter."""
    return {key: value for key, value in param.__dict__.items() if key not in _NOT_THE_USERS}


def unsharded_parameter(sharded: ShardedParam, tensor: torch.Tensor) -> nn.Parameter:
    """The parameter modules see while the unit is unsharded."""
    unsharded = nn.Parameter(tensor, requires_grad=sharded.param.requires_grad)
    unsharded.__dict__.update(sharded.attributes)
    mark_gathered(unsharded, sharded.original, sharded.fqn or sharded.owners[0][1])
    if unsharded.is_floating_point():
        unsharded.grad_dtype = None  # gradients arrive in the dtype autograd made them in
    if sharded.spec.annotation is not None:
        sharded.spec.annotation.apply(unsharded)
    return unsharded


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


def is_sharded(param: Any) -> bool:
    """Whether a module registers a sharded parameter there."""
    return isinstance(param, DTensor) and isinstance(param, nn.Parameter)


def tie_again(sharded: ShardedParam, before: nn.Parameter) -> None:
    """Registers the parameter of the first owner with the others, too; ``before``: the one they had in common.

    Warns where another owner was given other values, which are dropped.
    """
    for module, name in sharded.owners[1:]:
        other = module._parameters.get(name)
        if not is_sharded(other) or other is sharded.param:
            continue
        if other is not before and _differ(other, sharded.param):
            first = sharded.fqn or sharded.owners[0][1]
            warnings.warn(
                f"fsdp2x: {type(module).__name__}.{name} is tied to '{first}' and was given other values: those of "
                "the first one are used for both",
                stacklevel=2,
            )
        module._parameters[name] = sharded.param


def _differ(one: nn.Parameter, other: nn.Parameter) -> bool:
    """Whether this rank's rows have other values; on the meta device there are none."""
    rows, others = torch_private.local_tensor(one), torch_private.local_tensor(other)
    return not (rows.is_meta or others.is_meta or (rows.shape == others.shape and torch.equal(rows, others)))
