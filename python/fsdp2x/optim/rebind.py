"""``rebind_optimizer``: lets an optimizer that holds other parameters than the sharded ones train those.

The optimizer keeps its old parameters, and with them the whole unsharded model, alive until it is rebound.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2x.base.arguments import checked
from fsdp2x.base.optimizer_hooks import original_number, refuse_swapped
from fsdp2x.lifecycle.tree import named_params, units_of
from fsdp2x.optim.moments import narrowed, widened


@checked
def rebind_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """Replaces, in every param group, parameters from before ``fully_shard(model)``, and gathered ones, by the sharded.

    Groups, their options and the order of parameters stay, also for tied weights and for lists that the optimizer holds
    elsewhere. State that exists already (moments of a loaded checkpoint) is cut like its parameter; every rank must
    hold the same. Parameters that are sharded already, ignored by ``fully_shard`` or of other models are left alone, so
    that the call can be repeated, once per model. Local: no communication.

    Returns:
        How many parameters were replaced.

    Raises:
        ValueError: nothing in ``model`` is sharded; the optimizer has no parameter of ``model``, old or new; state of
            a parameter that has neither one element nor the parameter's shape. The optimizer is unchanged then.
        RuntimeError: the averages of an ``EMA`` are swapped in.
    """
    units_of(model, "rebind_optimizer")
    refuse_swapped("fsdp2x.rebind_optimizer", model.parameters())
    current = {id(param) for _, param, _ in named_params(model)}
    records = {record.original: (name, record) for name, _, record in named_params(model) if record is not None}
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    num_known = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            record = records.get(original_number(param) or 0, ("", None))[1]
            if id(param) in current:
                num_known += 1
            elif record is not None:
                replaced[param] = record.param
    if not replaced and not num_known:
        raise ValueError(
            f"fsdp2x.rebind_optimizer: none of the parameters of this {type(optimizer).__name__} is or was one of "
            f"{type(model).__name__}; build the optimizer from the parameters of the model that was sharded"
        )
    states = {
        old: _sharded_state(records[original_number(old) or 0][0], optimizer.state[old], old, new)
        for old, new in replaced.items()
        if old in optimizer.state
    }
    for group in optimizer.param_groups:
        # In place: L-BFGS, for one, keeps the list itself.
        group["params"][:] = [replaced.get(param, param) for param in group["params"]]
    for old, new in replaced.items():
        optimizer.state.pop(old, None)
        if old in states:
            optimizer.state[new] = states[old]
    return len(replaced)


def _sharded_state(name: str, state: dict, old: nn.Parameter, new: nn.Parameter) -> dict:
    result, wide = {}, widened(state)
    for key, value in wide.items():
        if not isinstance(value, torch.Tensor) or value.numel() == 1 and value.shape != old.shape:
            result[key] = value
        elif value.shape == old.shape and not isinstance(value, DTensor):
            value = value.to(new.device)
            if isinstance(new, DTensor):
                value = distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)
            result[key] = value
        else:
            raise ValueError(
                f"fsdp2x.rebind_optimizer: the state {key!r} of parameter '{name}' has shape {tuple(value.shape)}, "
                f"expected {tuple(old.shape)} or one element; rebind before the first step and load the state after it"
            )
    return narrowed(new, result, tuple(key for key in wide if key not in state))
