"""The optimizer with its two decay groups, the learning rate as a pure function of the step, and loss scaling."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2x import optim
from fsdp2x.api import local_tensor
from fsdp2x.train.config import ConfigError, OptimizerConfig, ScalerConfig, ScheduleConfig


def lr_factor(step: int, shape: ScheduleConfig) -> float:
    """Returns the learning rate of optimizer step `step` (the first is 1) as a fraction of the peak.

    With w = warmup_steps, d = decay_steps, low = min_lr_ratio of `make_shape` and t = (step - w) / (d - w):

        step < w       step / w
        constant       1, also after d
        step > d       low
        linear         low + (1 - low) * (1 - t)
        cosine         low + (1 - low) * (1 + cos(pi * t)) / 2
        inverse_sqrt   max(low, sqrt(max(w, 1) / step))
        wsd            1 until d - wsd_decay_steps, then low + (1 - low) * (1 - u), u = the passed part of the decay
    """
    w, d, low = shape.warmup_steps, shape.decay_steps, shape.min_lr_ratio
    assert d is not None and shape.wsd_decay_steps is not None, "a shape of make_shape"
    if step < w:
        return step / w
    if shape.kind == "constant":
        return 1.0
    if step > d:
        return low
    if shape.kind == "inverse_sqrt":
        return max(low, math.sqrt(max(w, 1) / step))
    if shape.kind == "wsd":
        start = max(d - shape.wsd_decay_steps, w)
        if step <= start:
            return 1.0
        return low + (1.0 - low) * (1.0 - (step - start) / (d - start))
    part = (step - w) / (d - w) if d > w else 1.0
    height = 1.0 - part if shape.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * part))
    return low + (1.0 - low) * height


def make_shape(config: ScheduleConfig, peak_lr: float, num_steps: int) -> ScheduleConfig:
    """Returns the settings for a run of `num_steps`, with steps and fractions of the peak for unset values.

    Raises:
        ConfigError: the parts of the schedule do not fit together.
    """
    decay_steps = config.decay_steps or num_steps
    warmup_steps = config.warmup_steps or round(config.warmup_ratio * num_steps)
    min_lr_ratio = config.min_lr_ratio if config.min_lr is None else config.min_lr / peak_lr
    if min_lr_ratio > 1:
        raise ConfigError(f"schedule.min_lr: got {config.min_lr}, expected at most optimizer.lr={peak_lr}")
    wsd_decay_steps = config.wsd_decay_steps or max(decay_steps // 10, 1)
    if config.kind == "wsd" and config.wsd_decay_steps and warmup_steps + wsd_decay_steps > decay_steps:
        raise ConfigError(
            f"schedule.wsd_decay_steps: got {wsd_decay_steps}, expected at most {decay_steps - warmup_steps}, the rest "
            f"of decay_steps={decay_steps} after warmup_steps={warmup_steps}"
        )
    return config.model_copy(
        update={
            "warmup_steps": warmup_steps,
            "warmup_ratio": 0.0,
            "decay_steps": decay_steps,
            "min_lr": None,
            "min_lr_ratio": min_lr_ratio,
            "wsd_decay_steps": wsd_decay_steps,
        }
    )


class Schedule:
    """Sets `lr` of every parameter group, in the proportions that the groups have now.

    `step` is the number of optimizer steps already taken, which the caller counts.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: ScheduleConfig, peak_lr: float, num_steps: int):
        self.optimizer = optimizer
        self.peak_lr = peak_lr
        self._parts = [group["lr"] / peak_lr for group in optimizer.param_groups]
        self.shape = make_shape(config, peak_lr, num_steps)
        self.step = 0

    def set_rate(self) -> float:
        """Returns the rate of the next step, and sets it. Call it before `optimizer.step()`."""
        lr = self.peak_lr * lr_factor(self.step + 1, self.shape)
        for group, part in zip(self.optimizer.param_groups, self._parts, strict=True):
            group["lr"] = lr * part
        return lr

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the step, but keeps the configured shape."""
        self.step = int(state["step"])


def decay_groups(model: torch.nn.Module) -> dict[str, bool]:
    """Returns parameter name -> whether it decays: two or more dims, and no bias. Uses full shapes, before sharding."""
    return {name: p.ndim >= 2 and not name.endswith("bias") for name, p in model.named_parameters()}


def make_optimizer(
    model: torch.nn.Module,
    config: OptimizerConfig,
    decays: dict[str, bool],
    max_grad_norm: float = math.inf,
    ns_dtype: torch.dtype = torch.bfloat16,
) -> torch.optim.Optimizer:
    """Makes an optimizer over the trainable parameters in two groups.

    AdamW and Muon clip in their steps, and raise for a norm that is not finite; torch's optimizers do not. Muon has its
    matrices in groups, by their blocks, before those two, which are AdamW's.
    """
    named = optim.muon_param_groups(model, split=config.muon_split) if config.name == "muon" else []
    matrices = [{**group, "params": [p for _, p in group["params"]]} for group in named if group["use_muon"]]
    those = {id(parameter) for group in matrices for parameter in group["params"]}

    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": config.weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in those:
            groups[0 if decays[name] else 1]["params"].append(parameter)
    groups = [group for group in groups if group["params"]]
    if not groups and not matrices:
        raise ValueError("the model has no parameter with requires_grad=True, so there is nothing to train")
    if config.name == "sgd":
        sgd = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum or 0.0)
        return optim.local_optimizer(sgd)
    if config.name == "adamw" and config.implementation != "fsdp2x":
        choice = {"foreach": config.implementation == "foreach", "fused": config.implementation == "fused"}
        adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, **choice)
        return optim.local_optimizer(adamw)
    options: dict[str, Any] = {"max_grad_norm": max_grad_norm, "error_if_nonfinite": True}
    if config.moments_dtype is not None:
        options["moments_dtype"] = getattr(torch, config.moments_dtype) if config.moments_dtype != "int8" else "int8"
        options["stochastic_rounding"] = config.stochastic_rounding
    if config.name == "muon":
        rest = {"use_muon": False, "betas": config.betas, "eps": config.eps, "lr": config.adamw_lr or config.lr}
        return optim.Muon(
            matrices + [{**group, **rest} for group in groups],
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=0.95 if config.momentum is None else config.momentum,
            adjust_lr_fn="match_rms_adamw",
            ns_method=config.muon_ns_method,
            ns_dtype=ns_dtype,
            **options,
        )
    return optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, **options)


# ---- loss scaling for float16

# Below it even gradients of 1 vanish in float16's sums. A run whose scale falls so low will not recover.
SMALLEST_SCALE = 2.0**-14


class GradScaler:
    """Implements the rule of `torch.amp.GradScaler` with one all-reduce per step instead of one per parameter.

    A step is good if all gradients are finite on all ranks. After `growth_interval` good steps in a row the scale
    doubles. After a bad one, which every rank skips, it halves. `state_dict` has the keys of torch's.
    """

    def __init__(self, config: ScalerConfig):
        self.growth_interval = config.growth_interval
        self.scale = config.init_scale
        self.num_good_steps = 0

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> bool:
        """Divides all gradients by the scale, in place. Returns whether the step is good. Collective."""
        grads = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        grads = [grad for grad in grads if grad.numel()]
        device = grads[0].device if grads else torch.device("cpu")
        largest = torch.zeros((), device=device)
        if grads:
            # NaN wins every maximum of torch, infinity every other one.
            largest = torch.stack([norm.float() for norm in torch._foreach_norm(grads, float("inf"))]).max()
            torch._foreach_mul_(grads, 1.0 / self.scale)
        bad = (~torch.isfinite(largest)).float()
        if dist.is_initialized():
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return not bool(bad.item())

    def update(self, good: bool) -> None:
        """Adapts the scale after a step that was good, or skipped.

        Raises:
            RuntimeError: the scale is so small that the gradients must be wrong.
        """
        if good:
            self.num_good_steps += 1
            if self.num_good_steps == self.growth_interval:
                self.scale, self.num_good_steps = 2.0 * self.scale, 0
            return
        self.scale, self.num_good_steps = 0.5 * self.scale, 0
        if self.scale < SMALLEST_SCALE:
            raise RuntimeError(
                f"the gradients overflow float16 at every scale down to {self.scale:g}: the loss is not a number. "
                "Lower optimizer.lr, or compute in bfloat16 (parallel.param_dtype)."
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.num_good_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the scale and how long it has been good."""
        self.scale = float(state["scale"])
        self.num_good_steps = min(int(state["_growth_tracker"]), self.growth_interval - 1)
