"""Describes each parameter of a group for the engine's layout, mostly its dtypes, and avoids padding of few rows.

Both running groups and plans of models that do not exist yet use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    grad_dtype: tuple[torch.dtype | None, ...] = ()  # what the user set on the parameter, empty if nothing

    @property
    def view(self) -> tuple[int, int, int]:
        """``size`` as (outer, dim, inner) around the shard dim, in the engine's elements."""
        dim, parts = self.shard_dim, 2 if self.dtype in PARTS else 1
        return math.prod(self.size[:dim]), self.size[dim], math.prod(self.size[dim + 1 :]) * parts

    @property
    def element(self) -> torch.dtype:
        """Dtype of the elements that ``view`` counts."""
        return PARTS.get(self.dtype, self.dtype)

    def computes_in(self, param_dtype: torch.dtype | None) -> torch.dtype:
        """Returns the dtype of the gathered elements under this policy."""
        casts = param_dtype is not None and self.dtype.is_floating_point and not self.keeps_dtype
        return param_dtype if casts and param_dtype is not None else self.element

    def grad_in(self, made: torch.dtype) -> torch.dtype:
        """Returns the dtype of the gradient's elements. ``made``: the one for ``grad_dtype=None``."""
        if not self.grad_dtype:
            return self.element
        dtype = self.grad_dtype[0]
        return made if dtype is None else PARTS.get(dtype, dtype)


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
                dtype = param.grad_in(param.computes_in(param_dtype))
                reduce = dtype if reduce is None else torch.promote_types(reduce, dtype)
    shapes = []
    for param in params:
        original, compute = param.element, param.computes_in(param_dtype)
        castable = original in REDUCIBLE and compute in REDUCIBLE
        if compute != original and not castable and not param.is_wrapper:
            raise NotImplementedError(
                f"fsdp2x.fully_shard: parameter {param.fqn!r} cannot be cast from {param.dtype} to {compute}. Convert "
                "it before fully_shard."
            )
        reduce_as = reduce if castable and reduce is not None else original
        grad = param.grad_in(reduce_as) if param.grad_dtype else None
        takes_any = param.grad_dtype == (None,)
        shapes.append(_C.ParamShape(*param.view, original, compute, reduce_as, not param.is_wrapper, grad, takes_any))
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
    if dtype not in (policy.param_dtype, param.dtype):
        raise ValueError(
            "param_dtype_override_fn must return None, param_dtype, or the parameter's original dtype but got "
            f"{dtype} for a parameter with dtype {param.dtype} and param_dtype {policy.param_dtype}"
        )
    return dtype != policy.param_dtype


# Each rank has room for the largest number of rows on any rank. So 128 experts over 512 ranks would take four times
# their bytes, between steps and in every gather and reduction. From these limits on, another dim is cut.
_WASTED_BYTES = 2**20  # summed over all ranks
_WASTED_FACTOR = 2.0


def even_placement(param: nn.Parameter, world: int) -> Shard | None:
    """Returns ``Shard`` of a dim that divides evenly if rows would at least double the bytes, else None for rows."""
    if param.dim() < 2 or isinstance(param, DTensor) or is_wrapper(param):
        return None
    rows = param.shape[0]
    padded_rows = -(-rows // world) * world
    wasted_bytes = (padded_rows - rows) * math.prod(param.shape[1:]) * param.dtype.itemsize
    even_dim = next((dim for dim, size in enumerate(param.shape) if size and size % world == 0), None)
    if wasted_bytes < _WASTED_BYTES or padded_rows < _WASTED_FACTOR * rows or even_dim is None:
        return None
    return Shard(even_dim)
