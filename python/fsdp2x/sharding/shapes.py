"""Describes each parameter of a group for the engine's layout, mostly its dtypes, and estimates the cost of padding.

Both running groups and plans of models that do not exist yet use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from fsdp2x.base.native import _C
from fsdp2x.sharding.extensions import is_wrapper

# torch 2.15 changed the meaning of MixedPrecisionPolicy(reduce_dtype=None). fsdp2x follows the installed torch.
_REDUCES_IN_PARAM_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15)
# Dtypes of gradients that the engine can sum. Complex numbers are pairs of real ones.
REDUCIBLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(frozen=True)
class ParamFacts:
    """One parameter. ``size`` is the shape of the unsharded local tensor, which is cut along ``shard_dim``."""

    fqn: str
    size: Sequence[int]
    shard_dim: int
    dtype: torch.dtype
    keeps_dtype: bool = False  # computes in its original dtype, whatever the policy says
    is_wrapper: bool = False  # a tensor subclass with its own all-gather, not in the gather buffer

    @property
    def view(self) -> tuple[int, int, int]:
        """``size`` as (outer, dim, inner) around the shard dim, in the engine's elements."""
        dim, parts = self.shard_dim, 2 if self.dtype in PARTS else 1
        return math.prod(self.size[:dim]), self.size[dim], math.prod(self.size[dim + 1 :]) * parts

    @property
    def element(self) -> torch.dtype:
        """Dtype of the elements that ``view`` counts."""
        return PARTS.get(self.dtype, self.dtype)


def layout_shapes(
    params: Iterable[ParamFacts], param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> list[_C.ParamShape]:
    """Describes each parameter for the engine's layout.

    Raises:
        NotImplementedError: a parameter cannot be cast to ``param_dtype``.
    """
    params = list(params)
    reduce = param_dtype if reduce_dtype is None and _REDUCES_IN_PARAM_DTYPE else reduce_dtype
    if reduce is None:
        for param in params:
            if param.element in REDUCIBLE:
                reduce = param.element if reduce is None else torch.promote_types(reduce, param.element)
    shapes = []
    for param in params:
        original = compute = param.element
        if param_dtype is not None and param.dtype.is_floating_point and not param.keeps_dtype:
            compute = param_dtype
        castable = original in REDUCIBLE and compute in REDUCIBLE
        if compute != original and not castable and not param.is_wrapper:
            raise NotImplementedError(
                f"fsdp2x.fully_shard: parameter {param.fqn!r} cannot be cast from {param.dtype} to {compute}. Convert "
                "it before fully_shard."
            )
        reduce_as = reduce if castable and reduce is not None else original
        shapes.append(_C.ParamShape(*param.view, original, compute, reduce_as, not param.is_wrapper))
    return shapes


def kept_shapes(shapes: Iterable[_C.ParamShape]) -> list[_C.ParamShape]:
    """Describes the same parameters in the smaller world that keeps them after forward, in their compute dtype."""
    return [
        _C.ParamShape(one.outer, one.dim, one.inner, one.compute, one.compute, one.compute, one.in_slot)
        for one in shapes
    ]


def keeps_dtype(param: nn.Parameter, policy: MixedPrecisionPolicy) -> bool:
    """Returns whether ``param_dtype_override_fn`` (torch 2.15) chooses the parameter's original dtype."""
    override_fn = getattr(policy, "param_dtype_override_fn", None)
    dtype = override_fn(param) if override_fn is not None else None
    if dtype is None:
        return False
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"param_dtype_override_fn must return a torch.dtype or None but got {type(dtype)}")
    if dtype not in (policy.param_dtype, param.dtype):
        raise ValueError(
            "param_dtype_override_fn must return None, param_dtype, or the parameter's original dtype but got "
            f"{dtype} for a parameter with dtype {param.dtype} and param_dtype {policy.param_dtype}"
        )
    return dtype != policy.param_dtype


# --- parameters whose rows do not divide over the ranks ---
#
# Each rank has room for the largest number of rows on any rank. So 128 experts over 512 ranks take four times their
# bytes, between steps and in every gather and reduction.

# Less padding than this, or a smaller fraction of the parameter, is not reported.
_WORTH_BYTES = 2**20
_WORTH_FACTOR = 1.5
# From this factor on, an automatically wrapped model without a placement function is cut along another dim.
_AVOIDED_FACTOR = 2.0


@dataclass(frozen=True)
class Padding:
    """One parameter, cut along ``dim`` over ``world`` ranks, takes ``factor`` times its bytes."""

    name: str
    shape: tuple[int, ...]
    dim: int
    world: int
    factor: float
    wasted_bytes: int  # summed over all ranks
    even_dim: int | None  # a dim that the number of ranks divides


def padding_of(name: str, facts: ParamFacts, world: int) -> Padding | None:
    """Returns the cost of padding, or None if it is negligible."""
    outer, rows, inner = facts.view
    padded_rows = -(-rows // world) * world
    wasted_bytes = outer * (padded_rows - rows) * inner * facts.dtype.itemsize
    if wasted_bytes < _WORTH_BYTES or padded_rows < _WORTH_FACTOR * rows:
        return None
    even = next((dim for dim, size in enumerate(facts.size) if size and size % world == 0), None)
    return Padding(name, tuple(facts.size), facts.shard_dim, world, padded_rows / rows, wasted_bytes, even)


def padding_in(groups: Iterable[Any], model: nn.Module) -> list[Padding]:
    """Returns the padding of the groups of a sharded model."""
    names = {id(param): name for name, param in model.named_parameters()}
    return [
        one
        for group in groups
        for param in group.params
        if (one := padding_of(names.get(id(param.param), param.fqn), param.facts, group.ranks.world))
    ]


def even_placement(param: nn.Parameter, world: int) -> Shard | None:
    """Returns ``Shard`` of a dim that divides evenly if rows would at least double the bytes, else None for rows."""
    if param.dim() < 2 or isinstance(param, DTensor) or is_wrapper(param):
        return None
    found = padding_of("", ParamFacts("", tuple(param.shape), 0, param.dtype), world)
    if found is None or found.factor < _AVOIDED_FACTOR or found.even_dim is None:
        return None
    return Shard(found.even_dim)


def advice(found: Sequence[Padding]) -> list[str]:
    """Returns a sentence for each kind of parameter. The same last name and shape in several blocks count once."""
    kinds: dict[tuple, list[Padding]] = {}
    for one in found:
        kinds.setdefault((one.name.rpartition(".")[2], one.shape, one.dim, one.world), []).append(one)
    return [_sentence(kind[0], len(kind)) for kind in kinds.values()]


def _sentence(first: Padding, num_like: int) -> str:
    names = first.name if num_like == 1 else f"{first.name} and {num_like - 1} like it"
    ways = []
    if len(first.shape) == 3:
        ways.append("spread experts with parallel.expert_parallel (fsdp2x.moe.expert_parallel)")
    if first.even_dim is not None:
        ways.append(f"pass shard_placement_fn=lambda param: Shard({first.even_dim}) for them")
    ways.append("shard over fewer ranks with replicas (HSDP)")
    return (
        f"padding: {names} {first.shape}: {first.shape[first.dim]} rows over {first.world} ranks take "
        f"{first.factor:.1f} times their bytes; {', or '.join(ways)}"
    )
