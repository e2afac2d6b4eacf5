"""Makes the DTensor specs of one parameter: of its shard and, with tensor parallelism, of the full parameter.

There are three kinds of parameters. Plain tensors lie on the data-parallel mesh. DTensors on their own mesh (tensor or
expert parallel) have local tensors that are sharded once more. With ``dp_mesh_dims``, DTensors lie on the whole mesh
and have ``Replicate`` on the data-parallel axes; spmd_types may annotate plain tensors like that.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp2x.base import torch_private
from fsdp2x.base.annotations import Annotation, annotation_of
from fsdp2x.sharding.mesh import ShardGroup

# One object for each dim makes comparing the placements of two parameters cheap.
_shard = functools.cache(Shard)
_REPLICATE = Replicate()


@dataclass
class ParamSpec:
    """``sharded`` is the DTensorSpec of the sharded parameter and its gradient. It always has the global shape."""

    sharded: torch_private.DTensorSpec
    unsharded: torch_private.DTensorSpec | None  # of a parameter that was, or is annotated as, a DTensor
    dp_axes: frozenset[int]  # axes of `unsharded`'s mesh that the unit reduces over; only with dp_mesh_dims
    local_shape: torch.Size  # of this rank's shard
    shard_dim: int
    annotation: Annotation | None = None
    is_plain: bool = False  # the parameter and its gradient are plain tensors on every rank
    grad_dtype: tuple[torch.dtype | None, ...] = ()  # what the user set on the parameter, empty if nothing

    @property
    def is_wrapped(self) -> bool:
        """Whether modules see a DTensor."""
        return self.unsharded is not None and self.annotation is None

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the sharded DTensor over ``local``, a shard or its gradient."""
        if self.is_plain:
            return local.detach()
        spec = torch_private.spec_with_dtype(self.sharded, local.dtype)
        return torch_private.dtensor(local, spec)

    def parameter(self, local: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Returns the sharded parameter over ``local``. It shares one spec object with its gradients, so torch sees
        without comparing that both are cut alike.
        """
        wrapped = self.wrap(local)
        param = nn.Parameter(wrapped, requires_grad=requires_grad)
        if isinstance(wrapped, DTensor):
            torch_private.set_spec(param, torch_private.spec_of(wrapped))
        torch_private.set_grad_dtype(param, self.grad_dtype)
        return param

    def wrap_unsharded(self, local: torch.Tensor) -> torch.Tensor:
        """Returns what modules see while unsharded: ``local`` itself, or the tensor-parallel DTensor over it."""
        if self.unsharded is None or self.annotation is not None:
            return local
        return torch_private.dtensor(local, torch_private.spec_with_dtype(self.unsharded, local.dtype))


def make_gradient(spec: ParamSpec, local: torch.Tensor) -> torch.Tensor:
    """Makes the gradient over the flat gradient rows ``local``, with the placement and shape of the parameter."""
    with torch.no_grad():
        return spec.wrap(local.view(spec.local_shape))


def add_to_foreign(param: nn.Parameter, local: torch.Tensor) -> None:
    """Adds the flat gradient rows ``local`` to a ``.grad`` that other code assigned."""
    grad = param.grad
    assert grad is not None, "the engine found a gradient here"
    target = grad.to_local() if isinstance(grad, DTensor) else grad
    with torch.no_grad():
        target.add_(local.view(target.shape))


def plain_gradient(spec: ParamSpec, gradient: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor, with the parameter's placements, of a gradient that is a tensor subclass."""
    with torch.no_grad():
        if spec.unsharded is None or spec.annotation is not None:
            gradient = torch_private.wait_if_async(gradient)
            if isinstance(gradient, DTensor):
                return gradient.full_tensor()
            if torch_private.is_traceable_wrapper_subclass(gradient):
                # The subclass can write itself into a plain tensor.
                plain = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
                plain.copy_(gradient)
                return plain
            return gradient
        gradient = torch_private.wait_if_async(gradient)
        if not isinstance(gradient, DTensor):
            raise AssertionError(f"Expected DTensor, got {type(gradient)}")
        # Data-parallel axes stay Partial, because the reduction of the unit sums over them.
        wanted = tuple(
            have if axis in spec.dp_axes else want
            for axis, (have, want) in enumerate(zip(gradient.placements, spec.unsharded.placements, strict=True))
        )
        if wanted != tuple(gradient.placements):
            gradient = gradient.redistribute(placements=wanted)
        return torch_private.wait_if_async(gradient.to_local())


def post_forward_dtensor(sharded, local: torch.Tensor, ranks: ShardGroup) -> DTensor:
    """Returns ``local``, a parameter's rows in the smaller world after forward, as a DTensor (replicate, shard)."""
    meta = sharded.spec.sharded.tensor_meta
    placements = (Replicate(), Shard(sharded.spec.shard_dim))
    return torch_private.dtensor(
        local, torch_private.dtensor_spec(ranks.mesh, placements, meta.shape, meta.stride, local.dtype)
    )


def replicated_spec(param: nn.Parameter, ranks: ShardGroup) -> ParamSpec:
    """Returns the spec of a plain parameter that every rank of ``ranks.mesh`` has in full."""
    placements = (_REPLICATE,) * ranks.mesh.ndim
    spec = torch_private.dtensor_spec(ranks.mesh, placements, param.shape, param.stride(), param.dtype)
    grad_dtype = torch_private.grad_dtype_of(param)
    return ParamSpec(spec, None, frozenset(), param.shape, 0, is_plain=True, grad_dtype=grad_dtype)


def make_spec(param: nn.Parameter, where: str, ranks: ShardGroup, shard_dim: int) -> tuple[ParamSpec, torch.Tensor]:
    """Returns the spec of ``param`` sharded along ``shard_dim``, and the full local tensor to cut the shard from.

    Raises:
        ValueError: the parameter does not fit ``dp_mesh_dims``.
        NotImplementedError: there are more than two model-parallel axes, or no placements describe the shard.
    """
    placement = _shard(shard_dim)
    annotation = annotation_of(param, where, ranks.spmd_mesh, ranks.dp_mesh_dims)
    if annotation is not None:
        spec, full = _on_whole_mesh(annotation.dtensor(param), where, ranks, placement)
        return replace(spec, annotation=annotation), full
    if ranks.spmd_mesh is not None:
        return _on_whole_mesh(param, where, ranks, placement)
    if isinstance(param, DTensor):
        return _below_model_parallel(param, where, ranks, placement)
    sharding: tuple[Placement, ...] = (placement,) if ranks.group is not None else ()
    if ranks.has_replicate_axis:
        sharding = (_REPLICATE, *sharding)
    full = param.detach()
    spec = torch_private.dtensor_spec(ranks.mesh, sharding, full.shape, full.stride(), full.dtype)
    return ParamSpec(spec, None, frozenset(), _local_shape(full, ranks, shard_dim), shard_dim), full


def _below_model_parallel(
    param: DTensor, where: str, ranks: ShardGroup, placement: Shard
) -> tuple[ParamSpec, torch.Tensor]:
    model_spec = torch_private.spec_of(param)
    if len(model_spec.placements) > 2:
        raise NotImplementedError(f"FSDP only supports 1D TP/EP or 2D EP+TP, not {model_spec.placements} ({where})")
    if packed := _packed_axis(model_spec, placement.dim, ranks.world, where):
        axis, inner = packed
        sharding = (placement, *model_spec.placements[:axis], inner, *model_spec.placements[axis + 1 :])
    else:
        sharding = (_strided(placement, _num_shards(model_spec, placement.dim)), *model_spec.placements)
    if ranks.has_replicate_axis:
        sharding = (_REPLICATE, *sharding)
    mesh = torch_private.concatenate_meshes([ranks.mesh, model_spec.mesh])
    full = param.to_local().detach()
    spec = torch_private.dtensor_spec(mesh, sharding, param.shape, param.stride(), param.dtype)
    shape = _local_shape(full, ranks, placement.dim)
    return ParamSpec(spec, model_spec, frozenset(), shape, placement.dim), full


def _on_whole_mesh(
    param: torch.Tensor, where: str, ranks: ShardGroup, placement: Shard
) -> tuple[ParamSpec, torch.Tensor]:
    mesh, names = _named_mesh(ranks)
    if not isinstance(param, DTensor):
        raise ValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via "
            f"distribute_module), or annotated by spmd_types. Got plain tensor for {where}."
        )
    whole = torch_private.spec_of(param)
    if whole.mesh != mesh:
        raise ValueError(
            "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different mesh objects"
        )
    shard_axes = [names.index(name) for name in ranks.dp_mesh_dims.shard_names]
    replicate_axes = [names.index(name) for name in ranks.dp_mesh_dims.replicate_names]
    for kind, axes in (("shard", shard_axes), ("replicate", replicate_axes)):
        for axis in axes:
            if not isinstance(whole.placements[axis], Replicate):
                raise ValueError(
                    f"Expected Replicate() on DP {kind} dim '{names[axis]}' (index {axis}) but got "
                    f"{whole.placements[axis]} for {where}"
                )
    placements = list(whole.placements)
    packed = _packed_axis(whole, placement.dim, ranks.world, where)
    if packed:
        if packed[0] < max(shard_axes):
            raise NotImplementedError(
                f"{where} has placements {whole.placements}: tensor parallelism cuts blocks of a fused matrix along "
                f"dim {placement.dim} on an axis before those of FSDP. Put the tensor-parallel axis last in the mesh."
            )
        placements[packed[0]] = packed[1]
    for axis in shard_axes:
        inner = [i for i in range(axis + 1, mesh.ndim) if _shards(whole.placements[i], placement.dim)]
        factor = 1
        for i in inner:
            factor *= mesh.size(i)
        placements[axis] = placement if packed else _strided(placement, factor)
    spec_mesh, sharding = mesh, tuple(placements)
    if len(shard_axes) > 1:
        spec_mesh, sharding = _with_flat_shard_axis(ranks, sharding)
    full = param.to_local().detach()
    spec = torch_private.dtensor_spec(spec_mesh, sharding, param.shape, param.stride(), param.dtype)
    dp_axes = frozenset(shard_axes + replicate_axes)
    return ParamSpec(spec, whole, dp_axes, _local_shape(full, ranks, placement.dim), placement.dim), full


def _named_mesh(ranks: ShardGroup) -> tuple[DeviceMesh, tuple[str, ...]]:
    """Returns the full mesh of ``dp_mesh_dims`` and its axis names, which ``shard_group`` requires."""
    mesh = ranks.spmd_mesh
    assert mesh is not None and mesh.mesh_dim_names is not None
    return mesh, mesh.mesh_dim_names


def _with_flat_shard_axis(ranks: ShardGroup, placements: tuple[Placement, ...]):
    """Replaces several shard axes by one: the flattened data-parallel mesh."""
    (mesh, names), shard_names = _named_mesh(ranks), ranks.dp_mesh_dims.shard_names
    parts, sharding, is_placed = [], [], False
    for axis, name in enumerate(names):
        if name in shard_names:
            if is_placed:
                continue
            parts.append(ranks.mesh)
            sharding += [Replicate()] if ranks.has_replicate_axis else []
            sharding.append(placements[axis])
            is_placed = True
        elif name not in ranks.dp_mesh_dims.replicate_names:
            parts.append(mesh[name])
            sharding.append(placements[axis])
    return torch_private.concatenate_meshes(parts), tuple(sharding)


def _shards(placement: Placement, dim: int) -> bool:
    return isinstance(placement, (Shard, torch_private.StridedShard)) and placement.dim == dim


def _packed_axis(spec: torch_private.DTensorSpec, dim: int, world: int, where: str) -> tuple[int, Placement] | None:
    """Returns the axis whose ranks have a part of each block of a fused matrix (transformers' packed plans) along
    ``dim``, and its placement below FSDP over ``world`` ranks. None if there is no such axis.

    Blocks gate and up over two ranks have the rows gate_0 up_0 | gate_1 up_1. With FSDP over two ranks, each rank has
    rows of one block. So FSDP cuts the rows first, then tensor parallelism as usual.

    Raises:
        NotImplementedError: FSDP cuts blocks. No placements describe the rows of a rank, and ``full_tensor()`` would
            return them in another order.
    """
    for axis, one in enumerate(spec.placements):
        if isinstance(one, torch_private.StridedShard) and one.dim == dim and spec.mesh.size(axis) > 1:
            break
    else:
        return None
    if world == 1:
        return None
    assert spec.tensor_meta is not None, "a parameter has a shape"
    num_blocks, size = int(one.split_factor), spec.tensor_meta.shape[dim]
    is_alone = sum(_shards(other, dim) for other in spec.placements) == 1
    if not is_alone or num_blocks % world or size % (num_blocks * spec.mesh.size(axis)):
        raise NotImplementedError(
            f"{where} has placements {spec.placements}: tensor parallelism cuts each of its {num_blocks} blocks along "
            f"dim {dim}, and FSDP over {world} ranks would cut the blocks again. full_tensor() would return the lines "
            "in another order. Pass a shard_placement_fn that returns another dim for it."
        )
    return axis, _strided(_shard(dim), num_blocks // world)


def strided_axes(param: DTensor) -> tuple[list[int], list[int]]:
    """Mesh axes that cut each block of a fused matrix, and those that cut what later axes left: FSDP over them.

    Both are strided. The second kind has as many groups as later axes have ranks for its dim.
    """
    packed, late = [], []
    for axis, placement in enumerate(param.placements):
        if isinstance(placement, torch_private.StridedShard):
            mesh, later = param.device_mesh, range(axis + 1, len(param.placements))
            cuts = [mesh.size(i) for i in later if getattr(param.placements[i], "dim", None) == placement.dim]
            (late if math.prod(cuts) == placement.split_factor else packed).append(axis)
    return packed, late


def lines_of(param: DTensor) -> list[torch.Tensor]:
    """Returns this rank's lines along each dim of the full tensor, in the order of its local tensor."""
    packed, late = strided_axes(param)
    lines = [torch.arange(size, device="cpu") for size in param.shape]
    for axis in [*(axis for axis in range(len(param.placements)) if axis not in late), *reversed(late)]:
        placement: Any = param.placements[axis]
        if not hasattr(placement, "dim"):
            continue
        world, rank = param.device_mesh.size(axis), param.device_mesh.get_local_rank(axis)
        blocks = lines[placement.dim].chunk(placement.split_factor if axis in packed else 1)
        sizes = [-(-len(block) // world) for block in blocks]
        parts = [block[size * rank : size * (rank + 1)] for block, size in zip(blocks, sizes, strict=True)]
        lines[placement.dim] = torch.cat(parts)
    return lines


def _num_shards(spec: torch_private.DTensorSpec, dim: int) -> int:
    count = 1
    for axis, placement in enumerate(spec.placements):
        if _shards(placement, dim):
            count *= spec.mesh.size(axis)
    return count


def _strided(placement: Shard, factor: int) -> Placement:
    # Tensor parallelism cut the rows first, so a rank holds several pieces of the global order.
    return placement if factor == 1 else torch_private.StridedShard(placement.dim, split_factor=factor)


def _local_shape(full: torch.Tensor, ranks: ShardGroup, dim: int) -> torch.Size:
    if dim >= full.dim():
        raise AssertionError(f"Shard dim {dim} is invalid for {full.dim()}D tensor: {full.shape}")
    return torch.Size(ranks.rows(full.shape, dim)[1])
