"""``apply_tiled_mlp``: runs gated MLPs in chunks of the sequence, and recomputes each chunk in backward.

The MLP of a long sequence keeps three tensors of the intermediate width until backward. A tiled MLP keeps its input,
and only one chunk's tensors exist at a time. torch's checkpointing runs each chunk. Autograd adds up the gradients of a
parameter before its hooks run, so its unit is reduced once.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from fsdp2x.base.arguments import checked

_ATTRIBUTE = "_fsdp2x_tiling"


@checked
def apply_tiled_mlp(model: nn.Module, num_shards: int = 4) -> int:
    """Makes every gated MLP of ``model`` run in ``num_shards`` chunks of its sequence, to save activation memory.

    It acts at every later forward. Call it before or after ``fully_shard``; a second call changes ``num_shards``.
    Values equal those of the unchunked MLP up to rounding. Gradients are summed over the chunks, in the dtype of the
    weights. Backward costs one more forward of the MLPs.

    It recognizes an MLP by its structure: a ``forward`` of one tensor, an activation, and linear layers, also with
    LoRA. Llama, Qwen, Gemma, Mistral, gated T5, and shared experts have layers of the shapes ``h -> i, h -> i,
    i -> h``. Phi-3, GLM-4, and ModernBERT have ``h -> 2i, i -> h``. Routed experts do not change.

    Args:
        model: any module.
        num_shards: number of chunks along the next to last dim of the input, at most one per token.

    Returns:
        The number of gated MLPs.

    Raises:
        ValueError: the model has no gated MLP, or ``num_shards`` is below 1.
        TypeError: ``num_shards`` is not an int.
        RuntimeError: at forward, if a part of an MLP is a separate unit, which every chunk would gather again.
    """
    if num_shards < 1:
        raise ValueError(f"fsdp2x.apply_tiled_mlp: num_shards must be at least 1, got {num_shards}")
    found = [module for _, module in gated_mlps(model)]
    if not found:
        raise ValueError(
            f"fsdp2x.apply_tiled_mlp: {type(model).__name__} has no gated MLP: expected a forward of one tensor, an "
            "activation, and linear layers h -> i, h -> i, i -> h or h -> 2i, i -> h. Do not tile this model, or use "
            "activation checkpointing for its MLPs."
        )
    for module in found:
        if hasattr(module, _ATTRIBUTE):
            getattr(module, _ATTRIBUTE).num_shards = num_shards
        else:
            setattr(module, _ATTRIBUTE, _Tiling(num_shards, module.__dict__.get("forward")))
            module.forward = types.MethodType(_tiled_forward, module)
    return len(found)


def gated_mlps(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, module) of every gated MLP, except those of routed experts."""
    routed: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts":
            routed.update(module.modules())
        if module not in routed and _is_gated_mlp(module):
            yield name, module


def _is_gated_mlp(module: nn.Module) -> bool:
    linears, activations, others = [], 0, 0
    for child in module.children():
        shape = _linear_shape(child)
        if shape is not None:
            linears.append(shape)
        elif isinstance(child, nn.Dropout):
            pass
        elif next(child.parameters(), None) is None:
            activations += 1
        else:
            others += 1
    # Activations of transformers are modules or plain functions.
    activations += sum(name.startswith(("act", "activation")) and callable(v) for name, v in vars(module).items())
    if others or not activations or module._parameters or not _takes_one_tensor(module):
        return False
    inwards = {shape: linears.count(shape) for shape in linears}
    if len(linears) == 3:
        return any(
            count >= 2 and (inner, outer) in inwards and (inner != outer or count == 3)
            for (outer, inner), count in inwards.items()
        )
    if len(linears) == 2:
        (first_in, first_out), second = linears
        return second[1] == first_in and first_out == 2 * second[0]
    return False


def _linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """Returns (in, out) of a linear layer, also of one that LoRA wraps."""
    size_in, size_out = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return (size_in, size_out) if isinstance(size_in, int) and isinstance(size_out, int) else None


def _takes_one_tensor(module: nn.Module) -> bool:
    if hasattr(module, _ATTRIBUTE):
        return True
    parameters = list(inspect.signature(module.forward).parameters.values())
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return len(parameters) == 1 and parameters[0].kind is positional


# ---- at forward


@dataclass
class _Tiling:
    num_shards: int
    replaced: Callable[[torch.Tensor], torch.Tensor] | None  # a forward that other code had put on the module

    def whole(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Runs the original MLP. Looks up its class now, because ``fully_shard`` changes it."""
        return type(module).forward(module, x) if self.replaced is None else self.replaced(x)


def _tiled_forward(self: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    (x,) = (*args, *kwargs.values())
    dim = max(x.dim() - 2, 0)
    tiling: _Tiling = getattr(self, _ATTRIBUTE)
    rows = -(-x.shape[dim] // tiling.num_shards)
    if rows == x.shape[dim] or x.dim() < 2:
        return tiling.whole(self, x)
    for part in self.modules():
        if part is not self and isinstance(part, FSDPModule):
            raise RuntimeError(
                f"fsdp2x.apply_tiled_mlp: {type(part).__name__} inside of {type(self).__name__} is a separate unit, "
                "which every chunk would gather again. Make the MLP or its block the unit instead."
            )
    parts = [checkpoint(tiling.whole, self, part, use_reentrant=False) for part in x.split(rows, dim)]
    return torch.cat(parts, dim)
