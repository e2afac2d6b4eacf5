"""Supports parameters that the package spmd_types annotates: plain tensors with a placement for each axis of a mesh.

With ``dp_mesh_dims`` such a parameter is stored as a DTensor on the full mesh, like one that already was a DTensor.
Modules still see a plain tensor with its annotation. Before gradients are reduced, pending operations on other axes
than the data-parallel ones are done (the sum over tensor-parallel ranks). This module owns no state and imports
spmd_types only if the user has.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fsdp2x.base import torch_private

# Attributes that the package sets on its tensors.
ATTRIBUTES = ("_local_type", "_partition_spec")


@dataclass(frozen=True)
class Annotation:
    """Annotation of one parameter: its type for modules, and the placement of it and its gradients on the full mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    gradient_placements: tuple[Placement, ...]  # of a gradient as autograd makes it
    data_axes: frozenset[int]  # axes over which the engine reduces
    types: dict  # axis -> type on the mesh of the computation
    partition: Any  # None, or which dims are cut along which axes

    def dtensor(self, param: nn.Parameter) -> DTensor:
        """Returns the DTensor that ``param`` is a part of."""
        return DTensor.from_local(param.detach(), self.mesh, self.placements, run_check=False)

    def apply(self, unsharded: nn.Parameter) -> None:
        """Annotates the tensor that modules see. Its gradients need no sum except the engine's."""
        with unchecked():
            imported_package().assert_type(unsharded, self.types, partition_spec=self.partition)
            if self._target() == self.gradient_placements:
                return
            requires_grad = unsharded.requires_grad
            unsharded.requires_grad_(True).register_hook(self._reduce)
            unsharded.requires_grad_(requires_grad)

    def _target(self) -> tuple[Placement, ...]:
        pairs = enumerate(zip(self.gradient_placements, self.placements, strict=True))
        return tuple(have if axis in self.data_axes else want for axis, (have, want) in pairs)

    def _reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        with unchecked(), torch.no_grad():
            whole = DTensor.from_local(gradient, self.mesh, self.gradient_placements, run_check=False)
            return whole.redistribute(placements=self._target()).to_local()


def annotation_of(param: nn.Parameter, where: str, mesh: DeviceMesh | None, dp_mesh_dims: Any) -> Annotation | None:
    """Returns the annotation of ``param``, or None without one or if it is a DTensor.

    ``mesh`` is the full mesh with the data-parallel axes ``dp_mesh_dims``. None: ``fully_shard`` did not get them.

    Raises:
        ValueError: there is no ``dp_mesh_dims``, or the annotation omits an axis that is not data-parallel, names one
            that the mesh lacks, or is not replicated on a data-parallel one.
    """
    package = imported_package()
    if package is None or isinstance(param, DTensor) or not package.get_local_type(param):
        return None
    names = None if mesh is None else mesh.mesh_dim_names
    if mesh is None or names is None:
        raise ValueError(
            f"fsdp2x.fully_shard: {where} is annotated by spmd_types. Pass the full named mesh as mesh=, and its "
            "data-parallel axes as dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...)."
        )
    axes = [package.MeshAxis.of(mesh.get_group(name)) for name in names]
    data = (*dp_mesh_dims.shard_names, *dp_mesh_dims.replicate_names)
    data_axes = frozenset(names.index(name) for name in data)
    types, partition = dict(package.get_local_type(param)), package.get_partition_spec(param)
    compute_axes = _compute_axes(package, types, axes, where)
    on_mesh = _types_on_mesh(package, {**types, **_cut_axes(package, partition)}, axes, data_axes, names, where)
    return Annotation(
        mesh=mesh,
        placements=tuple(package.spmd_type_to_dtensor_placement(kind) for kind in on_mesh),
        gradient_placements=tuple(package.spmd_type_to_dtensor_placement(kind.backward_type()) for kind in on_mesh),
        data_axes=data_axes,
        types={axis: types.get(axis, package.R) for axis in compute_axes},
        partition=partition,
    )


def unchecked() -> AbstractContextManager:
    """Returns a context in which spmd_types does not check operations."""
    package = imported_package()
    return nullcontext() if package is None else package.no_typecheck()


def skips_checks(function: Callable, *bound: Any, **options: Any) -> Callable:
    """Returns ``function`` with the arguments bound, for the engine to call. spmd_types does not check it.

    Does not wrap it if spmd_types is not imported yet, because then nothing is annotated.
    """
    if bound or options:
        function = functools.partial(function, *bound, **options)
    if imported_package() is None:
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_checking():
            return function(*args, **kwargs)
        with unchecked():
            return function(*args, **kwargs)

    return call


def is_checking() -> bool:
    """Returns whether spmd_types checks the current operations of this thread."""
    package = imported_package()
    return package is not None and package.is_type_checking()


def follow_inputs(pre_forward: Callable) -> Callable:
    """Wraps the hook ``pre_forward`` so that its new inputs keep the annotations of those they replace."""

    def call(module: nn.Module, args: tuple, kwargs: dict):
        changed = pre_forward(module, args, kwargs)
        if changed is not None and is_checking():
            _carry_over((args, kwargs), changed)
        return changed

    return call


def _carry_over(before: Any, after: Any) -> None:
    for old, new in zip(torch_private.tree_leaves(before), torch_private.tree_leaves(after), strict=True):
        if isinstance(new, torch.Tensor) and new is not old:
            new.__dict__.update({name: old.__dict__[name] for name in ATTRIBUTES if name in old.__dict__})


def imported_package() -> Any:
    """Returns spmd_types if it is imported, because otherwise nothing can be annotated."""
    return sys.modules.get("spmd_types")


def _cut_axes(package: Any, partition: Any) -> dict:
    """Returns axis -> the type of a dim that is cut along it."""
    if partition is None:
        return {}
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in partition]
    return {axis: package.S(dim) for dim, entry in enumerate(entries) for axis in entry if axis is not None}


def _span(package: Any, axes: Iterable) -> Any:
    """Returns one axis over the ranks that ``axes`` span, or None for a single rank."""
    wide = tuple(axis for axis in axes if axis.size() > 1)
    return package._mesh_axis.flatten_axes(wide) if wide else None


def _compute_axes(package: Any, types: dict, axes: list, where: str) -> tuple:
    """Returns the axes of the computation's annotations: the parameter's, or those of the current mesh."""
    if _span(package, types) == _span(package, axes):
        return tuple(types)
    current = package.current_mesh()
    if current is None:
        raise ValueError(
            f"fsdp2x.fully_shard: expected spmd_types annotations of {where} on all axes of {axes}, got "
            f"{tuple(types)}. Annotate it on the full mesh, or call fully_shard inside spmd_types.set_current_mesh()."
        )
    if _span(package, current) != _span(package, axes) or not set(types) <= set(current):
        raise ValueError(
            f"fsdp2x.fully_shard: {where} is annotated by spmd_types on {tuple(types)}, expected a current mesh with "
            f"these axes and the ranks of {axes}, got {tuple(current)}"
        )
    return tuple(current)


def _types_on_mesh(package: Any, types: dict, axes: list, data_axes: frozenset, names: tuple, where: str) -> list:
    """Returns the type on each axis of the storage mesh, replicated on the data-parallel ones that the engine cuts."""
    data = _span(package, [axes[i] for i in data_axes])
    others = {axes[i]: None for i in range(len(axes)) if i not in data_axes and axes[i].size() > 1}
    for axis, kind in types.items():
        if axis in others:
            others[axis] = kind
        elif data is None or not axis <= data:
            raise ValueError(
                f"fsdp2x.fully_shard: {where} is annotated by spmd_types on axis {axis}, which is neither an axis of "
                f"the mesh {names} nor within its data-parallel ones"
            )
        elif kind is not package.R:
            raise ValueError(
                f"fsdp2x.fully_shard: {where} must be R on the data-parallel axis {axis}, got {kind}. fully_shard "
                "itself cuts parameters along these axes and sums their gradients."
            )
    missing = [names[axes.index(axis)] for axis, kind in others.items() if kind is None]
    if missing:
        raise ValueError(f"fsdp2x.fully_shard: {where} has no spmd_types annotation on {missing}. Annotate all axes.")
    return [package.R if i in data_axes else others.get(axis, package.R) for i, axis in enumerate(axes)]
