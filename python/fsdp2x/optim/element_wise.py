"""Decides by a trial on small tensors whether an optimizer steps every element by itself.

An element-wise step gives a part of a tensor the same numbers as the complete tensor gives that part. Norms of a
tensor, sums over all parameters, factored states, and blocks do not. Two copies of the optimizer with its own settings
run several steps, since state may only begin to count in the second one: on complete tensors, and on a part of each.
"""

from __future__ import annotations

import copy
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2x.base import torch_private
from fsdp2x.optim.local import local_tensor, number

# Multiplies the gradients of each step, so that thresholds and ratios between steps take effect.
_FACTORS = (1.0, 1.0, 30.0, 0.02, -1.0, 1000.0, 1.0, 0.1)
# Optimizers factor or quantize large tensors only, most of them from 128 rows and columns or 4,096 elements on. Some
# scale by the ratio of rows to columns. So the part of a large tensor has 143 rows.
_MAX_SIZE, _MAX_NUMEL = 144, 65_000
_LEAST_LR = 1e-2  # with less, rounding would hide what a step does
_TOLERANCE = 1e-4  # of the largest change of a tensor; what is not element-wise differs by percents

INSTEAD = (
    "it without local_optimizer, if it steps DTensors, or one of fsdp2x.optim, such as AdamW(moments_dtype='int8') or "
    "Muon"
)


@dataclass(frozen=True)
class _Sample:
    """Stands for the parameters of a group that have its number of dims."""

    param: Tensor
    values: Tensor
    gradient: Tensor
    dim: int | None  # the dim that is cut; None: every rank has all of it

    def part(self, tensor: Tensor) -> Tensor:
        """The middle third. It has other extremes than ``tensor``, and begins at no multiple of a block size."""
        if self.dim is None:
            return tensor.clone()
        third = tensor.shape[self.dim] // 3
        return tensor.narrow(self.dim, third + 1, tensor.shape[self.dim] - 2 * third - 1).clone()


_Cut = Callable[[_Sample, Tensor], Tensor]
_CUTS: tuple[_Cut, _Cut] = (lambda sample, tensor: tensor.clone(), _Sample.part)


def require_element_wise(optimizer: torch.optim.Optimizer, step: Callable[[torch.optim.Optimizer], Any]) -> None:
    """Tries ``step`` on copies of ``optimizer``, which stays as it is, as do its parameters and generators.

    Every rank comes to the same answer: the trial depends on settings, shapes and dtypes alone.

    Raises:
        NotImplementedError: the optimizer is not element-wise, or it cannot be tried.
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
    """One sample for each number of dims in each group, of the largest parameter that has it."""
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
            if step_number % 3 == 2:  # orthogonal to the parameter: some optimizers project then
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
    # Whatever refers to a parameter refers to its stand-in in the copy.
    memo: dict[int, Any] = {id(optimizer.state): state}
    memo.update({id(param): nn.Parameter(torch.zeros(1)) for param in _params_of(optimizer)})
    memo.update({id(sample.param): param for sample, param in zip(samples, params, strict=True)})
    for sample, param in zip(samples, params, strict=True):
        for key, value in optimizer.state.get(sample.param, {}).items():  # some make it when they are built
            state[param][key] = _small(sample, value, cut, memo)
    state.update({key: copy.deepcopy(optimizer.state[key], memo) for key in optimizer.state if type(key) is str})
    copied = object.__new__(type(optimizer))
    # Not users' hooks, which may refer to everything, nor a step that a scheduler has wrapped on the object.
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
    """State for a sample in place of its parameter's: as initialized where that is one number, else ones."""
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape != sample.param.shape:
        return copy.deepcopy(value, memo)
    local = local_tensor(value)
    is_one_number = local.numel() > 0 and bool((local == local.flatten()[0]).all())
    fill = local.flatten()[0].item() if is_one_number else 1
    return cut(sample, torch.full_like(sample.values, fill, dtype=value.dtype))


def _difference(samples: list[_Sample], full: torch.optim.Optimizer, part: torch.optim.Optimizer) -> str:
    """What differs between the complete tensors and the parts; "" if nothing does."""
    for sample, param, cut in zip(samples, _params_of(full), _params_of(part), strict=True):
        shape = tuple(param.shape)
        if not _is_same(param, cut, sample, param - sample.values):
            return f"a part of a tensor of shape {shape} is updated otherwise than in the complete tensor"
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
    """Whether ``part`` is what ``full`` has there, relative to ``change``. Anything but numbers counts as the same."""
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
