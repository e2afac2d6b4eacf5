"""``apply_tiled_mlp``: runs gated MLPs in chunks of the sequence, recomputes them in backward, and sums gradients once.

The MLP of a long sequence keeps three tensors of the intermediate width until backward. A tiled MLP keeps its input,
and only one chunk's tensors exist at a time. All chunks are one autograd node, so a parameter gets one gradient per
backward and its unit is reduced once:

    forward    x | c0 | c1 | c2 |  ->  out     without graph, chunk after chunk into one buffer; x is saved
    backward   for each chunk: run it again with a graph, add its weight gradients to the totals, write its rows of dx
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp2x.base.arguments import checked

_ATTRIBUTE = "_fsdp2x_tiling"
_LOW_PRECISION = (torch.bfloat16, torch.float16)


@checked
def apply_tiled_mlp(model: nn.Module, num_shards: int = 4, model_type: str | None = None) -> int:
    """Makes every gated MLP of ``model`` run in ``num_shards`` chunks of its sequence, to save activation memory.

    It acts at every later forward. Call it before or after ``fully_shard``; a second call changes ``num_shards``.
    Values equal those of the unchunked MLP up to rounding. Gradients are summed over the chunks, in float32 for
    bfloat16 and float16 weights. Backward costs one more forward of the MLPs.

    It recognizes an MLP by its structure: a ``forward`` of one tensor, an activation, and linear layers, also with
    LoRA. Llama, Qwen, Gemma, Mistral, gated T5, and shared experts have layers of the shapes ``h -> i, h -> i,
    i -> h``. Phi-3, GLM-4, and ModernBERT have ``h -> 2i, i -> h``. Routed experts do not change.

    Args:
        model: any module.
        num_shards: number of chunks along the next to last dim of the input, at most one per token.
        model_type: required ``config.model_type``, or None for any.

    Returns:
        The number of gated MLPs.

    Raises:
        ValueError: the model has no gated MLP, ``num_shards`` is below 1, or ``model_type`` differs.
        TypeError: ``num_shards`` is not an int.
        RuntimeError: at forward, if a part of an MLP is a separate unit, which every chunk would gather again.
    """
    if num_shards < 1:
        raise ValueError(f"fsdp2x.apply_tiled_mlp: num_shards must be at least 1, got {num_shards}")
    _check_model_type(model, model_type)
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


def _check_model_type(model: nn.Module, model_type: str | None) -> None:
    if model_type is None:
        return
    configs = [getattr(module, "config", None) for module in model.modules()]
    present = sorted({name for config in configs if isinstance(name := getattr(config, "model_type", None), str)})
    if model_type not in present:
        raise ValueError(
            f"fsdp2x.apply_tiled_mlp: expected the model_type {model_type!r}, the model's config has "
            f"{' and '.join(map(repr, present)) or 'none'}. Omit model_type, which is optional."
        )


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
    length = x.shape[dim]
    tiling: _Tiling = getattr(self, _ATTRIBUTE)
    rows = -(-length // tiling.num_shards)
    if rows == length or x.dim() < 2:
        return tiling.whole(self, x)
    call = _Call(self, dim, [(start, min(rows, length - start)) for start in range(0, length, rows)])
    if not torch.is_grad_enabled() or not (x.requires_grad or call.params):
        return call.run(x)
    return _TiledMlp.apply(call, x, *call.params)


class _Call:
    """One forward of one MLP: its chunks, its current trainable parameters, and what recomputation needs."""

    def __init__(self, module: nn.Module, dim: int, chunks: list[tuple[int, int]]) -> None:
        self.module, self.dim, self.chunks = module, dim, chunks
        self._owners: list[tuple[nn.Module, str, int]] = []  # places that register parameter number i
        self.params: list[nn.Parameter] = []
        self._draws_random_numbers = False
        numbers: dict[int, int] = {}
        for part in module.modules():
            if part is not module and isinstance(part, FSDPModule):
                raise RuntimeError(
                    f"fsdp2x.apply_tiled_mlp: {type(part).__name__} inside of {type(module).__name__} is a separate "
                    "unit, which every chunk would gather again. Make the MLP or its block the unit instead."
                )
            self._draws_random_numbers |= isinstance(part, nn.Dropout) and part.training and part.p > 0
            for name, param in part._parameters.items():
                if param is None or not param.requires_grad:
                    continue
                if id(param) not in numbers:
                    numbers[id(param)] = len(self.params)
                    self.params.append(param)
                self._owners.append((part, name, numbers[id(param)]))
        self._autocast: list[contextlib.AbstractContextManager] = []
        self._rng: tuple[list[int], list[torch.Tensor]] | None = None

    def forward_of(self, part: torch.Tensor) -> torch.Tensor:
        return getattr(self.module, _ATTRIBUTE).whole(self.module, part)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output, computed chunk after chunk into one buffer."""
        out: torch.Tensor | None = None
        for start, size in self.chunks:
            part = self.forward_of(x.narrow(self.dim, start, size))
            if out is None:
                out = part.new_empty((*x.shape[:-1], part.shape[-1]))
            out.narrow(self.dim, start, size).copy_(part)
        assert out is not None, "a sequence has at least two chunks"
        return out

    def remember(self, x: torch.Tensor) -> None:
        """Saves what makes recomputation equal: random numbers of dropout, and autocast."""
        device = x.device.type
        if self._draws_random_numbers:
            devices = [x.device.index or 0] if device != "cpu" else []
            states = [torch.get_rng_state()]
            states += [getattr(torch, device).get_rng_state(index) for index in devices]
            self._rng = devices, states
        kinds = {"cpu", device}
        self._autocast = [
            torch.autocast(
                kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind), cache_enabled=False
            )
            for kind in sorted(kinds)
        ]

    @contextlib.contextmanager
    def again(self, leaves: list[torch.Tensor], device: str) -> Iterator[None]:
        """Makes modules use ``leaves`` as parameters during recomputation, so that no parameter hook runs per chunk."""
        with contextlib.ExitStack() as stack:
            if self._rng is not None:
                devices, states = self._rng
                stack.enter_context(torch.random.fork_rng(devices, device_type=device if devices else "cuda"))
                torch.set_rng_state(states[0])
                for index, state in zip(devices, states[1:], strict=True):
                    getattr(torch, device).set_rng_state(state, index)
            for context in self._autocast:
                stack.enter_context(context)
            for part, name, number in self._owners:
                stack.callback(part._parameters.__setitem__, name, part._parameters[name])
                registry: dict[str, Any] = part._parameters
                registry[name] = leaves[number]
            yield


class _TiledMlp(torch.autograd.Function):
    """All chunks of one MLP as one autograd node."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: torch.Tensor, *params: nn.Parameter) -> torch.Tensor:
        call.remember(x)
        ctx.call = call
        ctx.save_for_backward(x)
        return call.run(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        call: _Call = ctx.call
        leaves = [param.detach().requires_grad_() for param in call.params]
        totals: list[torch.Tensor | None] = [None] * len(leaves)
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[1] else None
        with call.again(leaves, x.device.type):
            for start, size in call.chunks:
                part = x.narrow(call.dim, start, size).detach().requires_grad_(grad_x is not None)
                with torch.enable_grad():
                    out = call.forward_of(part)
                above = grad.narrow(call.dim, start, size)
                wanted = leaves if grad_x is None else [part, *leaves]
                found: list[torch.Tensor | None] = list(torch.autograd.grad(out, wanted, above, allow_unused=True))
                del out
                if grad_x is not None and (part_grad := found.pop(0)) is not None:
                    grad_x.narrow(call.dim, start, size).copy_(part_grad)
                _add(totals, found)
        return (None, grad_x, *totals)


def _add(totals: list[torch.Tensor | None], found: list[torch.Tensor | None]) -> None:
    """Adds one chunk's gradients to the totals in place, in float32 for narrower weights."""
    owned: set[int] = set()
    for index, grad in enumerate(found):
        if grad is None:
            continue
        total = totals[index]
        if total is not None:
            total.add_(grad)
            continue
        wide = grad.float() if grad.dtype in _LOW_PRECISION else grad
        # Two parameters may get one tensor, but each total needs separate memory.
        totals[index] = wide.clone() if wide._base is not None or id(wide) in owned else wide
        owned.add(id(wide))
