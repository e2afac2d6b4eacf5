"""The parameters of one unit: cutting them into shards, the pool they lie in, and adopting what replaced them.

``UnitParams`` owns the shard pool and the sharded ``nn.Parameter`` objects; the engine's unit is built from it at lazy
initialization and keeps the same pool.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2x.runtime import torch_private
from fsdp2x.runtime.collect import OwnedParam
from fsdp2x.runtime.mesh import ShardGroup
from fsdp2x.runtime.native import _C


@dataclass
class ShardedParam:
    """One parameter after sharding. ``param``, over a DTensor, is what modules register while the unit is sharded."""

    param: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    shape: torch.Size
    shard_dim: int
    original_id: int  # identity of the unsharded parameter, to find one that two units claim
    attributes: dict  # what users hung on the parameter (weight-decay flags and the like), kept visible
    fqn: str = ""

    @property
    def view(self) -> tuple[int, int, int]:
        """The global shape as (outer, dim, inner) around the shard dim."""
        dim = self.shard_dim
        return math.prod(self.shape[:dim]), self.shape[dim], math.prod(self.shape[dim + 1 :])

    def local_shape(self, ranks: ShardGroup) -> torch.Size:
        begin, end = _C.shard_rows(self.shape[self.shard_dim], ranks.world, ranks.rank)
        sizes = list(self.shape)
        sizes[self.shard_dim] = end - begin
        return torch.Size(sizes)

    def gradient_spec(self, ranks: ShardGroup):
        """What :func:`make_gradient` needs to wrap this rank's gradient rows."""
        return ranks.mesh, self.param.placements, self.shape, self.local_shape(ranks)


def make_gradient(spec, local: torch.Tensor) -> DTensor:
    """The DTensor over the flat gradient rows ``local``; placement and shape are the parameter's."""
    mesh, placements, shape, local_shape = spec
    with torch.no_grad():
        return _as_dtensor(local.view(local_shape), mesh, placements, shape)


def add_to_foreign(param: nn.Parameter, local: torch.Tensor) -> None:
    """Adds the flat gradient rows ``local`` to a ``.grad`` that somebody else assigned."""
    grad = param.grad
    target = grad.to_local() if isinstance(grad, DTensor) else grad
    with torch.no_grad():
        target.add_(local.view(target.shape))


def shard_dim_of(param: nn.Parameter, placement_fn: Callable | None) -> int:
    """The dim ``shard_placement_fn`` chooses for ``param``, 0 by default."""
    placement = placement_fn(param) if placement_fn is not None else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise NotImplementedError(
            f"fsdp2x.fully_shard: shard_placement_fn returned {placement!r} for a parameter of shape "
            f"{tuple(param.shape)}; only None and Shard(dim) are supported (per-parameter meshes are not)"
        )
    dim = placement.dim + param.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < param.dim():
        raise ValueError(f"Shard dim {dim} is invalid for {param.dim()}D tensor: {tuple(param.shape)}")
    return dim


class UnitParams:
    """The sharded parameters of one unit and the pool their shards lie in."""

    def __init__(self, owned: list[OwnedParam], ranks: ShardGroup, placement_fn: Callable | None) -> None:
        self.ranks = ranks
        self.pool: torch.Tensor | None = None
        self.params: list[ShardedParam] = []
        self._offsets: list[int] = []
        self._dtypes: list[torch.dtype] = []
        dims = [shard_dim_of(entry.param, placement_fn) for entry in owned]
        for entry, dim in zip(owned, dims, strict=True):
            self._check(entry, dim)
        with torch.no_grad():
            self._shard(owned, dims)

    def _check(self, entry: OwnedParam, dim: int) -> None:
        param, (module, name) = entry.param, entry.owners[0]
        where = f"parameter {name!r} of {type(module).__name__}"
        if isinstance(param, DTensor):
            raise NotImplementedError(
                f"fsdp2x.fully_shard: {where} is already a DTensor (tensor or expert parallel); "
                "combine them with torch.distributed.fsdp.fully_shard for now"
            )
        if hasattr(param.data, "fsdp_pre_all_gather") or hasattr(param.data, "fsdp_post_all_gather"):
            raise NotImplementedError(
                f"fsdp2x.fully_shard: {where} is a {type(param.data).__name__} with all-gather extensions, "
                "which are not supported yet; unwrap it or use torch.distributed.fsdp.fully_shard"
            )
        if not param.is_contiguous():
            raise NotImplementedError(
                f"FSDP does not support non-contiguous parameters yet: {param.shape=} {param.stride()=}"
            )
        if param.requires_grad and param.dtype not in _REDUCIBLE:
            raise NotImplementedError(
                f"fsdp2x.fully_shard: {where} is trainable and of dtype {param.dtype}; gradients can be reduced for "
                f"{', '.join(str(dtype) for dtype in _REDUCIBLE)}. Freeze it or convert it first."
            )
        if dim > 0 and param.shape[dim] % self.ranks.world != 0:
            raise NotImplementedError(
                f"FSDP does not support uneven sharding on dim {dim}: {param.size()} (world size: {self.ranks.world})"
            )

    def _shard(self, owned: list[OwnedParam], dims: list[int]) -> None:
        ranks = self.ranks
        for entry, dim in zip(owned, dims, strict=True):
            full = entry.param.detach()
            begin, end = _C.shard_rows(full.shape[dim], ranks.world, ranks.rank)
            local = full.narrow(dim, begin, end - begin) if end > begin else full.narrow(dim, 0, 0)
            sharded = nn.Parameter(
                _as_dtensor(local, ranks.mesh, (Shard(dim),), full.shape), requires_grad=entry.param.requires_grad
            )
            attributes = dict(entry.param.__dict__)
            sharded.__dict__.update(attributes)
            self.params.append(ShardedParam(sharded, entry.owners, full.shape, dim, id(entry.param), attributes))
        self.adopt()
        for sharded in self.params:
            for module, name in sharded.owners:
                module._parameters[name] = sharded.param

    def shapes(self, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> list[tuple]:
        """(outer, dim, inner, orig, compute, reduce dtype) of each parameter, as the engine's layout wants them."""
        origs = [sharded.param.dtype for sharded in self.params]
        reduce = reduce_dtype
        for dtype in origs:
            if reduce_dtype is None and dtype in _REDUCIBLE:
                reduce = dtype if reduce is None else torch.promote_types(reduce, dtype)
        shapes = []
        for sharded, orig in zip(self.params, origs, strict=True):
            compute = param_dtype if param_dtype is not None and orig.is_floating_point else orig
            castable = orig in _REDUCIBLE and compute in _REDUCIBLE
            if compute != orig and not castable:
                raise NotImplementedError(
                    f"fsdp2x.fully_shard: parameter {sharded.fqn!r} cannot be cast from {orig} to {compute}"
                )
            shapes.append((*sharded.view, orig, compute, reduce if castable else orig))
        return shapes

    def adopt(self) -> bool:
        """Brings every shard back into the pool: after loading with ``assign=True``, ``.to()``, ``.to_empty()``.

        Values of parameters that moved are copied; the ``nn.Parameter`` objects stay. Returns whether the pool
        is new (first call, or dtypes or the device changed).
        """
        for sharded in self.params:
            module, name = sharded.owners[0]
            current = module._parameters.get(name)
            if isinstance(current, DTensor) and current is not sharded.param:
                sharded.param = current
        locals_ = [sharded.param.to_local().detach() for sharded in self.params]
        if any(local.is_meta for local in locals_) or not self.params:
            return False
        layout = _C.Layout(self.shapes(None, None), self.ranks.world, self.ranks.rank)
        fresh = self.pool is None or self.pool.numel() != max(layout.shard_pool_bytes, 1)
        fresh = fresh or self.pool.device != locals_[0].device or self._dtypes != [local.dtype for local in locals_]
        if fresh:
            self.pool = torch.zeros(max(layout.shard_pool_bytes, 1), dtype=torch.uint8, device=locals_[0].device)
            self._dtypes = [local.dtype for local in locals_]
        self._offsets = layout.shard_offsets
        with torch.no_grad():
            for sharded, local, offset in zip(self.params, locals_, self._offsets, strict=True):
                self._move_in(sharded, local, offset, fresh)
        return fresh

    def _move_in(self, sharded: ShardedParam, local: torch.Tensor, offset: int, fresh: bool) -> None:
        expected = sharded.local_shape(self.ranks)
        if local.shape != expected:
            raise ValueError(
                f"fsdp2x: parameter {sharded.fqn or sharded.owners[0][1]!r} has local shape {tuple(local.shape)} on "
                f"rank {self.ranks.rank}, expected {tuple(expected)} of {tuple(sharded.shape)}: load DTensors with "
                "the placement of the sharded model"
            )
        in_place = local.untyped_storage().data_ptr() == self.pool.data_ptr() + offset
        if not fresh and local.numel() and in_place and local.is_contiguous():
            return
        pooled = _C.tensor_in_pool(self.pool, offset, list(expected), local.dtype)
        pooled.copy_(local)
        torch_private.set_local_tensor(sharded.param, pooled)

    def engine_params(self, shapes: list[tuple], device: torch.device) -> list[tuple]:
        """The tuples ``_C.Unit`` takes: fqn, sharded, unsharded, gradient spec, owners."""
        result = []
        # Made outside inference mode once and for all: an inference tensor could never be trained.
        with torch.inference_mode(False), torch.no_grad():
            for sharded, shape in zip(self.params, shapes, strict=True):
                tensor = _C.tensor_without_memory(list(sharded.shape), shape[4], device)
                unsharded = nn.Parameter(tensor, requires_grad=sharded.param.requires_grad)
                unsharded.__dict__.update(sharded.attributes)
                if unsharded.is_floating_point():
                    unsharded.grad_dtype = None  # gradients arrive in the dtype autograd made them in
                owners = [(module._parameters, name, _weak_if_custom(module)) for module, name in sharded.owners]
                spec = sharded.gradient_spec(self.ranks)
                result.append((sharded.fqn, sharded.param, unsharded, spec, owners))
        return result


_REDUCIBLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _weak_if_custom(module: nn.Module):
    """A weak reference if the class overrides ``__setattr__`` (an LSTM keeps its own list of weights), else None."""
    return None if type(module).__setattr__ is nn.Module.__setattr__ else weakref.ref(module)


def _as_dtensor(local: torch.Tensor, mesh, placements, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
