"""Whether an optimizer steps every element by itself, found out by a trial on small tensors: complete, and cut in two.

An element-wise step gives the same numbers for a part of a tensor as for that part of the complete tensor. Norms of a
tensor, sums over all parameters, factored states and blocks do not. The trial runs copies of the optimizer with its own
settings, on gradients whose parts differ much, over several steps, since state may begin to count in the second one.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2x.optim.local import local_tensor, number
from fsdp2x.runtime import torch_private

# What gradients of each step are multiplied by: thresholds and ratios between steps must come to act.
_FACTORS = (1.0, 1.0, 30.0, 0.02, -1.0, 1000.0, 1.0, 0.1)
# Optimizers factor or quantize large tensors only, most of them from 128 rows and columns, or 4,096 elements. Some
# scale by the ratio of rows to columns. So a third of what is cut has 144 rows.
_MAX_SIZE, _MAX_NUMEL = 144, 65_000
_LEAST_LR = 1e-2  # with less, rounding would hide what a step does
_TOLERANCE = 1e-4  # of the largest change of a tensor; what is not element-wise differs by percents

INSTEAD = (
    "it without local_optimizer, if it steps DTensors, or one of fsdp2x.optim, such as AdamW(moments_dtype='int8') or "
    "Muon"
)


@dataclass(frozen=True)
class _Sample:
    """What stands for the parameters of a group that have its number of dims."""

    param: Tensor
    values: Tensor
    gradient: Tensor
    dim: int | None  # it is cut along; None: every rank has it completely

    def part(self, tensor: Tensor, index: int | None) -> Tensor:
        """The first or second part, of different sizes; None: all of it."""
        if index is None or self.dim is None:
            return tensor.clone()
        size = tensor.shape[self.dim]
        return tensor.narrow(self.dim, *((0, size // 3), (size // 3, size - size // 3))[index]).clone()


def require_element_wise(optimizer: torch.optim.Optimizer, step: Callable[[torch.optim.Optimizer], Any]) -> None:
    """Tries ``step`` on copies of ``optimizer``, which stays as it is, as do its parameters and generators.

    Every rank comes to the same answer: the trial depends on settings, shapes and dtypes alone.

    Raises:
        NotImplementedError: the optimizer is not element-wise, or it cannot be tried.
    """
    samples = [_samples_of(group["params"]) for group in optimizer.param_groups]
    if all(sample.dim is None for chosen in samples for sample in chosen):
        return
    name = type(optimizer).__name__
    with _generators_kept(samples), torch.no_grad():
        try:
            found = _difference_in_steps(optimizer, step, samples)
        except Exception as error:
            raise NotImplementedError(
                f"fsdp2x.local_optimizer: {name} cannot be tried on small plain tensors to see whether it is "
                f"element-wise: {type(error).__name__}: {error}. Use {INSTEAD}."
            ) from error
    if found:
        raise NotImplementedError(
            f"fsdp2x.local_optimizer: {name} is not element-wise: in a trial with its settings, {found}. Steps over "
            f"shards would train something else. Use {INSTEAD}."
        )


def _samples_of(params: list[Tensor]) -> list[_Sample]:
    """One sample for each number of dims, of the largest parameter that has it; plain parameters are not cut."""
    largest: dict[tuple[int, bool], Tensor] = {}
    for param in params:
        kind = param.ndim, isinstance(param, DTensor)
        if kind not in largest or param.numel() > largest[kind].numel():
            largest[kind] = param
    return [_sample(param, seed) for seed, param in enumerate(largest.values())]


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
    if dim is not None:
        # The parts have different norms.
        steps = [1] * len(shape)
        steps[dim] = shape[dim]
        values *= torch.linspace(0.5, 2.0, shape[dim]).reshape(steps)
        gradient *= torch.logspace(-1.0, 1.0, shape[dim]).reshape(steps)
    device = torch.device("cpu") if local.is_meta else local.device
    return _Sample(param, values.to(device), gradient.to(device), dim)


@contextlib.contextmanager
def _generators_kept(samples: list[list[_Sample]]) -> Iterator[None]:
    devices = {sample.values.device for chosen in samples for sample in chosen} - {torch.device("cpu")}
    before = random.getstate()
    with contextlib.ExitStack() as forks:
        forks.enter_context(torch.random.fork_rng(devices=[]))
        for device in devices:
            forks.enter_context(torch.random.fork_rng(devices=[device.index], device_type=device.type))
        try:
            yield
        finally:
            random.setstate(before)


def _difference_in_steps(optimizer: torch.optim.Optimizer, step: Callable, samples: list[list[_Sample]]) -> str:
    full, *cut = trials = [_Trial(optimizer, samples, part) for part in (None, 0, 1)]
    generator = torch.Generator().manual_seed(len(_FACTORS))
    for index, factor in enumerate(_FACTORS):
        gradients = []
        for sample, param in full.params:
            noise = torch.randn(sample.gradient.shape, generator=generator).to(sample.gradient)
            gradient = factor * sample.gradient * (1.0 + noise)
            if index % 3 == 2:  # orthogonal to the parameter: some optimizers project then
                gradient -= param * ((gradient * param.conj()).sum() / param.abs().square().sum())
            gradients.append(gradient)
        for trial in trials:
            trial.step(step, gradients)
        if found := full.difference(*cut):
            return found
    return ""


class _Trial:
    """A copy of an optimizer that steps a part of each sample."""

    def __init__(self, optimizer: torch.optim.Optimizer, samples: list[list[_Sample]], part: int | None) -> None:
        self._part = part
        self._samples = [sample for chosen in samples for sample in chosen]
        self._params = [nn.Parameter(sample.part(sample.values, part)) for sample in self._samples]
        state: defaultdict[Any, dict] = defaultdict(dict)
        memo: dict[int, Any] = {id(optimizer.state): state}
        # Whatever refers to a parameter refers to its stand-in in the copy.
        memo.update({id(p): nn.Parameter(torch.zeros(1)) for group in optimizer.param_groups for p in group["params"]})
        memo.update({id(sample.param): param for sample, param in self.params})
        for sample, param in self.params:
            for key, value in optimizer.state.get(sample.param, {}).items():  # some make it when they are built
                state[param][key] = _small(sample, value, part, memo)
        state.update({key: copy.deepcopy(optimizer.state[key], memo) for key in optimizer.state if type(key) is str})
        self._optimizer = object.__new__(type(optimizer))
        for name, value in vars(optimizer).items():
            # Users' hooks may refer to everything, and a step on the object is one that somebody wrapped.
            if name != "step":
                hooks = name.startswith("_optimizer_")
                vars(self._optimizer)[name] = OrderedDict() if hooks else copy.deepcopy(value, memo)
        for group, chosen in zip(self._optimizer.param_groups, samples, strict=True):
            group["params"][:] = [memo[id(sample.param)] for sample in chosen]
            rate = group.get("lr")
            if isinstance(rate, (int, float, Tensor)) and abs(number(rate)) < _LEAST_LR:
                group["lr"] = torch.full_like(rate, _LEAST_LR) if isinstance(rate, Tensor) else _LEAST_LR

    def step(self, step: Callable, gradients: list[Tensor]) -> None:
        for (sample, param), gradient in zip(self.params, gradients, strict=True):
            param.grad = sample.part(gradient, self._part)
        step(self._optimizer)

    @property
    def params(self) -> list[tuple[_Sample, nn.Parameter]]:
        return list(zip(self._samples, self._params, strict=True))

    def _state(self, index: int) -> dict[str, Any]:
        return self._optimizer.state.get(self._params[index], {})

    def difference(self, first: _Trial, second: _Trial) -> str:
        """What is another in the parts; "" if nothing is."""
        for index, sample in enumerate(self._samples):
            parts = [first._params[index], second._params[index]]
            shape = tuple(sample.values.shape)
            moved = (self._params[index] - sample.values).abs().max()
            if not _are_close(sample, self._params[index], parts, moved):
                return f"a part of a tensor of shape {shape} is updated otherwise than in the complete tensor"
            for name, value in self._state(index).items():
                others = [first._state(index).get(name), second._state(index).get(name)]
                if isinstance(value, Tensor) and value.ndim > 0:
                    if value.shape != sample.values.shape:
                        return f"its state {name!r} of a tensor of shape {shape} has the shape {tuple(value.shape)}"
                    if not _are_close(sample, value, others, _finite(value).abs().max()):
                        return f"its state {name!r} of a part of a tensor differs from that of the complete tensor"
                elif not isinstance(value, (Tensor, int, float, str, NoneType)):
                    return f"its state {name!r} is a {type(value).__name__}, expected numbers or tensors"
                elif not all(_are_equal(value, other) for other in others):
                    return f"its state {name!r} of a part of a tensor differs from that of the complete tensor"
        for groups in zip(*(trial._optimizer.param_groups for trial in (self, first, second)), strict=True):
            for name, value in groups[0].items():
                if not all(_are_equal(value, group.get(name)) for group in groups[1:]):
                    return f"the setting {name!r}, which it changes, depends on all elements"
        return ""


def _small(sample: _Sample, value: Any, part: int | None, memo: dict[int, Any]) -> Any:
    """State for a sample in place of its parameter's: as initialized where that is one number, else ones."""
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape != sample.param.shape:
        return copy.deepcopy(value, memo)
    local = local_tensor(value)
    is_one_number = local.numel() > 0 and bool((local == local.flatten()[0]).all())
    fill = local.flatten()[0].item() if is_one_number else 1
    return sample.part(torch.full_like(sample.values, fill, dtype=value.dtype), part)


def _are_close(sample: _Sample, full: Tensor, parts: list[Tensor], scale: Tensor) -> bool:
    full = _finite(full)
    rounding = 4 * torch.finfo(full.dtype).eps * full.abs().max()
    for index, part in enumerate(parts):
        expected = sample.part(full, index)
        if not isinstance(part, Tensor) or part.shape != expected.shape:
            return False
        difference = (_finite(part) - expected).abs().max()
        if difference > _TOLERANCE * _finite(scale) + rounding:
            return False
    return True


def _finite(tensor: Tensor) -> Tensor:
    return (tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.float()).detach().nan_to_num()


def _are_equal(one: Any, other: Any) -> bool:
    """Of numbers; anything else is taken for equal."""
    if isinstance(one, Tensor) and one.numel() != 1 or not isinstance(one, (Tensor, int, float)):
        return True
    if not isinstance(other, (Tensor, int, float)):
        return False
    one, other = (float(value) for value in (one, other))
    return math.isclose(one, other, rel_tol=_TOLERANCE) or math.isnan(one) and math.isnan(other)
