"""One parameter of a group: cut into rows, registered as a shard between forwards, and gathered for compute."""

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
from fsdp2x.sharding.shapes import PARTS, REDUCIBLE, ParamFacts
from fsdp2x.sharding.spec import ParamSpec
from fsdp2x.sharding.upstream_names import ParamNames

# Attributes that DTensor, spmd_types and fsdp2x keep on parameters.
_NOT_THE_USERS = ("_local_tensor", "_spec", "_is_param", *ATTRIBUTES, *MARKS, MARK)


@dataclass
class ShardedParam(ParamNames):
    """One parameter after sharding. Modules register ``param``, over a DTensor, while the unit is sharded."""

    param: nn.Parameter
    owners: Owners
    spec: ParamSpec
    local_size: torch.Size  # of the unsharded local tensor: the parameter or its tensor-parallel part
    attributes: dict  # attributes that users set on the parameter (weight-decay flags and the like), kept visible
    keeps_dtype: bool  # computes in its original dtype, whatever the policy says
    is_wrapper: bool  # the shard is a tensor subclass that keeps its own storages
    original: int = 0  # number of the original parameter, to detect that two units claim it
    gathered: nn.Parameter | None = None  # what modules register while the unit is gathered, once there is an engine
    extension: Extension | None = None
    is_alias: bool = False  # another group registers it too and stores it in its pool
    storage: torch.UntypedStorage | None = None  # of the local tensor when it was put into the pool
    fqn: str = ""
    shown: dict = field(default_factory=dict)  # weak references to the pending gradients that users have read

    def __post_init__(self) -> None:
        self.seal()

    @property
    def label(self) -> str:
        """Name for messages: the FQN, or before lazy initialization the name in the first owner."""
        return self.fqn or self.owners[0][1]

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows."""
        return torch_private.local_tensor(self.param)

    @property
    def is_pooled(self) -> bool:
        """Whether its shard is in the pool of this group, as one plain tensor."""
        return not (self.is_wrapper or self.is_alias)

    @property
    def facts(self) -> ParamFacts:
        """Facts from which the layout of its group is made."""
        return ParamFacts(
            self.fqn, self.local_size, self.spec.shard_dim, self.param.dtype, self.keeps_dtype, self.is_wrapper,
            self.spec.grad_dtype,
        )  # fmt: skip

    def was_moved(self, local: torch.Tensor) -> bool:
        """Returns whether ``local`` still has the storage that was put into the pool, even if its memory moved.

        ``share_memory_()`` and ``torch.multiprocessing`` queues give a storage memory that other processes share. It
        stays there, and the engine copies it into the pool before it gathers.
        """
        return self.storage is not None and local.untyped_storage()._cdata == self.storage._cdata

    def take_grad_dtype(self, *, has_layout: bool) -> None:
        """Follows a ``grad_dtype`` that was set after ``fully_shard``. ``has_layout``: gradients have places already.

        Raises:
            RuntimeError: it was set after that.
            NotImplementedError: gradients cannot be summed in it.
        """
        now = torch_private.grad_dtype_of(self.param)
        gathered = () if self.gathered is None else torch_private.grad_dtype_of(self.gathered)
        if now in ((), self.spec.grad_dtype) and gathered in ((), (None,)):  # conversions drop it
            return
        if has_layout:
            raise RuntimeError(
                f"fsdp2x: the grad_dtype of parameter {self.label!r} was changed after the first forward, which laid "
                "out its gradients. Set it before fully_shard."
            )
        refuse_grad_dtype(self.param, f"parameter {self.label!r}")
        self.spec.grad_dtype = now

    def restore_grad_dtype(self) -> None:
        """Gives the parameter the ``grad_dtype`` of its spec again, and its gradient that dtype."""
        param, wanted = self.param, self.spec.grad_dtype
        if torch_private.grad_dtype_of(param) == wanted:
            return
        grad, param.grad = param.grad, None
        torch_private.set_grad_dtype(param, wanted)
        if not wanted:  # torch cannot unset it
            fresh = self.spec.parameter(self.local, requires_grad=param.requires_grad)
            fresh.__dict__.update(user_attributes(param))
            torch.utils.swap_tensors(param, fresh)
        if grad is not None:
            param.grad = grad.to(param.grad_dtype or grad.dtype)

    def gathered_dtype(self, shape: _C.ParamShape) -> torch.dtype:
        """Returns the dtype of the gathered parameter, whose layout is ``shape``."""
        return self.param.dtype if self.param.is_complex() else shape.compute


def refuse_grad_dtype(param: nn.Parameter, where: str) -> None:
    """Raises NotImplementedError if gradients cannot be summed in the ``grad_dtype`` of ``param``."""
    known = PARTS if param.is_complex() else REDUCIBLE
    for dtype in filter(None, torch_private.grad_dtype_of(param)):
        if dtype not in known:
            raise NotImplementedError(
                f"fsdp2x.fully_shard: {where} has dtype {param.dtype} and grad_dtype {dtype}, in which gradients "
                f"cannot be summed. Use one of {', '.join(map(str, known))}."
            )


def user_attributes(param: nn.Parameter) -> dict:
    """Returns the attributes that users set on a parameter."""
    return {key: value for key, value in param.__dict__.items() if key not in _NOT_THE_USERS}


def unsharded_parameter(sharded: ShardedParam, tensor: torch.Tensor) -> nn.Parameter:
    """Returns the parameter that modules see while the unit is unsharded."""
    unsharded = nn.Parameter(tensor, requires_grad=sharded.param.requires_grad)
    unsharded.__dict__.update(sharded.attributes)
    mark_gathered(unsharded, sharded.original, sharded.label)
    if unsharded.is_floating_point():
        unsharded.grad_dtype = None  # accept gradients in the dtype that autograd makes
    if sharded.spec.annotation is not None:
        sharded.spec.annotation.apply(unsharded)
    return unsharded


def cut(full: torch.Tensor, ranks: ShardGroup, dim: int) -> torch.Tensor:
    """Returns this rank's rows. For an extension subclass they are a slice of a padded copy, as the protocol wants."""
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
    """Makes the sharded parameter over ``rows`` of the full tensor.

    A DTensor copies the storage offset of the tensor it is made from, and with it an address that means nothing. So
    this function makes it from a tensor that begins at its storage, as the shard in its pool does.
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
    """Returns whether ``param`` is a sharded parameter."""
    return isinstance(param, DTensor) and isinstance(param, nn.Parameter)


def tie_again(sharded: ShardedParam, before: nn.Parameter) -> None:
    """Registers the first owner's parameter with the other owners. ``before`` is the parameter they had in common.

    Warns if another owner was given other values, which are dropped.
    """
    for module, name in sharded.owners[1:]:
        other = module._parameters.get(name)
        if not is_sharded(other) or other is sharded.param:
            continue
        if other is not before and _differ(other, sharded.param):
            warnings.warn(
                f"fsdp2x: {type(module).__name__}.{name} is tied to '{sharded.label}' but was given other values. The "
                "values of the first one are used for both.",
                stacklevel=2,
            )
        module._parameters[name] = sharded.param


def _differ(one: nn.Parameter, other: nn.Parameter) -> bool:
    """Returns whether this rank's rows have different values. False on the meta device, where there are none."""
    rows, others = torch_private.local_tensor(one), torch_private.local_tensor(other)
    return not (rows.is_meta or others.is_meta or (rows.shape == others.shape and torch.equal(rows, others)))
