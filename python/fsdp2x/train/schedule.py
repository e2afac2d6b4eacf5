"""The optimizer with its two decay groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

import fsdp2x

from ..optim.muon_groups import named_matrices
from .config import ConfigError, OptimizerConfig, ScheduleConfig

TORCH_LOOPS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "for_loop": {"foreach": False}}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything that `lr_factor` needs beside the step; rates are fractions of the peak."""

    kind: str
    warmup_steps: int
    decay_steps: int
    min_lr_ratio: float
    warmup_start_ratio: float = 0.0
    wsd_decay_steps: int = 0
    wsd_decay: str = "linear"


def lr_factor(step: int, shape: Shape) -> float:
    """Learning rate of optimizer step `step` (the first is 1) as a fraction of the peak.

    With w = warmup_steps, d = decay_steps, low = min_lr_ratio and t = (step - w) / (d - w):

        step < w       start + (1 - start) * step / w
        constant       1, also after d
        step > d       low
        linear         low + (1 - low) * (1 - t)
        cosine         low + (1 - low) * (1 + cos(pi * t)) / 2
        inverse_sqrt   max(low, sqrt(max(w, 1) / step))
        wsd            1 until d - wsd_decay_steps, then low + (1 - low) * f(u), u = the passed part of the decay:
                       linear 1 - u, cosine (1 + cos(pi * u)) / 2, exponential 2 * 0.5 ** u - 1, minus_sqrt 1 - sqrt(u)
    """
    w, d, low = shape.warmup_steps, shape.decay_steps, shape.min_lr_ratio
    if step < w:
        return shape.warmup_start_ratio + (1.0 - shape.warmup_start_ratio) * step / w
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
        height = _falling(shape.wsd_decay, (step - start) / (d - start))
    else:
        height = _falling(shape.kind, (step - w) / (d - w) if d > w else 1.0)
    return low + (1.0 - low) * height


def _falling(kind: str, part: float) -> float:
    """From 1 at part 0 to 0 at part 1."""
    return {
        "linear": lambda: 1.0 - part,
        "cosine": lambda: 0.5 * (1.0 + math.cos(math.pi * part)),
        "exponential": lambda: 2.0 * 0.5**part - 1.0,
        "minus_sqrt": lambda: 1.0 - math.sqrt(part),
    }[kind]()


def make_shape(config: ScheduleConfig, peak_lr: float, num_steps: int) -> Shape:
    """The shape for a run of `num_steps`; raises `ConfigError` where its parts do not fit into each other."""
    decay_steps = config.decay_steps or num_steps
    warmup_steps = config.warmup_steps or round(config.warmup_ratio * num_steps)
    min_lr_ratio = config.min_lr_ratio if config.min_lr is None else config.min_lr / peak_lr
    if min_lr_ratio > 1:
        raise ConfigError(f"schedule.min_lr: got {config.min_lr}, expected at most optimizer.lr={peak_lr}")
    wsd_decay_steps = config.wsd_decay_steps or max(decay_steps // 10, 1)
    if config.kind == "wsd" and config.wsd_decay_steps and warmup_steps + wsd_decay_steps > decay_steps:
        raise ConfigError(
            f"schedule.wsd_decay_steps: got {wsd_decay_steps}, expected at most {decay_steps - warmup_steps}: what "
            f"decay_steps={decay_steps} leaves after warmup_steps={warmup_steps}"
        )
    return Shape(
        kind=config.kind,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        min_lr_ratio=min_lr_ratio,
        warmup_start_ratio=config.warmup_start_ratio,
        wsd_decay_steps=wsd_decay_steps,
        wsd_decay=config.wsd_decay,
    )


class Schedule:
    """Sets `lr` of every parameter group, in the proportions that the groups have when this is made.

    `step` is the number of optimizer steps already taken or skipped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: ScheduleConfig, peak_lr: float, num_steps: int):
        self.optimizer = optimizer
        self.peak_lr = peak_lr
        self._parts = [group["lr"] / peak_lr for group in optimizer.param_groups]
        self.shape = make_shape(config, peak_lr, num_steps)
        self.step = 0

    def advance(self) -> float:
        """Call before `optimizer.step()`; returns the rate that the step uses."""
        self.step += 1
        lr = self.peak_lr * lr_factor(self.step, self.shape)
        for group, part in zip(self.optimizer.param_groups, self._parts, strict=True):
            group["lr"] = lr * part
        return lr

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "peak_lr": self.peak_lr, **dataclasses.asdict(self.shape)}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Takes the step, keeps the configured shape. Returns what differs from the saved shape, as sentences."""
        self.step = int(state["step"])
        now = {"peak_lr": self.peak_lr, **dataclasses.asdict(self.shape)}
        return [f"{key} was {state[key]}, is {now[key]}" for key in now if key in state and state[key] != now[key]]


def decay_groups(model: torch.nn.Module) -> dict[str, bool]:
    """Parameter name -> whether it decays: two or more dims. Decided before sharding, by the whole shape."""
    return {name: parameter.ndim >= 2 for name, parameter in model.named_parameters()}


def make_optimizer(
    model: torch.nn.Module, config: OptimizerConfig, decays: dict[str, bool], max_grad_norm: float | None = None
) -> torch.optim.Optimizer:
    """An optimizer over the trainable parameters in two groups: ours, or one of torch's loops.

    Ours clips in its steps if there is a largest norm; torch's know nothing of it. Muon has its matrices in a group in
    front of those two, which are AdamW's.
    """
    matrices = [parameter for _, parameter in named_matrices(model)] if config.name == "muon" else []
    those = {id(parameter) for parameter in matrices}

    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": config.weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in those:
            groups[0 if decays[name] else 1]["params"].append(parameter)
    groups = [group for group in groups if group["params"]]
    if not groups and not matrices:
        raise ValueError("the model has no parameter with requires_grad=True: nothing to train")
    ours = config.is_ours
    options: dict[str, Any] = {"max_grad_norm": max_grad_norm} if ours else TORCH_LOOPS[config.implementation]
    if config.name == "sgd":
        make = fsdp2x.optim.SGD if ours else torch.optim.SGD
        return make(groups, lr=config.lr, momentum=config.momentum or 0.0, **options)
    if config.name == "lion":
        return fsdp2x.optim.Lion(groups, lr=config.lr, betas=config.betas, **options)
    if config.moments_dtype is not None:
        options["moments_dtype"] = getattr(torch, config.moments_dtype) if config.moments_dtype != "int8" else "int8"
        options["stochastic_rounding"] = config.stochastic_rounding
    if config.name == "muon":
        rest = {"use_muon": False, "betas": config.betas, "eps": config.eps, "lr": config.adamw_lr or config.lr}
        return fsdp2x.optim.Muon(
            [{"params": matrices}] * bool(matrices) + [{**group, **rest} for group in groups],
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=0.95 if config.momentum is None else config.momentum,
            adjust_lr_fn=config.muon_lr_scale,
            **options,
        )
    make = fsdp2x.optim.AdamW if ours else torch.optim.AdamW
    return make(groups, lr=config.lr, betas=config.betas, eps=config.eps, **options)


def restore_settings(optimizer: torch.optim.Optimizer, configured: list[dict[str, Any]]) -> list[str]:
    """Lets the configured values win over those that a checkpoint brought. Returns what differed, as sentences.

    The rate is the schedule's business: it is set anew at each step.
    """
    differing = []
    for index, (group, values) in enumerate(zip(optimizer.param_groups, configured, strict=True)):
        for key, value in values.items():
            if key != "lr" and group.get(key) != value:
                differing.append(f"{key} of group {index} was {group.get(key)}, is {value}")
                group[key] = value
    return differing
