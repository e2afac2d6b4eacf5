"""Runs an element-wise torch optimizer over local shards, without DTensor dispatch.

An element-wise step gives a part of a tensor the same numbers as the complete tensor gives that part. Norms of a
tensor, sums over all parameters, factored states, and blocks do not.
"""

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
from fsdp2x.optim.engine_step import EngineStep
from fsdp2x.optim.local import cut_like, local_tensor, loss_of, refuse_sparse

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)

# torch's formulas of these use no norm, mean, or product over elements, whatever their settings.
_ELEMENT_WISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW,
    torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
# Rows and columns of squares, products of all elements, and products of matrices.
_NOT_ELEMENT_WISE = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)
_INSTEAD = (
    "it without local_optimizer, if it steps DTensors, or one of fsdp2x.optim, such as AdamW(moments_dtype='int8') or "
    "Muon"
)


@checked
def local_optimizer(optimizer: OptimizerT, *, elementwise: bool = False) -> OptimizerT:
    """Makes ``optimizer`` step over the local shards of its DTensor parameters. Returns the same object.

        optimizer = fsdp2x.local_optimizer(torch.optim.NAdam(model.parameters(), lr=1e-3))

    Use it for element-wise optimizers: those whose update of an element depends only on its own gradient and state. The
    step then avoids DTensor's dispatch, most of the cost for many small parameters, and computes the same bits. Groups,
    schedulers, hooks, closures, and ``state_dict`` (DTensors, DCP works) do not change. ``fsdp2x.optim``'s optimizers
    are returned unchanged.

    Args:
        optimizer: Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop, or SGD of
            ``torch.optim``, a subclass with the same step, or any other element-wise optimizer.
        elementwise: whether you know that an optimizer of another class is element-wise. fsdp2x cannot check it: steps
            of an optimizer that uses norms or means over a tensor would train something else.

    Raises:
        NotImplementedError: the optimizer is of another class and ``elementwise`` is not set, or it is ``Adafactor``,
            ``LBFGS``, or ``Muon``, or in ``step``, it keeps other state than scalars and tensors of the parameter's
            shape, or parameters outside of its groups.
        TypeError: not a ``torch.optim.Optimizer``.
        ValueError: parameters are from before ``fully_shard`` or gathered, or in ``step``, a gradient or a state is cut
            differently from its parameter.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"fsdp2x.local_optimizer: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, EngineStep) or hasattr(optimizer, "_whole_step"):
        return optimizer
    kind: Any = type(optimizer)
    if isinstance(optimizer, _NOT_ELEMENT_WISE):
        raise NotImplementedError(
            f"fsdp2x.local_optimizer: {kind.__name__} is not element-wise. Steps over shards would train something "
            f"else. Use {_INSTEAD}."
        )
    if not elementwise and not _is_known(kind):
        raise NotImplementedError(
            f"fsdp2x.local_optimizer: {kind.__name__} is not known to be element-wise. If its update of an element "
            f"depends only on its own gradient and state, pass elementwise=True. Otherwise use {_INSTEAD}."
        )
    for group in optimizer.param_groups:
        refuse_stale("local_optimizer", group["params"])
    # Step hooks must run around this step, where parameter groups hold the parameters. So remove torch's wrapper here
    # and put it on again around the new class's step.
    members = {"_whole_step": _unhooked(kind.step), "step": _step_locally, "refuses_stale_params": True}
    # A second base would change the layout of objects, and Python would reject their new class.
    optimizer.__class__ = type(f"Local{kind.__name__}", (kind,), members)
    optimizer._patch_step_function()
    _replace_wrapped_step(optimizer)
    return optimizer


def _is_known(kind: Any) -> bool:
    """Returns whether ``kind`` steps as a known class of torch. A subclass may change anything but the step."""
    known: Any = next((one for one in kind.__mro__ if one in _ELEMENT_WISE), None)
    return known is not None and (
        _unhooked(kind.step) is _unhooked(known.step) and kind._init_group is known._init_group
    )


def _unhooked(step: Any) -> Callable[..., Any]:
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _replace_wrapped_step(optimizer: torch.optim.Optimizer) -> None:
    """Replaces the wrapper of the class's old step that an earlier scheduler put on the optimizer."""
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


@torch.no_grad()
def _step_locally(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    """Runs the step of a class made by ``local_optimizer``. It keeps nothing between steps."""
    loss = loss_of(closure)
    whole_state, whole_params = self.state, [group["params"] for group in self.param_groups]
    state: defaultdict[Tensor, dict] = defaultdict(dict)
    stand_ins = [[_stand_in(param, whole_state, state) for param in params] for params in whole_params]
    # State that an optimizer keeps under other keys, for all parameters together.
    known = {param for params in whole_params for param in params}
    state.update({key: value for key, value in whole_state.items() if key not in known})
    try:
        self.state = state
        for group, params in zip(self.param_groups, stand_ins, strict=True):
            group["params"] = params
        self._whole_step()
    except RuntimeError as error:
        if all(one.grad is None or one.grad.dtype == one.dtype for params in stand_ins for one in params):
            raise
        raise RuntimeError(
            f"fsdp2x.local_optimizer: {type(self).__name__} cannot step gradients of another dtype than their "
            "parameter's. Use fsdp2x.optim.AdamW, or leave grad_dtype unset before fully_shard."
        ) from error
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
            f"Use {_INSTEAD}."
        )
    whole_state.update(state)
    return loss


def _stand_in(param: Tensor, whole_state: dict, state: dict) -> Tensor:
    """Returns the tensor that is stepped for ``param``, with its gradient and state."""
    if not isinstance(param, DTensor):
        if param in whole_state:
            state[param] = whole_state[param]
        return param
    local = local_tensor(param)
    grad = param.grad
    if grad is not None:
        refuse_sparse("local_optimizer", grad)
        if grad.dtype != local.dtype:
            torch_private.set_grad_dtype(local, (grad.dtype,))
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
            f"{value.placements}, but its parameter {param.placements}. Redistribute it, or use the optimizer as it is."
        )
    return local_tensor(value)


def _take_over(optimizer: torch.optim.Optimizer, param: Any, local: Tensor, whole: dict, state: dict) -> None:
    """Moves what a step put into the state of ``local`` to the state of ``param``, as DTensors."""
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
                    f"for a local shard of shape {tuple(local.shape)}, so it is not element-wise. Use {_INSTEAD}."
                )
            value = cut_like(param, value)  # on its own device, which is not the mesh's if the shard is offloaded
        whole[name] = value
