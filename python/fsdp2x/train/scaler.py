"""Loss scaling for float16: scale, unscale the local shards, and agree over all ranks whether a step is taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..optim.local import local_tensor
from .config import ScalerConfig

# Below it even gradients of 1 vanish in float16's sums; a run whose scale falls so low will not recover.
SMALLEST_SCALE = 2.0**-14


class GradScaler:
    """The rule of `torch.amp.GradScaler`, with one all-reduce a step instead of one per parameter.

    A step is good when all gradients are finite on all ranks. After `growth_interval` good steps in a row the scale is
    multiplied by `growth_factor`; after a bad one, which every rank skips, by `backoff_factor`. `state_dict` has the
    keys of torch's.
    """

    def __init__(self, config: ScalerConfig):
        self.growth_factor = config.growth_factor
        self.backoff_factor = config.backoff_factor
        self.growth_interval = config.growth_interval
        self.scale = config.init_scale
        self.num_good_steps = 0

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> bool:
        """Divides all gradients by the scale, in place; returns whether the step is good. Collective."""
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
            RuntimeError: the scale has become so small that the gradients must be wrong.
        """
        if good:
            self.num_good_steps += 1
            if self.num_good_steps == self.growth_interval:
                self.scale, self.num_good_steps = self.scale * self.growth_factor, 0
            return
        self.scale, self.num_good_steps = self.scale * self.backoff_factor, 0
        if self.scale < SMALLEST_SCALE:
            raise RuntimeError(
                f"the gradients overflow float16 at every scale down to {self.scale:g}: the loss is not a number; "
                "lower optimizer.lr, or compute in bfloat16 (parallel.param_dtype)"
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.num_good_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the scale and how long it has been good; the factors stay as configured."""
        self.scale = float(state["scale"])
        self.num_good_steps = min(int(state["_growth_tracker"]), self.growth_interval - 1)
