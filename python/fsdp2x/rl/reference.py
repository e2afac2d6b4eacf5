"""A frozen model beside the policy: its log-probabilities, and its memory given back between uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp2x.lifecycle.module import FSDPModule
from fsdp2x.lifecycle.sleep import sleep, wake
from fsdp2x.lifecycle.tree import units_of
from fsdp2x.rl.score import score


class Reference:
    """A sharded model that is only asked: frozen, in evaluation mode, all units freed after each forward.

        reference = rl.Reference(fsdp2x.fully_shard(model))
        with reference:
            logs = [reference.score(row.inputs, row.next_labels) for row in rows]

    Outside of the block its shards are all that it holds; with ``offload`` they wait in host memory, see
    ``fsdp2x.sleep``. Entering and leaving are collective, as is each ``score``. Where the policy is a base model with
    adapters, no second model is needed: ``with torch.no_grad(), policy.disable_adapter(): rl.score(policy, ...)``.
    """

    def __init__(self, model: nn.Module, *, offload: bool = False) -> None:
        """Freezes ``model``, sharded by ``fully_shard``, for good.

        Raises:
            ValueError: nothing in ``model`` is sharded.
        """
        self._states = units_of(model, "rl.Reference")
        self._model, self._offload = model.requires_grad_(False).eval(), offload
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_reshard_after_forward(True, recurse=False)
        self._is_open = self._is_asleep = False
        self._fall_asleep()

    def _fall_asleep(self) -> None:
        if self._offload:
            sleep(self._model)
            self._is_asleep = True

    def __enter__(self) -> Reference:
        if self._is_open:
            raise RuntimeError("fsdp2x.rl.Reference: entered already; one block holds all the rows of a step")
        if self._is_asleep:
            wake(self._model)
            self._is_asleep = False
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_open = False
        if kind is not None:
            return  # the other ranks may be elsewhere
        for state in self._states:
            if state.is_root:
                state.release_memory()
        self._fall_asleep()

    @torch.no_grad()
    def score(
        self, inputs: Mapping[str, Any], next_labels: torch.Tensor, *, temperature: float | torch.Tensor = 1.0
    ) -> torch.Tensor:
        """Log-probabilities of the labels, of their shape, as :func:`score` computes them.

        Raises:
            RuntimeError: outside of the block.
        """
        if not self._is_open:
            raise RuntimeError("fsdp2x.rl.Reference.score: call it inside `with reference:`, which gives memory back")
        return score(self._model, inputs, next_labels, temperature=temperature).log_probs
