"""Collects what one ``fully_shard`` call manages: modules, parameters, their owners, and the placement of each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from fsdp2x.base import torch_private
from fsdp2x.sharding.mesh import ShardGroup, from_mesh_info
from fsdp2x.sharding.offload import Offload
from fsdp2x.sharding.transport import has_streams


class Owners(Sequence):
    """(module, name) pairs that register a parameter. Holds modules weakly, because modules refer to this object.

    So a model and its engine are freed without Python's cycle collector when the last reference to the model goes.
    Iteration and slices skip modules that are gone. An index returns None for such a module.
    """

    def __init__(self, places: Iterable[tuple[nn.Module, str]]) -> None:
        self._places = [(weakref.ref(module), name) for module, name in places]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [(module, name) for ref, name in self._places[index] if (module := ref()) is not None]
        ref, name = self._places[index]
        return ref(), name

    def __iter__(self) -> Iterator[tuple[nn.Module, str]]:
        return iter(self[:])

    def append(self, place: tuple[nn.Module, str]) -> None:
        """Adds a pair."""
        self._places.append((weakref.ref(place[0]), place[1]))


@dataclass
class OwnedParam:
    """A parameter and every place (module, name) among the managed modules where it is registered."""

    param: nn.Parameter
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)


def managed_modules(roots: Iterable[nn.Module], is_sharded: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """Modules below ``roots``, children first, without those below a nested sharded or replicated module."""
    roots = list(roots)
    visited: set[int] = set()
    found: list[nn.Module] = []

    # A closure that refers to itself would keep the modules alive until the cycle collector runs.
    def visit(module: nn.Module, again: Callable) -> None:
        if torch_private.is_replicated(module):
            return
        if is_sharded(module) and not any(module is root for root in roots):
            return
        visited.add(id(module))
        for child in module.children():
            if id(child) not in visited:
                again(child, again)
        found.append(module)

    for root in roots:
        if id(root) not in visited:
            visit(root, visit)
    return found


def collect_params(modules: Iterable[nn.Module], ignored: set[nn.Parameter]) -> list[OwnedParam]:
    """Returns the distinct parameters of ``modules`` in order of first registration.

    Raises:
        ValueError: a parameter is a scalar, which has no dim to shard.
    """
    by_id: dict[int, OwnedParam] = {}
    for module in modules:
        for name, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            if param.dim() == 0:
                raise ValueError(
                    "fully_shard doesn't support scalar parameters. "
                    f"Change {name} to a 1D tensor with numel equal to 1."
                )
            by_id.setdefault(id(param), OwnedParam(param)).owners.append((module, name))
    return list(by_id.values())


def collect_buffers(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Returns the distinct buffers of ``modules``."""
    return list({id(buffer): buffer for module in modules for buffer in module.buffers(recurse=False)}.values())


def cast_floating(buffers: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
    """Converts floating-point buffers in place; the others keep their dtype."""
    for buffer in buffers:
        if buffer.is_floating_point() and buffer.dtype != dtype:
            buffer.data = buffer.data.to(dtype)


def move_to_device(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Moves parameters and buffers in place; tensors on the meta device stay there."""
    for tensor in tensors:
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.data.to(device)


@dataclass(frozen=True)
class Placed:
    """Placement of a parameter: the ranks that share it, the dim it is cut along, and what stays in CPU memory."""

    owned: OwnedParam
    ranks: ShardGroup
    shard_dim: int
    offload: Offload = Offload()


def place(owned: OwnedParam, ranks: ShardGroup, placement_fn: Callable | None, offload: Offload) -> Placed:
    """Returns the placement that ``shard_placement_fn`` chooses. Default: ``Shard(0)`` over ``ranks``.

    Raises:
        ValueError: the function did not return None, ``Shard`` or torch's ``ShardPlacementResult``.
        AssertionError: the parameter has no such dim.
    """
    param = owned.param
    placement: Any = placement_fn(param) if placement_fn is not None else None
    if hasattr(placement, "mesh_info"):
        ranks, placement = from_mesh_info(placement.mesh_info), placement.placement
    if placement is None:
        return Placed(owned, ranks, 0, offload)
    if not isinstance(placement, Shard):
        raise ValueError(
            f"Invalid shard_placement_fn result: {placement!r} for a parameter of shape {tuple(param.shape)}. Return "
            "None, Shard(dim) or ShardPlacementResult."
        )
    dim = placement.dim + param.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < param.dim():
        raise AssertionError(f"Shard dim {dim} is invalid for {param.dim()}D tensor: {tuple(param.shape)}")
    return Placed(owned, ranks, dim, offload)


def group_by_pool(placed: list[Placed]) -> list[list[Placed]]:
    """Groups parameters by mesh and by where their shards are, in order of first appearance."""
    groups: dict[tuple, list[Placed]] = {}
    for one in placed:
        ranks = one.ranks
        key = (ranks.mesh, ranks.group, ranks.replicate_group, one.offload.pool_key(has_streams(ranks.device)))
        groups.setdefault(key, []).append(one)
    return list(groups.values())
