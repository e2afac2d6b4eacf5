"""What the engine's layout is told of each parameter of a group: the only place that chooses dtypes for it.

The groups that run and the plans of models that do not exist yet both come through here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.base.native import _C

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
