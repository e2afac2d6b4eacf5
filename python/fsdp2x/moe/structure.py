"""Finds the experts of a model by their structure: fused into tensors of one row per expert, or a list of modules."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn

from fsdp2x.arguments import checked
from fsdp2x.units.names import unsharded_class

# On fused experts that expert_parallel spread: their forward is a collective, which no rank may skip.
PARALLEL_STATE = "_fsdp2x_expert_parallel"


@dataclass(frozen=True)
class ExpertGroup:
    """The experts of one block.

    ``experts``: the fused module (``is_fused``; transformers 5), whose parameters have ``num_experts`` rows, or the
    ``ModuleList`` (transformers 4 and remote code). ``block``: the innermost module with a forward around them.
    """

    name: str
    experts: nn.Module
    block: nn.Module
    num_experts: int
    is_fused: bool


@checked
def find_experts(model: nn.Module) -> list[ExpertGroup]:
    """All experts of ``model`` in the order of its modules; empty for a model without any."""
    modules = dict(model.named_modules())
    found = []
    for name, module in modules.items():
        block = modules.get(name.rpartition(".")[0], model)
        if (count := _fused_count(module)) is not None:
            found.append(ExpertGroup(name, module, block, count, True))
        elif _is_list(name, module) and unsharded_class(block).forward is not nn.Module.forward:
            found.append(ExpertGroup(name, module, block, len(module), False))
    return found


def experts_of(model: nn.Module, caller: str) -> list[ExpertGroup]:
    """The same; raises ValueError, which begins with ``caller``, where there are none."""
    groups = find_experts(model)
    if not groups:
        raise ValueError(
            f"fsdp2x.{caller}: {type(model).__name__} has no experts: neither a module with 3-D weights that takes "
            "hidden states, expert indices and weights, nor a ModuleList named 'experts'"
        )
    return groups


def _fused_count(module: nn.Module) -> int | None:
    """The number of experts, when two tensors or more have three dims, the first of them the same size."""
    stacked = [param for param in module._parameters.values() if param is not None and param.dim() == 3]
    if len(stacked) < 2 or len({param.shape[0] for param in stacked}) != 1:
        return None
    # hidden states, which experts, their weights: the interface of transformers' experts, whatever the names.
    parameters = list(inspect.signature(unsharded_class(module).forward).parameters)
    return stacked[0].shape[0] if len(parameters) >= 4 else None


def _is_list(name: str, module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList) or name.rpartition(".")[2] != "experts" or len(module) < 2:
        return False
    return len({unsharded_class(expert) for expert in module}) == 1
