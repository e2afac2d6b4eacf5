"""``ColocatedRollout``: an engine in each trainer process, which generates while the trainer's memory is away."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.rl.rollout.sampling import Completion, Sampling, Version, sample
from fsdp2x.rl.sync.receiver.engine import Parameters
from fsdp2x.rl.sync.targets.base import EngineTarget
from fsdp2x.rl.sync.targets.in_process import InProcess


class ColocatedRollout:
    """The methods of ``RolloutClient``, by a model of this process: ``collect`` is where it samples.

    Each rank has one, of whole weights. Nothing is sampled while another part of a push is missing.
    """

    @checked
    def __init__(self, model: nn.Module) -> None:
        """``model``: a transformers model with a language-model head, unsharded; it belongs to this from now on."""
        self._model = model.eval().requires_grad_(False)
        self._parameters = Parameters(dict(model.named_parameters()))
        self._version: Version = None
        self._reason = "nothing was pushed yet"
        self._request: tuple[Sequence, Sampling] | None = None
        #: For ``fsdp2x.sync.connect``, with ``names="model"``.
        self.target: EngineTarget = InProcess(
            self._parameters.load,
            copies=False,
            start=self._start,
            apply_delta=self._parameters.apply_delta,
            finish=self._finish,
            abort=self._abort,
        )

    def _start(self, mode: str) -> None:
        self._reason = "a push is under way"

    def _finish(self, version: Version) -> None:
        self._version, self._reason = version, ""

    def _abort(self, reason: str) -> None:
        self._reason = reason

    def ask(self, prompts: Sequence, sampling: Sampling) -> None:
        """As ``RolloutClient.ask``."""
        if self._request is not None:
            raise RuntimeError("fsdp2x.rollout.ask: collect() the answer to the last request first")
        self._request = prompts, sampling

    def collect(self) -> list[Completion]:
        """Samples what was asked for. Not collective.

        Raises:
            RuntimeError: nothing was asked, or a push was not committed. ValueError: a prompt that cannot be continued.
        """
        if self._request is None:
            raise RuntimeError("fsdp2x.rollout.collect: ask(...) first")
        (prompts, sampling), self._request = self._request, None
        return sample(self._model, prompts, sampling, weights=self._weights)

    @contextlib.contextmanager
    def _weights(self) -> Iterator[Version]:
        if self._reason:
            raise RuntimeError(f"fsdp2x.rollout: the weights are not those of one version ({self._reason}); push first")
        yield self._version

    def close(self) -> None:
        """As ``RolloutClient.close``; there is nothing to leave."""
