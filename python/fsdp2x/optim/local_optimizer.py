"""Any element-wise torch optimizer over the local shards, without DTensor dispatch."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.base.optimizer_hooks import refuse_stale
from fsdp2x.optim.element_wise import INSTEAD, require_element_wise
from fsdp2x.optim.engine_step import EngineStep
from fsdp2x.optim.local import local_tensor, loss_of, refuse_sparse

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


@checked
def local_optimizer(optimizer: OptimizerT) -> OptimizerT:
    """Makes ``optimizer`` step over the local shards of its DTensor parameters; returns the same object.

        optimizer = fsdp2x.local_optimizer(torch.optim.NAdam(model.parameters(), lr=1e-3))

    For optimizers whose update of an element depends on that element's gradient and state alone, of torch or of others:
    such a step needs no collective, and DTensor's dispatch, most of the cost of a step over many small parameters, is
    left out. Parameter groups, schedulers, step hooks, ``state_dict`` (DTensors, as torch's; DCP works) and closures
    stay as they were; ``step`` computes bit for bit what it did. Parameters that are not DTensors are stepped as
    before. ``fsdp2x.optim.AdamW``, ``SGD`` and ``Muon`` look at shards already and are returned unchanged.

    A trial decides whether an optimizer is of this kind: copies of it, with its settings, step small tensors, complete
    and cut. It changes neither the optimizer nor its parameters nor random numbers. ``add_param_group`` repeats it.

    Raises:
        NotImplementedError: an optimizer that is not element-wise (Adafactor, LAMB, LARS, LBFGS, Muon, NovoGrad,
            Prodigy, Shampoo), or that cannot be tried: it cannot be copied, or its step raises or needs a closure; in
            ``step``, a state that is neither a scalar nor of its parameter's shape, or that of a parameter which the
            optimizer keeps outside of its groups.
        TypeError: not a ``torch.optim.Optimizer``.
        ValueError: parameters from before ``fully_shard``, or gathered ones: stepping them would not change the model;
            in ``step``, a gradient or a state that is cut otherwise than its parameter.
    """
    if isinstance(optimizer, EngineStep) or hasattr(optimizer, "_whole_step"):
        return optimizer
    kind: Any = type(optimizer)
    for group in optimizer.param_groups:
        refuse_stale("local_optimizer", group["params"])
    step = kind.step
    # Step hooks belong around ours, where parameter groups hold the parameters, so torch's wrapper is taken off here
    # and put on again around the new class's step.
    whole_step = step.__wrapped__ if getattr(step, "hooked", False) else step
    require_element_wise(optimizer, whole_step)
    members = {"_whole_step": whole_step, "step": _step_locally, "refuses_stale_params": True}
    members["add_param_group"] = functools.partialmethod(_add_param_group, kind)
    # A second base would change the layout of objects, with which Python refuses their new class.
    optimizer.__class__ = type(f"Local{kind.__name__}", (kind,), members)
    optimizer._patch_step_function()
    _replace_wrapped_step(optimizer)
    return optimizer


def _replace_wrapped_step(optimizer: torch.optim.Optimizer) -> None:
    """A scheduler that was made before has put a wrapper of the class's old step on the optimizer."""
    wrapper = vars(optimizer).pop("step", None)
    if wrapper is None:
        return
    weak = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        current: Any = weak()
        current._opt_called = True
        return type(current).step(current, *args, **kwargs)

    vars(step).update({name: value for name, value in vars(wrapper).items() if name.startswith("_wrapped_by")})
    optimizer.step = step  # type: ignore[method-assign]


def _add_param_group(self: Any, kind: type, param_group: dict[str, Any]) -> None:
    kind.add_param_group(self, param_group)
    try:
        require_element_wise(self, type(self)._whole_step)
    except NotImplementedError:
        self.param_groups.pop()
        raise


@torch.no_grad()
def _step_locally(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """The step of a class made by ``local_optimizer``. Nothing is remembered between steps."""
    loss = loss_of(closure)
    whole_state, whole_params = self.state, [group["params"] for group in self.param_groups]
    state: defaultdict[Tensor, dict] = defaultdict(dict)
    stand_ins = [[_stand_in(param, whole_state, state) for param in params] for params in whole_params]
    # What an optimizer keeps under other keys, of all parameters together.
    known = {param for params in whole_params for param in params}
    state.update({key: value for key, value in whole_state.items() if key not in known})
    try:
        self.state = state
        for group, params in zip(self.param_groups, stand_ins, strict=True):
            group["params"] = params
        self._whole_step()
    finally:
        self.state = whole_state
        for group, params in zip(self.param_groups, whole_params, strict=True):
            group["params"] = params
    for params, locals_ in zip(whole_params, stand_ins, strict=True):
        for param, local in zip(params, locals_, strict=True):
            if local is not param:
                local.grad = None
            if local in state:
                _take_over(self, param, local, whole_state[param], state.pop(local))
    if any(key in known for key in state):
        raise NotImplementedError(
            f"fsdp2x.local_optimizer: {type(self).__name__} steps parameters that it keeps outside of its groups. "
            f"Use {INSTEAD}."
        )
    whole_state.update(state)
    return loss


def _stand_in(param: Tensor, whole_state: dict, state: dict) -> Tensor:
    """The tensor that is stepped for ``param``, with its gradient and state."""
    if not isinstance(param, DTensor):
        if param in whole_state:
            state[param] = whole_state[param]
        return param
    local = local_tensor(param)
    grad = param.grad
    if grad is not None:
        refuse_sparse("local_optimizer", grad)
    local.grad = _cut_alike(param, grad, "gradient")
    if param in whole_state:
        state[local] = {name: _cut_alike(param, value, name) for name, value in whole_state[param].items()}
    return local


def _cut_alike(param: DTensor, value: Any, name: str) -> Any:
    if not isinstance(value, DTensor):
        return value
    if value.device_mesh != param.device_mesh or value.placements != param.placements:
        raise ValueError(
            f"fsdp2x.local_optimizer: the {name} of a parameter of shape {tuple(param.shape)} has placements "
            f"{value.placements}, its parameter {param.placements}; redistribute it, or use the optimizer as it is"
        )
    return local_tensor(value)


def _take_over(optimizer: torch.optim.Optimizer, param: Any, local: Tensor, whole: dict, state: dict) -> None:
    """Brings what a step put into the state of ``local`` into the state of ``param``, as DTensors."""
    if local is param:
        if whole is not state:
            whole.update(state)
        return
    for name in [name for name in whole if name not in state]:
        del whole[name]
    for name, value in state.items():
        known = whole.get(name)
        if isinstance(known, DTensor) and torch_private.local_tensor(known) is value:
            continue
        if isinstance(value, Tensor) and value.ndim > 0:
            if value.shape != local.shape:
                raise NotImplementedError(
                    f"fsdp2x.local_optimizer: {type(optimizer).__name__} keeps {name!r} of shape {tuple(value.shape)} "
                    f"for a local shard of shape {tuple(local.shape)}, so it is not element-wise; use {INSTEAD}"
                )
            value = DTensor.from_local(
                value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        whole[name] = value
