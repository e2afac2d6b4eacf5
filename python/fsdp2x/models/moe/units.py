"""Makes units of experts and chooses how they multiply. Every rank runs the same collectives whatever the routing.

Gathers and reductions must come in the same order on all ranks, but a rank runs only the experts that its tokens chose.

* Fused experts are one module that every rank runs, so they are one unit. Without tokens they would leave no trace in
  the graph, so a rank without tokens gets an empty output that depends on the weights.
* Experts in a list are called one by one, only those with tokens, in ascending order. A block that is one unit needs
  only that trace. If each expert is a unit, a skipped expert runs on no rows at its turn:

      rank 0    e0(5 rows)  e1(0 rows)  e2(9 rows)  e3(0 rows)
      rank 1    e0(0 rows)  e1(2 rows)  e2(0 rows)  e3(7 rows)      gathers, backwards and reductions in one order

  Without rows, gradients are exactly zero, and no value can be infinite."""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp2x.base.arguments import checked
from fsdp2x.lifecycle.api import fully_shard
from fsdp2x.sharding.wrap import unsharded_class

# Set on fused experts that expert_parallel spread. Their forward is a collective, which no rank may skip.
PARALLEL_STATE = "_fsdp2x_expert_parallel"


@dataclass(frozen=True)
class ExpertGroup:
    """The experts of one block.

    ``experts`` is the fused module (``is_fused``; transformers 5), whose parameters have ``num_experts`` rows, or the
    ``ModuleList`` (transformers 4 and remote code). ``block`` is the innermost module with a forward around them.
    """

    name: str
    experts: nn.Module
    block: nn.Module
    num_experts: int
    is_fused: bool

    @property
    def members(self) -> list[nn.Module]:
        """Returns the experts of a list."""
        return list(cast("nn.ModuleList", self.experts))


@checked
def find_experts(model: nn.Module) -> list[ExpertGroup]:
    """Returns all experts of ``model`` in the order of its modules. Empty if there are none."""
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        block = modules.get(name.rpartition(".")[0], model)
        if (count := _fused_count(module)) is not None:
            found.append(ExpertGroup(name, module, block, count, True))
        elif _is_list(module, name) and unsharded_class(block).forward is not nn.Module.forward:
            found.append(ExpertGroup(name, module, block, len(module), False))
    return found


def experts_of(model: nn.Module, caller: str) -> list[ExpertGroup]:
    """Does the same, but raises ValueError that begins with ``caller`` if there are none."""
    groups = find_experts(model)
    if not groups:
        raise ValueError(
            f"fsdp2x.{caller}: {type(model).__name__} has no experts: expected a module with 3-D weights that takes "
            "hidden states, expert indices, and weights, or a ModuleList named 'experts'"
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


def _is_list(module: nn.Module, name: str) -> TypeGuard[nn.ModuleList]:
    if not isinstance(module, nn.ModuleList) or name.rpartition(".")[2] != "experts" or len(module) < 2:
        return False
    return len({unsharded_class(expert) for expert in module}) == 1


logger = logging.getLogger("fsdp2x")

_TURNS = "_fsdp2x_turns"
_ALLOWS_NO_TOKENS = "_fsdp2x_allows_no_tokens"


@checked
def shard_experts(model: nn.Module, *, per: Literal["block", "expert"] = "block", **options: Any) -> int:
    """Makes units of the experts. ``fully_shard(model, auto_wrap=True)`` then makes the others.

    Use it to limit the memory of a gather. Without it, experts belong to their layer's unit, which is fastest if the
    layer fits.

    Args:
        model: a model that is not sharded yet.
        per: ``"block"`` for one unit of the fused experts, or of the block around a list (with router and shared
            expert). ``"expert"`` for one unit of each expert of a list. Experts without tokens then run on no rows.
        options: arguments of ``fully_shard``, such as ``mesh``, ``mp_policy``, ``reshard_after_forward``.

    Returns:
        The number of units.

    Raises:
        ValueError: the model has no experts, or ``per`` is unknown.
        NotImplementedError: ``per="expert"`` with fused experts, or with experts that take more than one tensor.
    """
    groups = experts_of(model, "shard_experts")
    fused = [group for group in groups if group.is_fused]
    if per == "expert" and fused:
        raise NotImplementedError(
            f"fsdp2x.shard_experts: {fused[0].name} holds {fused[0].num_experts} experts in each of its tensors, so "
            'they cannot be separate units. Use per="block" or expert_parallel.'
        )
    count = 0
    for group in groups:
        if group.is_fused:
            allow_no_tokens(group.experts)
            units = [group.experts]
        elif per == "block":
            group.block.register_forward_hook(_connect)
            units = [group.block]
        else:
            take_turns(group)
            units = group.members
        for unit in units:
            fully_shard(unit, auto_wrap=False, **options)
        count += len(units)
    return count


@checked
def apply_expert_patch(model: nn.Module) -> int:
    """Makes any routing safe if each expert is a unit. Call it before or after ``fully_shard``; it may repeat.

    Only lists whose experts are each a unit, by ``fully_shard(expert)`` or by class name, need it. Their experts then
    run on no rows if they have no tokens, through hooks, and no value is multiplied by zero. Every rank runs fused
    experts (transformers 5), and experts inside another unit belong to that unit.

    Returns:
        The number of blocks that needed it.

    Raises:
        ValueError: the model has no experts.
    """
    count = 0
    for group in experts_of(model, "apply_expert_patch"):
        if group.is_fused:
            allow_no_tokens(group.experts)
        else:
            take_turns(group)
            count += 1
    if count == 0:
        logger.info(
            "apply_expert_patch: nothing to patch, because the experts of %s are fused and every rank runs them",
            type(model).__name__,
        )
    return count


# ---- fused experts


def allow_no_tokens(experts: nn.Module) -> None:
    """Makes fused experts without tokens return no rows that depend on their weights, instead of running."""
    if hasattr(experts, _ALLOWS_NO_TOKENS) or hasattr(experts, PARALLEL_STATE):
        return
    setattr(experts, _ALLOWS_NO_TOKENS, (experts.__dict__.get("forward"),))
    experts.forward = types.MethodType(_forward, experts)


def _forward(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
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


# ---- lists of experts


def _connect(block: nn.Module, args: tuple, output: Any) -> Any:
    """Makes an output without graph (no tokens, no expert ran) depend on the block's weights.

    Runs before the unit's hook. Otherwise backward would skip the unit on this rank, and the others would gather it
    alone.
    """
    first, *rest = output if isinstance(output, tuple) else (output,)
    if first.requires_grad or not torch.is_grad_enabled():
        return None
    first = _joined(first, touch([*block.parameters(), *(one for one in args if isinstance(one, torch.Tensor))]))
    return (first, *rest) if isinstance(output, tuple) else first


def take_turns(group: ExpertGroup) -> None:
    """Makes experts that are units run in ascending order on every rank, on no rows if they have no tokens."""
    if not hasattr(group.block, _TURNS):
        for expert in group.members:
            _check_signature(expert, group.name)
        setattr(group.block, _TURNS, _Turns(group))


def _check_signature(expert: nn.Module, name: str) -> None:
    parameters = inspect.signature(unsharded_class(expert).forward).parameters.values()
    required = [p for p in list(parameters)[1:] if p.default is inspect.Parameter.empty and p.kind < p.VAR_POSITIONAL]
    if len(required) != 1:
        raise NotImplementedError(
            f"fsdp2x.moe: the forward of experts of {name} ({unsharded_class(expert).__name__}) takes "
            f"{', '.join(p.name for p in required)}, but only experts that take one tensor can be separate units. "
            'Use shard_experts(model, per="block").'
        )


class _Turns:
    """Hooks on one block and its experts. Their state lives from the block's pre-forward to its post-forward."""

    def __init__(self, group: ExpertGroup) -> None:
        self._experts, self._name = group.members, group.name
        self._no_rows: torch.Tensor | None = None
        self._next = 0  # the expert whose turn it is
        self._passed_over: list[torch.Tensor] = []
        self._passing = False  # an expert runs on no rows
        self._hooked = False
        group.block.register_forward_pre_hook(self._begin, with_kwargs=True)
        group.block.register_forward_hook(self._end)

    def _begin(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        if not any(isinstance(expert, FSDPModule) for expert in self._experts):
            self._no_rows = None
            return
        if not self._hooked:
            # Registered now, after all sharding and before the hooks that gather, so that earlier experts come first.
            for index, expert in enumerate(self._experts):
                expert.register_forward_pre_hook(lambda *_, index=index: self._turn(index), prepend=True)
            self._hooked = True
        (hidden, *_) = (*args, *kwargs.values())
        self._no_rows = hidden.reshape(-1, hidden.shape[-1])[:0]
        self._next, self._passed_over = 0, []

    def _turn(self, index: int) -> None:
        if self._no_rows is None or self._passing:
            return
        if index < self._next:
            raise RuntimeError(
                f"fsdp2x.moe: expert {index} of {self._name} was called after expert {self._next - 1}, but experts "
                'that are units must be called once each, in ascending order. Use shard_experts(model, per="block").'
            )
        self._pass_over(index)
        self._next = index + 1

    def _pass_over(self, until: int) -> None:
        while self._next < until:
            expert = self._experts[self._next]
            self._next += 1
            self._passing = True
            try:
                self._passed_over.append(expert(self._no_rows))
            finally:
                self._passing = False

    def _end(self, block: nn.Module, args: tuple, output: Any) -> Any:
        if self._no_rows is None:
            return None
        self._pass_over(len(self._experts))
        zeros = [out.sum() for out in self._passed_over if out.requires_grad]
        self._no_rows, self._passed_over = None, []
        first, *rest = output if isinstance(output, tuple) else (output,)
        if not torch.is_grad_enabled() or not (first.requires_grad or zeros):
            return None
        zero = torch.stack(zeros).sum() if zeros else first.new_zeros(())
        first = _joined(first, zero)
        return (first, *rest) if isinstance(output, tuple) else first


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT_BYTES = 16  # torch's grouped product needs rows of a multiple of this


@checked
def use_grouped_gemm(model: nn.Module, enabled: bool = True, *, compute_dtype: torch.dtype | None = None) -> str:
    """Chooses how fused experts multiply: ``"grouped_mm"``, or ``"eager"`` for a loop over them.

    It sets the experts implementation of transformers 5, acts at every later forward, and may be called again at any
    time. If torch's grouped product does not fit, it chooses the loop and logs the reason: float64, rows that are not
    multiples of 16 bytes, or a CUDA device before compute capability 8.0.

    Args:
        model: a transformers model, or a wrapper around one, sharded or not.
        enabled: whether to try the grouped product. False chooses the loop.
        compute_dtype: dtype of the weights in forward, if a mixed precision policy changes it.

    Returns:
        The choice.

    Raises:
        ValueError: the model has no experts, or only lists or experts of other libraries, which keep their loop.
    """
    groups = experts_of(model, "use_grouped_gemm")
    outer: Any = next((module for module in model.modules() if hasattr(module, "set_experts_implementation")), None)
    foreign = [group for group in groups if not (group.is_fused and hasattr(group.experts, "is_concatenated"))]
    if outer is None or foreign:
        raise ValueError(
            f"fsdp2x.use_grouped_gemm: the experts {(foreign or groups)[0].name} are not fused experts of transformers "
            "5 with an experts implementation. Load the model with a class of transformers 5, or keep the loop over "
            "its experts."
        )
    choice = "grouped_mm"
    if not enabled:
        choice = "eager"
    elif reason := next((why for group in groups if (why := _unfit(group, compute_dtype))), None):
        choice = "eager"
        logger.warning("use_grouped_gemm: using a loop over the experts instead: %s", reason)
    outer.set_experts_implementation(choice)
    return choice


def _unfit(group: ExpertGroup, compute_dtype: torch.dtype | None) -> str | None:
    """Returns why torch's grouped product cannot be used, or None."""
    if not hasattr(torch.nn.functional, "grouped_mm") and not hasattr(torch, "_grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    for name, param in group.experts.named_parameters(recurse=False):
        if param.dim() != 3:
            continue
        dtype = compute_dtype or param.dtype
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
