"""AdamW in one call per step. The moments belong to the optimizer's state, as in torch."""

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
    """Steps like ``torch.optim.AdamW``, with all parameters in one call over their local shards.

    Arguments, parameter groups, closures, and ``state_dict`` are torch's, and states load both ways. Moments are
    torch's bit for bit on processors with fused multiply-add, and parameters within 1e-6. docs/guides/optimizers.md
    describes 8-bit moments and offloading.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: see ``torch.optim.AdamW``. ``lr`` and ``betas`` may be
            tensors of one element.
        foreach, fused: accepted for compatibility, without effect.
        capturable, differentiable: must be False.
        moments_dtype: dtype of the moments of float32, bfloat16 and float16 parameters: ``torch.float32``,
            ``torch.bfloat16``, or ``"int8"``, with a float32 scale for each 256 elements of a rank. 16-bit values are
            updated in float32 and rounded back. None (default): the dtype of each parameter. Loading converts states.
        stochastic_rounding: whether to round stored bfloat16 and 8-bit values at random. The bits come from
            Philox-4x32-10 (Salmon et al., 2011) and do not depend on the number of ranks.
        seed: seed of stochastic rounding, in [0, 2**64), the same on every rank.
        max_grad_norm: largest 2-norm of all gradients together. The step then clips like ``fsdp2x.clip_grad_norm_`` and
            is collective. It leaves gradients unchanged, and sets ``grad_norm``, the norm before clipping. None
            (default): no clipping.
        error_if_nonfinite: whether ``step`` raises RuntimeError on every rank, before it changes anything, if the norm
            is infinite or NaN. Needs ``max_grad_norm``, and makes the host wait for the norm. False (default):
            ``grad_norm`` tells, without a wait, after a step that made parameters NaN.

    Raises:
        NotImplementedError: ``capturable`` or ``differentiable`` is set, or in ``step``, ``stochastic_rounding`` meets
            a parameter that no kernel steps.
        ValueError: a setting is out of range, ``stochastic_rounding`` lacks ``moments_dtype``, or parameters are from
            before ``fully_shard`` or gathered. Parameters that ``fully_shard`` replaces later raise RuntimeError in
            ``step`` until ``rebind_optimizer``.
    """

    keeps_host_state = True  # supports parameters whose state stays in CPU memory
    _name = "AdamW"
    _kept = ("moments_dtype", "stochastic_rounding", "seed", *EngineStep._kept)

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
        error_if_nonfinite: bool = False,
    ) -> None:
        unsupported = {"capturable": capturable, "differentiable": differentiable}
        self._prepare(unsupported, max_grad_norm, error_if_nonfinite)
        if moments_dtype not in (None, torch.float32, torch.bfloat16, INT8):
            raise ValueError(
                "fsdp2x.optim.AdamW: moments_dtype must be None, torch.float32, torch.bfloat16 or 'int8', got "
                f"{moments_dtype!r}"
            )
        if stochastic_rounding and moments_dtype is None:
            raise ValueError(
                "fsdp2x.optim.AdamW: stochastic_rounding needs moments_dtype, without which torch's functions step "
                "16-bit parameters. Pass torch.bfloat16, or torch.float32 to round bfloat16 parameters only."
            )
        if not 0 <= seed < 2**64:
            raise ValueError(f"fsdp2x.optim.AdamW: seed is {seed}, expected an integer in [0, 2**64)")
        self.moments_dtype, self.stochastic_rounding, self.seed = moments_dtype, stochastic_rounding, seed
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)

    def _begin_afresh(self) -> None:
        super()._begin_afresh()
        self._host_moments = HostMoments()
        self._places: dict[Any, tuple[int, int, int]] = {}  # of DTensorSpecs, in the full parameter

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads like torch, but converts moments to ``moments_dtype`` without using their parameter's dtype."""
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        on_host = self._wanted_on_host()
        ours = {id(one.param) for one in on_host}
        params = [param for group in self.param_groups for param in group["params"]]
        kept: dict[Any, dict] = {}  # state that torch would move to the device
        rest: dict[Any, dict] = {}
        for index, param in zip(saved, params, strict=False):  # torch reports a different number
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
        """Puts the moments of ``saved`` into the loaded state of ``param``, in ``moments_dtype``."""
        dtype = self._moments_dtype_of(param)
        values = {name: saved[name] for name in _MOMENTS if name in saved}
        if dtype == INT8:
            self.state[param] = narrowed(param, {**self.state[param], **values}, _MOMENTS)
        elif self.moments_dtype is not None:
            self.state[param].update(
                {name: value.to(dtype, copy=True).to(param.device) for name, value in values.items()}
            )

    def step_scaled(self, grad_scale: Tensor | None) -> None:
        run = functools.partial(self._run, grad_scale)
        select: Select | None = None
        if on_host := self._wanted_on_host():
            self._host_moments.step(self.state, on_host, run)
            stepped = {id(one.param) for one in on_host}
            select = selection(lambda param: id(param) not in stepped)
        run(select, self.state, self._on_device)

    def _run(self, grad_scale: Tensor | None, select: Select | None, states: dict, on_device: _C.DeviceSteps) -> None:
        """Steps the parameters that ``select`` leaves in place."""
        groups = [
            _settings(group, select(number, group["params"]) if select else group["params"])
            for number, group in enumerate(self.param_groups)
        ]
        place_of = self._place_of if self.stochastic_rounding else None
        is_narrow = self.moments_dtype is not None
        left_over = _C.adamw_step(
            groups, states, self._make_states, is_narrow, place_of, self.seed, on_device, grad_scale
        )
        for group, params in self._left_to_torch(left_over):
            self._step_by_torch(group, params, states, grad_scale)

    def _wanted_on_host(self) -> list[Wanted]:
        """Returns the moments that stay in CPU memory."""
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
        """Returns the device memory of a step for moments from CPU memory, without parameters and gradients."""
        return step_bytes(self._wanted_on_host())

    def _moments_dtype_of(self, param: Tensor) -> torch.dtype | str:
        return moments_dtype_of(param.dtype, self.moments_dtype)

    def _make_states(self, group: int, index: int) -> None:
        """Makes the state of this parameter and of all others that have a gradient and no state yet."""
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
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
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
                    "fsdp2x.optim.AdamW: stochastic_rounding needs a parameter that a kernel steps. Its gradient must "
                    "have the same dtype, placements, and memory format. Got a parameter of shape "
                    f"{tuple(param.shape)} and {param.dtype} on {param.device}, and a gradient of {gradient.dtype}. "
                    "Pass stochastic_rounding=False."
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
    """Moves step counts to the host. Torch's fused steps count on the device, and its loading moves counts there.

    Reading each of them there would make the host wait in every step.
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
