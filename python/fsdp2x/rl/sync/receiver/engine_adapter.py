"""LoRA adapters for engines that are plain torch modules, in addition to the weights that ``Parameters`` takes.

This file needs torch, the standard library, and ``engine.py`` in the same folder. It adds the two factors of each layer
to its output, so the base does not change: nothing accumulates over pushes, no copy of the base is needed, and the
numbers are those of PEFT's unmerged layers. Each adapted layer runs two more small products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

if __package__:
    from .engine import Parameters
else:
    from engine import Parameters

PREFIX = "base_model.model."  # of names in PEFT's files


class LoraParameters(Parameters):
    """The parameters and buffers of ``model`` by name, and one adapter. A sink for a ``Receiver``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.state_dict())
        self._model = model
        self._hooks: list[Any] = []

    def prepare_adapter(self, adapter: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Checks an adapter and returns the function that replaces the last one by it.

        Args:
            adapter: a description whose ``layers`` has the scale of each module, by its name in PEFT's files.
            tensors: ``lora_A.weight`` [rank, in] and ``lora_B.weight`` [out, rank] of each module.

        Raises:
            ValueError: a module is missing, is not a linear layer, or has other sizes.
        """
        known = dict(self._model.named_modules())
        parts = []
        for name, scale in adapter["layers"].items():
            module = known.get(name.removeprefix(PREFIX))
            if not isinstance(module, nn.Linear):
                what = "no such module" if module is None else f"a {type(module).__name__}"
                raise ValueError(f"the adapter changes the linear layer {name!r}, but this engine has {what}")
            down, up = (tensors[f"{name}.lora_{part}.weight"].to(module.weight.device) for part in "AB")
            if (up.shape[0], down.shape[1]) != tuple(module.weight.shape) or up.shape[1] != down.shape[0]:
                raise ValueError(
                    f"the adapter's factors of {name!r} are {list(up.shape)} and {list(down.shape)}, but this engine's "
                    f"weight is {list(module.weight.shape)}"
                )
            parts.append((module, _added(down, up, scale)))

        def install() -> None:
            self.drop_adapter()
            self._hooks = [module.register_forward_hook(hook) for module, hook in parts]

        return install

    def drop_adapter(self) -> None:
        """Removes the adapter, so that the base runs alone."""
        while self._hooks:
            self._hooks.pop().remove()


def _added(down: torch.Tensor, up: torch.Tensor, scale: float) -> Callable[..., torch.Tensor]:
    def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        low = F.linear(args[0].to(down.dtype), down)
        return (output + F.linear(low, up) * scale).to(output.dtype)

    return hook
