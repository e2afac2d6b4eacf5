"""What the engine's layout is told of each parameter of a group: the only place that chooses dtypes for it.

The groups that run and the plans of models that do not exist yet both come through here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

# Upstream changed the meaning of MixedPrecisionPolicy(reduce_dtype=None) in 2.15: we do as the installed torch does.
_REDUCES_IN_PARAM_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15)
# Dtypes of gradients that the engine can sum.
REDUCIBLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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
        """``size`` as (outer, dim, inner) around the shard dim."""
        dim = self.shard_dim
        return math.prod(self.size[:dim]), self.size[dim], math.prod(self.size[dim + 1 :])


def layout_shapes(
    params: Iterable[ParamFacts], param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> list[tuple]:
    """A tuple for each parameter: outer, dim, inner, original, compute and reduce dtype, whether it lies in the slot.

    Raises:
        NotImplementedError: a parameter that cannot be cast to ``param_dtype``.
    """
    params = list(params)
    reduce = param_dtype if reduce_dtype is None and _REDUCES_IN_PARAM_DTYPE else reduce_dtype
    if reduce is None:
        for param in params:
            if param.dtype in REDUCIBLE:
                reduce = param.dtype if reduce is None else torch.promote_types(reduce, param.dtype)
    shapes = []
    for param in params:
        casts = param_dtype is not None and param.dtype.is_floating_point and not param.keeps_dtype
        compute = param_dtype if casts else param.dtype
        castable = param.dtype in REDUCIBLE and compute in REDUCIBLE
        if compute != param.dtype and not castable and not param.is_wrapper:
            raise NotImplementedError(
                f"fsdp2x.fully_shard: parameter {param.fqn!r} cannot be cast from {param.dtype} to {compute}"
            )
        shapes.append((*param.view, param.dtype, compute, reduce if castable else param.dtype, not param.is_wrapper))
    return shapes
