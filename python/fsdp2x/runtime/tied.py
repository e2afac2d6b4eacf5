"""Tied parameters to which loading with ``assign=True`` gave one object each: the first one serves all, as upstream."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2x.runtime import torch_private

if TYPE_CHECKING:
    from fsdp2x.runtime.sharded_param import ShardedParam


def is_sharded(param: Any) -> bool:
    """Whether a module registers a sharded parameter there."""
    return isinstance(param, DTensor) and isinstance(param, nn.Parameter)


def tie_again(sharded: ShardedParam, before: nn.Parameter) -> None:
    """Registers the parameter of the first owner with the others, too; ``before``: the one they had in common.

    Warns where another owner was given other values, which are dropped.
    """
    for module, name in sharded.owners[1:]:
        other = module._parameters.get(name)
        if not is_sharded(other) or other is sharded.param:
            continue
        if other is not before and _differ(other, sharded.param):
            first = sharded.fqn or sharded.owners[0][1]
            warnings.warn(
                f"fsdp2x: {type(module).__name__}.{name} is tied to '{first}' and was given other values: those of "
                "the first one are used for both",
                stacklevel=2,
            )
        module._parameters[name] = sharded.param


def _differ(one: nn.Parameter, other: nn.Parameter) -> bool:
    """Whether this rank's rows have other values; on the meta device there are none."""
    rows, others = torch_private.local_tensor(one), torch_private.local_tensor(other)
    return not (rows.is_meta or others.is_meta or (rows.shape == others.shape and torch.equal(rows, others)))
