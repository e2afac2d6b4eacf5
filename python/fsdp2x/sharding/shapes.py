"""What the engine's layout is told of each parameter of a group, its dtypes above all, and what padding costs.

The groups that run and the plans of models that do not exist yet both come through here.
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

# Upstream changed the meaning of MixedPrecisionPolicy(reduce_dtype=None) in 2.15: we do as the installed torch does.
_REDUCES_IN_PARAM_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15)
# Dtypes of gradients that the engine can sum; complex numbers as pairs of real ones.
REDUCIBLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@dataclass(frozen=True)
class ParamFacts:
    """One parameter: ``size`` is that of the unsharded local tensor, cut along ``shard_dim``."""

    fqn: str
    size: Sequence[int]
    shard_dim: int
    dtype: torch.dtype
    keeps_dtype: bool = False  # computes in its original dtype, whatever the policy says
    is_wrapper: bool = False  # a tensor subclass with an all-gather of its own: not in the slot

    @property
    def view(self) -> tuple[int, int, int]:
        """``size`` as (outer, dim, inner) around the shard dim, in elements that the engine counts."""
        dim, parts = self.shard_dim, 2 if self.dtype in PARTS else 1
        return math.prod(self.size[:dim]), self.size[dim], math.prod(self.size[dim + 1 :]) * parts

    @property
    def element(self) -> torch.dtype:
        """The dtype of what ``view`` counts."""
        return PARTS.get(self.dtype, self.dtype)


def layout_shapes(
    params: Iterable[ParamFacts], param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> list[_C.ParamShape]:
    """What the engine's layout needs to know of each parameter.

    Raises:
        NotImplementedError: a parameter that cannot be cast to ``param_dtype``.
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
                f"fsdp2x.fully_shard: parameter {param.fqn!r} cannot be cast from {param.dtype} to {compute}"
            )
        reduce_as = reduce if castable and reduce is not None else original
        shapes.append(_C.ParamShape(*param.view, original, compute, reduce_as, not param.is_wrapper))
    return shapes


def kept_shapes(shapes: Iterable[_C.ParamShape]) -> list[_C.ParamShape]:
    """The same parameters in the smaller world that keeps them after forward: in the dtype that they compute in."""
    return [
        _C.ParamShape(one.outer, one.dim, one.inner, one.compute, one.compute, one.compute, one.in_slot)
        for one in shapes
    ]


def keeps_dtype(param: nn.Parameter, policy: MixedPrecisionPolicy) -> bool:
    """Whether the policy's ``param_dtype_override_fn`` (torch 2.15) asks for the parameter's original dtype."""
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
# Each rank keeps room for the most rows that any rank has, so 128 experts over 512 ranks take four times their bytes,
# at rest and in every gather and reduction.

# Less padding than this, or a smaller part of the whole, is not worth a word.
_WORTH_BYTES = 2**20
_WORTH_FACTOR = 1.5
# From here on a model that is split without a placement of the user's is cut along another dim.
_AVOIDED_FACTOR = 2.0


@dataclass(frozen=True)
class Padding:
    """One parameter, cut along ``dim`` over ``world`` ranks, takes ``factor`` times its bytes."""

    name: str
    shape: tuple[int, ...]
    dim: int
    world: int
    factor: float
    wasted_bytes: int  # on all ranks together
    even_dim: int | None  # a dim that the ranks divide


def padding_of(name: str, facts: ParamFacts, world: int) -> Padding | None:
    """What padding costs; None where it costs next to nothing."""
    outer, rows, inner = facts.view
    padded_rows = -(-rows // world) * world
    wasted_bytes = outer * (padded_rows - rows) * inner * facts.dtype.itemsize
    if wasted_bytes < _WORTH_BYTES or padded_rows < _WORTH_FACTOR * rows:
        return None
    even = next((dim for dim, size in enumerate(facts.size) if size and size % world == 0), None)
    return Padding(name, tuple(facts.size), facts.shard_dim, world, padded_rows / rows, wasted_bytes, even)


def padding_in(groups: Iterable[Any], model: nn.Module) -> list[Padding]:
    """Of the groups of a sharded model."""
    names = {id(param): name for name, param in model.named_parameters()}
    return [
        one
        for group in groups
        for param in group.params
        if (one := padding_of(names.get(id(param.param), param.fqn), param.facts, group.ranks.world))
    ]


def even_placement(param: nn.Parameter, world: int) -> Shard | None:
    """``Shard`` of a dim that the ranks divide, where rows would at least double the bytes; None: the rows."""
    if param.dim() < 2 or isinstance(param, DTensor) or is_wrapper(param):
        return None
    found = padding_of("", ParamFacts("", tuple(param.shape), 0, param.dtype), world)
    if found is None or found.factor < _AVOIDED_FACTOR or found.even_dim is None:
        return None
    return Shard(found.even_dim)


def advice(found: Sequence[Padding]) -> list[str]:
    """A sentence for each kind of parameter: the same last names and shapes in several blocks count as one."""
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
        ways.append(f"shard_placement_fn=lambda param: Shard({first.even_dim}) for them")
    ways.append("shard over fewer ranks with replicas (HSDP)")
    return (
        f"padding: {names} {first.shape}: {first.shape[first.dim]} rows over {first.world} ranks take "
        f"{first.factor:.1f} times their bytes; {', or '.join(ways)}"
    )
