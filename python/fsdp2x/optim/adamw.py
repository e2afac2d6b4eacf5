"""AdamW in one call per step; the moments belong to the optimizer's state, as torch's do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw as torch_adamw

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.base.native import _C
from fsdp2x.optim.clip import scaled
from fsdp2x.optim.engine_step import EngineStep
from fsdp2x.optim.host_moments import HostMoments, Wanted, selection, step_bytes
from fsdp2x.optim.in_backward import StepInBackward, watch
from fsdp2x.optim.local import dense_gradient, local_tensors, number
from fsdp2x.optim.moments import (
    INT8,
    moments_dtype_of,
    narrowed,
    new_pieces,
    pieces,
    place_in_whole,
    widened,
)
from fsdp2x.sharding.offload import host_state, marks_exist

Select = Callable[[int, list[Tensor]], list[Tensor]]
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class AdamW(EngineStep, torch.optim.AdamW):
    """``torch.optim.AdamW`` with all parameters of a step in one call, over their local shards.

    Arguments, parameter groups, closures, and ``state_dict`` are torch's, and states load both ways. A kernel steps
    float32 parameters, and with ``moments_dtype`` 16-bit ones, in float32. On processors with fused multiply-add the
    float32 moments are torch's bit for bit, and parameters are within 1e-6. torch's functions step all others.

    Stochastic rounding takes its bits from Philox-4x32-10 (Salmon et al., 2011), keyed by the seed, the parameter, its
    step count, and the element's place in the full parameter: the same for any number of ranks.

    With ``moments_dtype="int8"`` each 256 elements of a rank share a float32 scale: ``magnitude = scale * (code / 127)
    ** 4``, with 255 where there is no sign. State dicts and checkpoints contain float32 values. ``optimizer.state`` has
    ``exp_avg_codes`` and ``exp_avg_scales``, which ``flatten_optimizer_state_dict=True`` of torch cannot load.

    With ``fsdp2x.HostOffloadPolicy(mode="optimizer")`` moments stay in CPU memory. A step copies them to the device and
    back, one unit at a time. With ``max_grad_norm`` a step clips as ``fsdp2x.clip_grad_norm_`` does and is collective.
    The gradients stay as they are, and ``grad_norm`` is their norm before clipping.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in ``torch.optim.AdamW``; ``lr`` and ``betas`` may
            be tensors of one element.
        foreach, fused: accepted for compatibility and without a meaning: every step is fused.
        capturable, differentiable: must be False.
        moments_dtype: dtype of the moments of float32, bfloat16 and float16 parameters, ``torch.float32``,
            ``torch.bfloat16`` or ``"int8"``; None (default) gives moments the dtype of their parameter, as torch does.
            States of another dtype are converted when they are loaded, here and by torch.
        stochastic_rounding: round what is stored in bfloat16 or in 8 bits, parameters and moments, stochastically
            instead of to nearest. Only where a kernel steps.
        seed: of the stochastic rounding, in [0, 2**64); the same on every rank.
        max_grad_norm: clip the gradients of all groups together to this 2-norm; None (default): they are used as they
            are.
        step_in_backward: step each parameter in host memory on threads of the optimizer while backward goes on, as soon
            as its reduced gradient has arrived. Backward returns after these steps, which have the bits of a later one.
            ``step()`` is still to be called: it steps all other parameters. Gradients stay until ``zero_grad()``.
            Accumulate in ``fsdp2x.accumulate``.

    Raises:
        NotImplementedError: ``capturable`` or ``differentiable``, here, in a group, or in a loaded state; in ``step``,
            ``stochastic_rounding`` of what torch's functions would have to step, or of a parameter cut along two
            dims behind the first.
        ValueError: settings out of range, another ``moments_dtype``, ``stochastic_rounding`` without ``moments_dtype``,
            ``step_in_backward`` with ``max_grad_norm``; parameters from before ``fully_shard``, or gathered ones:
            stepping them would not change the model. Those that ``fully_shard`` replaces later are a RuntimeError in
            ``step`` until ``rebind_optimizer``.
        RuntimeError: with ``step_in_backward``: in ``step``, settings of a group or gradients have changed since
            backward, or that backward raised an error; in backward, a second gradient before ``step``.
    """

    keeps_host_state = True  # knows parameters whose state belongs to the host
    _name = "AdamW"
    _kept = ("moments_dtype", "stochastic_rounding", "seed", "max_grad_norm", "step_in_backward")
    step_in_backward = False

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        moments_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_grad_norm: float | None = None,
        step_in_backward: bool = False,
    ) -> None:
        self._prepare({"capturable": capturable, "differentiable": differentiable}, max_grad_norm)
        if moments_dtype not in (None, torch.float32, torch.bfloat16, INT8):
            raise ValueError(
                f"fsdp2x.optim.AdamW: moments_dtype is {moments_dtype!r}, expected None, torch.float32, torch.bfloat16 "
                "or 'int8'"
            )
        if stochastic_rounding and moments_dtype is None:
            raise ValueError(
                "fsdp2x.optim.AdamW: stochastic_rounding needs moments_dtype (torch.bfloat16, or torch.float32 to "
                "round bfloat16 parameters only): without it 16-bit parameters are stepped by torch's functions"
            )
        if not 0 <= seed < 2**64:
            raise ValueError(f"fsdp2x.optim.AdamW: seed is {seed}, expected an integer in [0, 2**64)")
        if step_in_backward and max_grad_norm is not None:
            raise ValueError(
                "fsdp2x.optim.AdamW: step_in_backward=True steps before the norm of all gradients is known. Leave out "
                "max_grad_norm or step_in_backward"
            )
        self.moments_dtype, self.stochastic_rounding, self.seed = moments_dtype, stochastic_rounding, seed
        self.step_in_backward = step_in_backward
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)
        self._watch()

    def _begin_afresh(self) -> None:
        super()._begin_afresh()
        self._in_backward = StepInBackward(self._name, self._threads)
        self._host_moments = HostMoments()
        self._places: dict[Any, tuple[int, int, int]] = {}  # of DTensorSpecs, in the whole parameter

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; moments come in ``moments_dtype``, without a detour through the dtype of their parameter."""
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        on_host = self._wanted_on_host()
        ours = {id(one.param) for one in on_host}
        params = [param for group in self.param_groups for param in group["params"]]
        kept: dict[Any, dict] = {}  # what torch would bring to the device
        rest: dict[Any, dict] = {}
        for index, param in zip(saved, params, strict=False):  # torch says when their numbers differ
            if id(param) in ours and index in state_dict["state"]:
                state = state_dict["state"][index]
                kept[index] = {name: state[name] for name in _MOMENTS if name in state}
                rest[index] = {name: value for name, value in state.items() if name not in kept[index]}
        super().load_state_dict({**state_dict, "state": {**state_dict["state"], **rest}} if kept else state_dict)
        for index, param in zip(saved, params, strict=True):
            if index in kept:
                self.state[param].update(kept[index])
            if param in self.state and (self._moments_dtype_of(param) == INT8 or id(param) not in ours):
                self.take_moments(param, state_dict["state"][index])
        count_on_host(self.state)
        if kept:
            self._host_moments.take_in(self.state, on_host)

    def take_moments(self, param: Tensor, saved: dict[str, Any]) -> None:
        """The moments of ``saved`` into the loaded state of ``param``, in ``moments_dtype``."""
        dtype = self._moments_dtype_of(param)
        values = {name: saved[name] for name in _MOMENTS if name in saved}
        if dtype == INT8:
            self.state[param] = narrowed(param, {**self.state[param], **values}, _MOMENTS)
        elif self.moments_dtype is not None:
            self.state[param].update(
                {name: value.to(dtype, copy=True).to(param.device) for name, value in values.items()}
            )

    def _watch(self) -> None:
        if self.step_in_backward:
            watch(self, (param for group in self.param_groups for param in group["params"]))

    def step_scaled(self, grad_scale: Tensor | None) -> None:
        run = functools.partial(self._run, grad_scale)
        stepped: set[int] = set()
        if self.step_in_backward:
            stepped = self._in_backward.settle(self._group_settings())
            if stepped and grad_scale is not None:
                raise RuntimeError("fsdp2x.optim.AdamW: max_grad_norm was set although step_in_backward=True")
            self._watch()
        on_host = self._wanted_on_host()
        if on_host:
            self._host_moments.step(self.state, on_host, run)
            stepped |= {id(one.param) for one in on_host}
        run(selection(lambda param: id(param) not in stepped) if stepped else None, self.state, self._on_device)

    @torch.no_grad()
    def _begin_step(self, params: list[Tensor], threads: _C.StepThreads) -> set[int]:
        """Begins the step of these parameters in ``threads``; returns the ids of those that are left to ``step()``."""
        begun = {id(param) for param in params}
        left_over = _C.adamw_begin(*self._of_step(selection(lambda param: id(param) in begun), self.state), threads)
        return {id(self.param_groups[group]["params"][index]) for group, index in left_over}

    def _group_settings(self) -> list[tuple]:
        """The numbers of the parameter groups that a step uses."""
        return [_settings(group, [])[1:] for group in self.param_groups]

    def _of_step(self, select: Select | None, states: dict) -> tuple[list, dict, Callable, bool, Callable | None, int]:
        """Arguments of the engine for a step of the parameters that ``select`` leaves in place."""
        groups = [
            _settings(group, select(number, group["params"]) if select else group["params"])
            for number, group in enumerate(self.param_groups)
        ]
        place_of = self._place_of if self.stochastic_rounding else None
        return groups, states, self._make_states, self.moments_dtype is not None, place_of, self.seed

    def _run(self, grad_scale: Tensor | None, select: Select | None, states: dict, on_device: _C.DeviceSteps) -> None:
        left_over = _C.adamw_step(*self._of_step(select, states), on_device, grad_scale)
        for group, params in self._left_to_torch(left_over):
            self._step_by_torch(group, params, states, grad_scale)

    def _wanted_on_host(self) -> list[Wanted]:
        """The moments that belong to the host."""
        if not marks_exist():
            return []
        return [
            Wanted(param, tuple(pieces(param, _names(group), self._moments_dtype_of(param))))
            for group in self.param_groups
            for param in group["params"]
            if param.requires_grad and host_state(param) is not None
        ]

    @property
    def host_step_bytes(self) -> int:
        """Device memory that a step takes beside parameters and gradients, for moments that come from the host."""
        return step_bytes(self._wanted_on_host())

    def _moments_dtype_of(self, param: Tensor) -> torch.dtype | str:
        return moments_dtype_of(param.dtype, self.moments_dtype)

    def _make_states(self, group: int, index: int) -> None:
        """The state of the parameter with this place, and of all others that have a gradient and no state yet."""
        asked = self.param_groups[group]["params"][index]
        wanted = [
            (param, piece)
            for group in self.param_groups
            for param in group["params"]
            if param is asked or (param.grad is not None and not self.state.get(param))
            for piece in pieces(param, _names(group), self._moments_dtype_of(param))
        ]
        for (param, piece), zeros in zip(wanted, new_pieces(wanted), strict=True):
            state = self.state[param]
            if "step" not in state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state[piece.name] = zeros

    def _place_of(self, group: int, index: int) -> tuple[int, int, int]:
        param = self.param_groups[group]["params"][index]
        if not isinstance(param, DTensor):
            return place_in_whole(param)
        spec = torch_private.spec_of(param)
        if spec not in self._places:
            self._places[spec] = place_in_whole(param)
        return self._places[spec]

    def _step_by_torch(
        self, group: dict[str, Any], params: list[Tensor], states: dict, grad_scale: Tensor | None
    ) -> None:
        columns: list[list[Tensor]] = [[], [], [], [], []]
        rounded, coded = [], []
        for param in params:
            gradient = dense_gradient("optim.AdamW", param)
            state = widened(states[param])
            moments = [state[name] for name in _names(group)]
            is_coded = state.keys() != states[param].keys()
            if is_coded:
                coded.append((param, state))
            _, grad, *_ = tensors = local_tensors([param, scaled(gradient, grad_scale), *moments])
            if self.stochastic_rounding and (is_coded or torch.bfloat16 in {tensor.dtype for tensor in tensors}):
                raise NotImplementedError(
                    f"fsdp2x.optim.AdamW: stochastic_rounding of a parameter of shape {tuple(param.shape)} on "
                    f"{param.device}, whose gradient has dtype {gradient.dtype}; it needs a parameter that a kernel "
                    "steps and a gradient of the same dtype, placements and memory format, or stochastic_rounding=False"
                )
            if len({tensor.dtype for tensor in tensors}) > 1:
                dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
                wide = [tensor.to(dtype) for tensor in tensors]
                stored = [pair for pair in zip(tensors, wide, strict=True) if pair[0] is not grad]
                rounded += [(tensor, copy) for tensor, copy in stored if tensor is not copy]
                tensors = wide
            for column, tensor in zip(columns, tensors, strict=False):
                column.append(tensor)
        stepped, grads, averages, squares, largest_squares = columns
        torch_adamw(
            stepped,
            grads,
            averages,
            squares,
            largest_squares,
            [states[param]["step"] for param in params],
            has_complex=any(param.is_complex() for param in params),
            amsgrad=group["amsgrad"],
            beta1=number(group["betas"][0]),
            beta2=number(group["betas"][1]),
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        for tensor, copy in rounded:
            tensor.copy_(copy)
        for param, state in coded:
            for name, value in narrowed(param, state, _names(group)).items():
                if value is not states[param].get(name):
                    local_tensors([states[param][name]])[0].copy_(local_tensors([value])[0])


def count_on_host(states: dict[Tensor, dict[str, Any]]) -> None:
    """Torch's fused steps count on the device, and its loading takes the counts there.

    Read there, each would make the host wait in every step.
    """
    for state in states.values():
        if isinstance(state.get("step"), Tensor) and state["step"].device.type != "cpu":
            state["step"] = state["step"].cpu()


def _names(group: dict[str, Any]) -> tuple[str, ...]:
    return _MOMENTS if group["amsgrad"] else _MOMENTS[:2]


def _settings(group: dict[str, Any], params: list[Tensor]) -> tuple:
    lr = group["lr"]
    beta1, beta2 = group["betas"]
    return (
        params,
        number(lr),
        isinstance(lr, Tensor) and lr.dtype == torch.float32,
        number(beta1),
        number(beta2),
        group["eps"],
        number(1 - lr * group["weight_decay"]),
        group["amsgrad"],
        group["maximize"],
    )
