"""Runs any element-wise torch optimizer over local shards, without DTensor dispatch. A trial checks that it is one.

An element-wise step gives a part of a tensor the same numbers as the complete tensor gives that part. Norms of a
tensor, sums over all parameters, factored states, and blocks do not. So two copies of the optimizer step with its own
settings, one on complete tensors and one on a part of each. They run several steps, because state may only begin to
count in the second one.
"""

from __future__ import annotations

import copy
import functools
import math
import random
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.base.optimizer_hooks import refuse_stale
from fsdp2x.optim.engine_step import EngineStep
from fsdp2x.optim.local import local_tensor, loss_of, number, refuse_sparse

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


@checked
def local_optimizer(optimizer: OptimizerT) -> OptimizerT:
    """Makes ``optimizer`` step over the local shards of its DTensor parameters. Returns the same object.

        optimizer = fsdp2x.local_optimizer(torch.optim.NAdam(model.parameters(), lr=1e-3))

    Use it for element-wise optimizers: those whose update of an element depends only on its own gradient and state. The
    step then avoids DTensor's dispatch, most of the cost for many small parameters, and computes the same bits. Groups,
    schedulers, hooks, closures, and ``state_dict`` (DTensors, DCP works) do not change. ``fsdp2x.optim``'s optimizers
    are returned unchanged.

    A trial checks that the optimizer is element-wise: copies of it step small tensors, complete and cut. It changes
    neither the optimizer, its parameters, nor random numbers. ``add_param_group`` repeats it.

    Raises:
        NotImplementedError: the optimizer is not element-wise (Adafactor, LAMB, LARS, LBFGS, Muon, NovoGrad, Prodigy,
            Shampoo) or cannot be tried, or in ``step``, it keeps other state than scalars and tensors of the
            parameter's shape, or parameters outside of its groups.
        TypeError: not a ``torch.optim.Optimizer``.
        ValueError: parameters are from before ``fully_shard`` or gathered, or in ``step``, a gradient or a state is cut
            differently from its parameter.
    """
    if isinstance(optimizer, EngineStep) or hasattr(optimizer, "_whole_step"):
        return optimizer
    kind: Any = type(optimizer)
    for group in optimizer.param_groups:
        refuse_stale("local_optimizer", group["params"])
    step = kind.step
    # Step hooks must run around this step, where parameter groups hold the parameters. So remove torch's wrapper here
    # and put it on again around the new class's step.
    whole_step = step.__wrapped__ if getattr(step, "hooked", False) else step
    require_element_wise(optimizer, whole_step)
    members = {"_whole_step": whole_step, "step": _step_locally, "refuses_stale_params": True}
    members["add_param_group"] = functools.partialmethod(_add_param_group, kind)
    # A second base would change the layout of objects, and Python would reject their new class.
    optimizer.__class__ = type(f"Local{kind.__name__}", (kind,), members)
    optimizer._patch_step_function()
    _replace_wrapped_step(optimizer)
    return optimizer


@checked
def SGD(params: Iterable[Any], lr: float | Tensor = 1e-3, **settings: Any) -> torch.optim.SGD:
    """Makes a ``torch.optim.SGD`` that steps over local shards: ``local_optimizer(torch.optim.SGD(params, lr, ...))``.

    Args:
        params, lr, settings: the arguments of ``torch.optim.SGD``.

    Raises:
        ValueError: a setting is out of range, or parameters are from before ``fully_shard`` or gathered.
    """
    return local_optimizer(torch.optim.SGD(params, lr, **settings))


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


def _add_param_group(self: Any, kind: type, param_group: dict[str, Any]) -> None:
    kind.add_param_group(self, param_group)
    try:
        require_element_wise(self, type(self)._whole_step)
    except NotImplementedError:
        self.param_groups.pop()
        raise


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
    """Returns the tensor that is stepped for ``param``, with its gradient and state."""
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
                    f"for a local shard of shape {tuple(local.shape)}, so it is not element-wise. Use {INSTEAD}."
                )
            value = DTensor.from_local(
                value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        whole[name] = value


# Factors of the gradients in each step, so that thresholds and ratios between steps take effect.
_FACTORS = (1.0, 1.0, 30.0, 0.02, -1.0, 1000.0, 1.0, 0.1)
# Optimizers factor or quantize large tensors only, most of them from 128 rows and columns or 4,096 elements on. Some
# scale by the ratio of rows to columns. So the part of a large tensor has 143 rows.
_MAX_SIZE, _MAX_NUMEL = 144, 65_000
_LEAST_LR = 1e-2  # with less, rounding would hide the effect of a step
_TOLERANCE = 1e-4  # of the largest change of a tensor; other optimizers differ by percents

INSTEAD = (
    "it without local_optimizer, if it steps DTensors, or one of fsdp2x.optim, such as AdamW(moments_dtype='int8') or "
    "Muon"
)


@dataclass(frozen=True)
class _Sample:
    """Stand-in for the parameters of a group with the same number of dims."""

    param: Tensor
    values: Tensor
    gradient: Tensor
    dim: int | None  # the dim that is cut; None: every rank has all of it

    def part(self, tensor: Tensor) -> Tensor:
        """Returns the middle third. Its extremes differ from those of ``tensor``, and it begins inside a block."""
        if self.dim is None:
            return tensor.clone()
        third = tensor.shape[self.dim] // 3
        return tensor.narrow(self.dim, third + 1, tensor.shape[self.dim] - 2 * third - 1).clone()


_Cut = Callable[[_Sample, Tensor], Tensor]
_CUTS: tuple[_Cut, _Cut] = (lambda sample, tensor: tensor.clone(), _Sample.part)


def require_element_wise(optimizer: torch.optim.Optimizer, step: Callable[[torch.optim.Optimizer], Any]) -> None:
    """Tries ``step`` on copies of ``optimizer``, and changes neither it, its parameters, nor generators.

    Every rank gets the same answer, because the trial depends only on settings, shapes and dtypes.
    """
    samples = _samples_of(optimizer)
    if all(sample.dim is None for sample in samples):
        return
    name = type(optimizer).__name__
    devices = {sample.values.device for sample in samples if sample.values.device.type != "cpu"}
    kind, before = next((device.type for device in devices), "cpu"), random.getstate()
    try:
        with torch.random.fork_rng([device.index for device in devices], device_type=kind), torch.no_grad():
            found = _difference_in_steps(optimizer, step, samples)
    except Exception as error:
        raise NotImplementedError(
            f"fsdp2x.local_optimizer: {name} cannot be tried on small plain tensors to see whether it is "
            f"element-wise: {type(error).__name__}: {error}. Use {INSTEAD}."
        ) from error
    finally:
        random.setstate(before)
    if found:
        raise NotImplementedError(
            f"fsdp2x.local_optimizer: {name} is not element-wise: in a trial with its settings, {found}. Steps over "
            f"shards would train something else. Use {INSTEAD}."
        )


def _samples_of(optimizer: torch.optim.Optimizer) -> list[_Sample]:
    """Returns one sample for each number of dims in each group, of the largest such parameter."""
    samples: list[_Sample] = []
    for group in optimizer.param_groups:
        kinds = {(param.ndim, isinstance(param, DTensor)): param for param in sorted(group["params"], key=Tensor.numel)}
        largest = set(map(id, kinds.values()))
        samples += [_sample(param, seed) for seed, param in enumerate(group["params"]) if id(param) in largest]
    return samples


def _sample(param: Tensor, seed: int) -> _Sample:
    dim, local = None, param
    if isinstance(param, DTensor):
        dim = next((place.dim for place in param.placements if isinstance(place, Shard)), 0)
        local = torch_private.local_tensor(param)
    shape: list[int] = []
    for axis, size in enumerate(param.shape):
        least, most = (4, 3 * _MAX_SIZE) if axis == dim else (1, _MAX_SIZE)
        shape.append(max(min(size, most, _MAX_NUMEL // max(math.prod(shape), 1)), least))
    dtype = local.dtype if local.dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
    generator = torch.Generator().manual_seed(seed)
    values, gradient = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    if dim is not None:  # parts have different norms
        ones = [shape[dim] if axis == dim else 1 for axis in range(len(shape))]
        values *= torch.linspace(0.5, 2.0, shape[dim]).reshape(ones)
        gradient *= torch.logspace(-1.0, 1.0, shape[dim]).reshape(ones)
    device = torch.device("cpu") if local.is_meta else local.device
    return _Sample(param, values.to(device), gradient.to(device), dim)


def _difference_in_steps(optimizer: torch.optim.Optimizer, step: Callable, samples: list[_Sample]) -> str:
    full, part = copies = [_copy(optimizer, samples, cut) for cut in _CUTS]
    generator = torch.Generator().manual_seed(len(_FACTORS))
    for step_number, factor in enumerate(_FACTORS):
        for sample, *params in zip(samples, *map(_params_of, copies), strict=True):
            noise = torch.randn(sample.gradient.shape, generator=generator).to(sample.gradient)
            gradient = factor * sample.gradient * (1.0 + noise)
            if step_number % 3 == 2:  # orthogonal to the parameter, because some optimizers then project
                gradient -= params[0] * ((gradient * params[0].conj()).sum() / params[0].abs().square().sum())
            for cut, param in zip(_CUTS, params, strict=True):
                param.grad = cut(sample, gradient)
        for copied in copies:
            step(copied)
        if found := _difference(samples, full, part):
            return found
    return ""


def _copy(optimizer: torch.optim.Optimizer, samples: list[_Sample], cut: _Cut) -> torch.optim.Optimizer:
    """Copies ``optimizer`` for parameters that ``cut`` makes of the samples, in their order."""
    params = [nn.Parameter(cut(sample, sample.values)) for sample in samples]
    state: defaultdict[Any, dict] = defaultdict(dict)
    # References to a parameter become references to its stand-in in the copy.
    memo: dict[int, Any] = {id(optimizer.state): state}
    memo.update({id(param): nn.Parameter(torch.zeros(1)) for param in _params_of(optimizer)})
    memo.update({id(sample.param): param for sample, param in zip(samples, params, strict=True)})
    for sample, param in zip(samples, params, strict=True):
        for key, value in optimizer.state.get(sample.param, {}).items():  # some optimizers make it in their constructor
            state[param][key] = _small(sample, value, cut, memo)
    state.update({key: copy.deepcopy(optimizer.state[key], memo) for key in optimizer.state if type(key) is str})
    copied = object.__new__(type(optimizer))
    # Skip users' hooks, which may refer to anything, and a step that a scheduler has wrapped on the object.
    own = {k: value for k, value in vars(optimizer).items() if k != "step" and not k.startswith("_optimizer_")}
    torch.optim.Optimizer.__setstate__(copied, copy.deepcopy(own, memo))
    sampled = set(map(id, params))
    for group in copied.param_groups:
        group["params"][:] = [param for param in group["params"] if id(param) in sampled]
        rate = group.get("lr")
        if isinstance(rate, (int, float, Tensor)) and abs(number(rate)) < _LEAST_LR:
            group["lr"] = torch.full_like(rate, _LEAST_LR) if isinstance(rate, Tensor) else _LEAST_LR
    return copied


def _params_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _small(sample: _Sample, value: Any, cut: _Cut, memo: dict[int, Any]) -> Any:
    """Returns state for a sample in place of its parameter's: as initialized if it is one number, else ones."""
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape != sample.param.shape:
        return copy.deepcopy(value, memo)
    local = local_tensor(value)
    is_one_number = local.numel() > 0 and bool((local == local.flatten()[0]).all())
    fill = local.flatten()[0].item() if is_one_number else 1
    return cut(sample, torch.full_like(sample.values, fill, dtype=value.dtype))


def _difference(samples: list[_Sample], full: torch.optim.Optimizer, part: torch.optim.Optimizer) -> str:
    """Returns what differs between complete tensors and parts, or "" if nothing does."""
    for sample, param, cut in zip(samples, _params_of(full), _params_of(part), strict=True):
        shape = tuple(param.shape)
        if not _is_same(param, cut, sample, param - sample.values):
            return f"a part of a tensor of shape {shape} is updated differently from the complete tensor"
        for name, value in full.state.get(param, {}).items():
            if not isinstance(value, (Tensor, int, float, str, NoneType)):
                return f"its state {name!r} is a {type(value).__name__}, expected numbers or tensors"
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape != param.shape:
                return f"its state {name!r} of a tensor of shape {shape} has the shape {tuple(value.shape)}"
            if not _is_same(value, part.state.get(cut, {}).get(name), sample, value):
                return f"its state {name!r} of a part of a tensor differs from that of the complete tensor"
    for group, other in zip(full.param_groups, part.param_groups, strict=True):
        for name, value in group.items():
            if not _is_same(value, other.get(name), None, value):
                return f"the setting {name!r}, which it changes, depends on all elements"
    return ""


def _is_same(full: Any, part: Any, sample: _Sample | None, change: Any) -> bool:
    """Returns whether ``part`` equals its place in ``full``, relative to ``change``. Only numbers are compared."""
    if not isinstance(full, (Tensor, int, float)):
        return True
    if not isinstance(part, (Tensor, int, float)):
        return False
    full, part, change = map(_finite, (full, part, change))
    expected = full if sample is None or full.ndim == 0 else sample.part(full)
    allowed = _TOLERANCE * change.abs().max() + 4 * torch.finfo(full.dtype).eps * full.abs().max()
    return part.shape == expected.shape and bool((part - expected).abs().max() <= allowed)


def _finite(value: Tensor | float) -> Tensor:
    tensor = torch.as_tensor(value)
    return (tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.float()).detach().nan_to_num()
