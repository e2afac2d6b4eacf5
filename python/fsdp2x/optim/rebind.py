"""``rebind_optimizer``: makes an optimizer train the sharded parameters in place of those that they replaced.

Until then the optimizer keeps its old parameters, and with them the full unsharded model, alive.
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
    """Replaces old parameters of an optimizer by the sharded ones, in every parameter group. Not collective.

    Use it if the optimizer was built before ``fully_shard(model)``, or while parameters were gathered. Groups, their
    options and the order of parameters stay. Existing state (moments of a loaded checkpoint) is cut like its parameter,
    so every rank must hold the same. Other parameters do not change, so you may call it once per model.

    Args:
        optimizer: the optimizer.
        model: a sharded model.

    Returns:
        The number of replaced parameters.

    Raises:
        ValueError: nothing in ``model`` is sharded, the optimizer has no parameter of ``model``, old or new, or a state
            has neither one element nor the parameter's shape. The optimizer does not change.
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
            f"{type(model).__name__}. Build the optimizer from the parameters of the model that was sharded."
        )
    states = {
        old: _sharded_state(records[original_number(old) or 0][0], optimizer.state[old], old, new)
        for old, new in replaced.items()
        if old in optimizer.state
    }
    for group in optimizer.param_groups:
        # In place, because L-BFGS, for example, keeps the list itself.
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
                f"expected {tuple(old.shape)} or one element. Rebind before the first step and load the state after it."
            )
    return narrowed(new, result, tuple(key for key in wide if key not in state))
