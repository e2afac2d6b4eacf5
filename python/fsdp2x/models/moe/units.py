"""Makes units of experts and chooses how they multiply. Every rank runs the same collectives whatever the routing.

Gathers and reductions must come in the same order on all ranks, but a rank runs only the experts that its tokens chose.

Fused experts are one module that every rank runs, so they are one unit. Without tokens they would leave no trace in the
graph, so a rank without tokens gets an empty output that depends on the weights. Gradients are then exactly zero, and
no value can be infinite. Experts in a list belong to the unit of their layer.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2x.base.arguments import checked
from fsdp2x.lifecycle.api import fully_shard
from fsdp2x.sharding.wrap import unsharded_class

# Set on fused experts that expert_parallel spread. Their forward is a collective, which no rank may skip.
PARALLEL_STATE = "_fsdp2x_expert_parallel"


@dataclass(frozen=True)
class ExpertGroup:
    """The fused experts of one block: a module whose parameters have ``num_experts`` rows."""

    name: str
    experts: nn.Module
    num_experts: int


@checked
def find_experts(model: nn.Module) -> list[ExpertGroup]:
    """Returns all fused experts of ``model`` in the order of its modules. Empty if there are none."""
    return [
        ExpertGroup(name, module, count)
        for name, module in model.named_modules()
        if (count := _fused_count(module)) is not None
    ]


def experts_of(model: nn.Module, caller: str) -> list[ExpertGroup]:
    """Does the same, but raises ValueError that begins with ``caller`` if there are none."""
    groups = find_experts(model)
    if not groups:
        raise ValueError(
            f"fsdp2x.{caller}: {type(model).__name__} has no fused experts: expected a module with 3-D weights that "
            "takes hidden states, expert indices, and weights, as in transformers 5"
        )
    return groups


def _fused_count(module: nn.Module) -> int | None:
    """Returns the number of experts if at least two tensors have three dims and equal first dims."""
    stacked = [param for param in module._parameters.values() if param is not None and param.dim() == 3]
    if len(stacked) < 2 or len({param.shape[0] for param in stacked}) != 1:
        return None
    # hidden states, expert indices, their weights: the interface of transformers' experts, whatever the names.
    parameters = list(inspect.signature(unsharded_class(module).forward).parameters)
    return stacked[0].shape[0] if len(parameters) >= 4 else None


logger = logging.getLogger("fsdp2x")

_ALLOWS_NO_TOKENS = "_fsdp2x_allows_no_tokens"


@checked
def shard_experts(model: nn.Module, **options: Any) -> int:
    """Makes a unit of each block's experts. ``fully_shard(model, auto_wrap=True)`` then makes the others.

    Use it to limit the memory of a gather. Without it, experts belong to their layer's unit, which is fastest if the
    layer fits.

    Args:
        model: a model that is not sharded yet.
        options: arguments of ``fully_shard``, such as ``mesh``, ``mp_policy``, ``reshard_after_forward``.

    Returns:
        The number of units.

    Raises:
        ValueError: the model has no fused experts.
    """
    groups = experts_of(model, "shard_experts")
    for group in groups:
        _allow_no_tokens(group)
        fully_shard(group.experts, auto_wrap=False, **options)
    return len(groups)


@checked
def apply_expert_patch(model: nn.Module) -> int:
    """Lets ranks without tokens run fused experts that are a unit. Call it before or after ``fully_shard``.

    A rank without tokens then has gradients of zero, instead of none, and no value is multiplied by zero. You need it
    only if the experts, or the block around them, are a separate unit. If experts are a list of modules, make neither
    each of them nor their block a unit, because ranks would gather different units.

    Returns:
        The number of blocks.

    Raises:
        ValueError: the model has no fused experts.
    """
    groups = experts_of(model, "apply_expert_patch")
    for group in groups:
        _allow_no_tokens(group)
    return len(groups)


def _allow_no_tokens(group: ExpertGroup) -> None:
    module = group.experts
    if hasattr(module, _ALLOWS_NO_TOKENS) or hasattr(module, PARALLEL_STATE):
        return
    setattr(module, _ALLOWS_NO_TOKENS, (module.__dict__.get("forward"),))
    module.forward = types.MethodType(_forward, module)


def _forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Runs fused experts. Without tokens it returns no rows, which depend on the weights."""
    if hidden_states.numel() == 0:
        return _joined(hidden_states, touch(self._parameters.values()))
    (replaced,) = getattr(self, _ALLOWS_NO_TOKENS)
    forward: Callable = types.MethodType(unsharded_class(self).forward, self) if replaced is None else replaced
    return forward(hidden_states, *args, **kwargs)


def touch(tensors: Any) -> torch.Tensor | None:
    """Returns a zero that depends on ``tensors`` that need gradients, which then exist and are zero. Else None."""
    total: torch.Tensor | None = None
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            zero = local.reshape(-1)[:0].sum()
            total = zero if total is None else total + zero
    return total


def _joined(output: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    return output if zero is None else _Joined.apply(output, zero.to(output.dtype))


class _Joined(torch.autograd.Function):
    """Returns ``output`` plus a zero that depends on weights which no token used.

    It saves a tensor and reads it in backward. So a checkpoint around the block recomputes all of it before the first
    expert's backward, and on every rank alike. Otherwise that would depend on the operations that the routing caused.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(zero)
        return output + zero

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (zero,) = ctx.saved_tensors
        return grad, torch.zeros_like(zero)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT_BYTES = 16  # torch's grouped product needs rows of a multiple of this


@checked
def use_grouped_gemm(model: nn.Module, enabled: bool = True) -> str:
    """Chooses how fused experts multiply: ``"grouped_mm"``, or ``"eager"`` for a loop over them.

    It sets the experts implementation of transformers 5, acts at every later forward, and may be called again at any
    time. If torch's grouped product does not fit, it chooses the loop and logs the reason: float64, rows that are not
    multiples of 16 bytes, or a CUDA device before compute capability 8.0.

    Args:
        model: a transformers model, or a wrapper around one, sharded or not.
        enabled: whether to try the grouped product. False chooses the loop.

    Returns:
        The choice.

    Raises:
        ValueError: the model has no fused experts, or those of other libraries, which keep their loop.
    """
    groups = experts_of(model, "use_grouped_gemm")
    outer: Any = next((module for module in model.modules() if hasattr(module, "set_experts_implementation")), None)
    foreign = [group for group in groups if not hasattr(group.experts, "is_concatenated")]
    if outer is None or foreign:
        raise ValueError(
            f"fsdp2x.use_grouped_gemm: the experts {(foreign or groups)[0].name} are not fused experts of transformers "
            "5 with an experts implementation. Load the model with a class of transformers 5, or keep the loop over "
            "its experts."
        )
    choice = "grouped_mm"
    if not enabled:
        choice = "eager"
    elif reason := next((why for group in groups if (why := _unfit(group))), None):
        choice = "eager"
        logger.warning("use_grouped_gemm: using a loop over the experts instead: %s", reason)
    outer.set_experts_implementation(choice)
    return choice


def _unfit(group: ExpertGroup) -> str | None:
    """Returns why torch's grouped product cannot be used, or None."""
    for name, param in group.experts.named_parameters(recurse=False):
        if param.dim() != 3:
            continue
        dtype = param.dtype
        if dtype not in _DTYPES:
            return f"{group.name}.{name} is computed in {dtype}, grouped_mm supports {', '.join(map(str, _DTYPES))}"
        odd = [size for size in param.shape[1:] if size * dtype.itemsize % _ALIGNMENT_BYTES]
        if odd:
            return (
                f"{group.name}.{name} has the shape {tuple(param.shape)}, but rows of {odd[0]} x {dtype} are not a "
                f"multiple of {_ALIGNMENT_BYTES} bytes"
            )
        if param.device.type == "cuda" and torch.cuda.get_device_capability(param.device) < (8, 0):
            return f"compute capability {torch.cuda.get_device_capability(param.device)}, grouped_mm needs 8.0"
    return None
