"""The optimizer with its two decay groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import Any

import torch

from .config import OptimizerConfig, ScheduleConfig


def lr_factor(step: int, *, kind: str, warmup_steps: int, decay_steps: int, min_lr_ratio: float) -> float:
    """Learning rate of optimizer step `step` (the first is 1) as a fraction of the peak.

    Warm-up: step / warmup_steps. Then, with t = (step - warmup_steps) / (decay_steps - warmup_steps) clamped to [0, 1],
    cosine: min_lr_ratio + (1 - min_lr_ratio) * (1 + cos(pi * t)) / 2; constant: 1.
    """
    if step < warmup_steps:
        return step / warmup_steps
    if kind == "constant":
        return 1.0
    t = (step - warmup_steps) / (decay_steps - warmup_steps) if decay_steps > warmup_steps else 1.0
    t = min(max(t, 0.0), 1.0)
    return min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * t))


class Schedule:
    """Sets `lr` of every parameter group; `step` is the number of optimizer steps already taken."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: ScheduleConfig, peak_lr: float, num_steps: int):
        self.optimizer = optimizer
        self.peak_lr = peak_lr
        self.shape = {
            "kind": config.kind,
            "warmup_steps": config.warmup_steps,
            "decay_steps": config.decay_steps or num_steps,
            "min_lr_ratio": config.min_lr_ratio,
        }
        self.step = 0

    def advance(self) -> float:
        """Call before `optimizer.step()`; returns the rate that the step uses."""
        self.step += 1
        lr = self.peak_lr * lr_factor(self.step, **self.shape)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "peak_lr": self.peak_lr, **self.shape}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Takes the step, keeps the configured shape. Returns what differs from the saved shape, as sentences."""
        self.step = int(state["step"])
        now = {"peak_lr": self.peak_lr, **self.shape}
        return [f"{key} was {state[key]}, is {now[key]}" for key in now if key in state and state[key] != now[key]]


def decay_groups(model: torch.nn.Module) -> dict[str, bool]:
    """Parameter name -> whether it decays: two or more dims. Decided before sharding, by the whole shape."""
    return {name: parameter.ndim >= 2 for name, parameter in model.named_parameters()}


def make_optimizer(model: torch.nn.Module, config: OptimizerConfig, decays: dict[str, bool]) -> torch.optim.Optimizer:
    """`torch.optim.AdamW` over the trainable parameters in two groups."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": config.weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[0 if decays[name] else 1]["params"].append(parameter)
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError("the model has no parameter with requires_grad=True: nothing to train")
    chosen = {"auto": {}, "foreach": {"foreach": True}, "fused": {"fused": True}, "for_loop": {"foreach": False}}
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, **chosen[config.implementation])


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
