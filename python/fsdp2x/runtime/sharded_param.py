"""One parameter of a group: sharded, as modules register it between units' calls, and gathered."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from fsdp2x.runtime import spec as specs
from fsdp2x.runtime.annotations import ATTRIBUTES
from fsdp2x.runtime.collect import Owners
from fsdp2x.runtime.extensions import Extension
from fsdp2x.runtime.offload import MARK
from fsdp2x.runtime.shapes import ParamFacts
from fsdp2x.runtime.stale import MARKS, mark_gathered
from fsdp2x.runtime.upstream_names import ParamNames

# What DTensor, spmd_types and we keep on parameters.
_NOT_THE_USERS = ("_local_tensor", "_spec", "_is_param", *ATTRIBUTES, *MARKS, MARK)


@dataclass
class ShardedParam(ParamNames):
    """One parameter after sharding. ``param``, over a DTensor, is what modules register while the unit is sharded."""

    param: nn.Parameter
    owners: Owners
    spec: specs.ParamSpec
    local_size: torch.Size  # of the unsharded local tensor: the parameter's, or its tensor-parallel part
    attributes: dict  # what users hung on the parameter (weight-decay flags and the like), kept visible
    keeps_dtype: bool  # computes in its original dtype, whatever the policy says
    is_wrapper: bool  # the shard is a tensor subclass that keeps its own storages
    original: int = 0  # number of the original parameter, to find one that two units claim
    extension: Extension | None = None
    is_alias: bool = False  # registered by another group too, in whose pool it lies
    storage: torch.UntypedStorage | None = None  # of the local tensor, as it was put into the pool
    fqn: str = ""
    shown: dict = field(default_factory=dict)  # weak references to what waiting.py has handed out

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

    def gathered_dtype(self, shape: tuple) -> torch.dtype:
        """Of the gathered parameter; ``shape`` is what the engine's layout wants of it."""
        return self.param.dtype if self.param.is_complex() else shape[4]


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
