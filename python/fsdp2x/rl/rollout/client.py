"""Engines as trainer ranks see them: ``RolloutClient`` in another process, ``ColocatedRollout`` in this one.

A client's failures are the same on every rank. A request is on its way between ``ask`` and ``collect``, while the rank
trains. A thread sends it and takes its answer: the engine never waits for a trainer that pushes weights to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import problems_of_all
from fsdp2x.rl.rollout.batch import MAX_BATCH_ROWS, MAX_BATCH_TOKENS, sample
from fsdp2x.rl.rollout.sampling import Completion, Sampling, Version
from fsdp2x.rl.rollout.server import ANSWER, weights_address
from fsdp2x.rl.rollout.text import Prompt, plain_prompt
from fsdp2x.rl.sync.receiver.engine import Parameters, WireError, receive_frame, send_frame
from fsdp2x.rl.sync.targets.base import EngineTarget
from fsdp2x.rl.sync.targets.in_process import InProcess
from fsdp2x.rl.sync.targets.peer import Peer
from fsdp2x.rl.sync.targets.transports import connected

_RETRY_S = 0.05


class RolloutError(RuntimeError):
    """An engine is gone, came too late, or refused a request; raised on every rank."""


class RolloutClient:
    """A connection of each rank to one engine of this host. A context manager that closes itself.

    engine = rollout.RolloutClient("@engine")
    sync = fsdp2x.sync.connect(model, engine.target, names="model")
    sync.push(version=0)
    engine.ask(prompts, rollout.Sampling(max_tokens=64, num_samples=8))
    completions = engine.collect()
    """

    @checked
    def __init__(
        self,
        address: str,
        *,
        contact_s: float = 120.0,
        timeout_s: float = 120.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Connects. Collective.

        Args:
            address: of the ``RolloutServer``.
            contact_s: how long to wait for the engine to start.
            timeout_s: how long an answer may take. Less than the process group's own timeout, so that it is the request
                that fails, and not the group.
            group: ranks that fail together, default all.

        Raises:
            ValueError: times that are not positive.
            RolloutError: on every rank: no engine answers one of them.
        """
        if not (contact_s > 0 and timeout_s > 0):
            raise ValueError(
                f"fsdp2x.rollout.RolloutClient: contact_s and timeout_s must be positive, got {contact_s}, {timeout_s}"
            )
        self._address, self._timeout_s, self._group = address, timeout_s, group
        self._connection: socket.socket | None = None
        self._request: _Request | None = None
        problem = None
        try:
            self._connection = _connect(address, time.monotonic() + contact_s)
        except OSError as error:
            problem = f"no engine answers at {address!r} in {contact_s:g} s ({error}); is `fsdp2x rollout` running?"
        self._settle("connect", problem)
        #: For ``fsdp2x.sync.connect``, with ``names="model"``: the first rank pushes.
        self.target: EngineTarget = Peer(weights_address(address))

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @checked
    def ask(self, prompts: Sequence, sampling: Sampling) -> None:
        """Sends a request of this rank and returns at once; a rank without prompts asks, too. Not collective.

        Args:
            prompts: token ids of each, or text, or a list of messages with ``role`` and ``content``, for an engine with
                a tokenizer; ranks have their own.
            sampling: how to draw.

        Raises:
            RuntimeError: the answer to an earlier one was not collected, or the client is closed.
            TypeError: a prompt is of another kind.
        """
        if self._request is not None:
            raise RuntimeError("fsdp2x.rollout.ask: collect() the answer to the last request first")
        if self._connection is None:
            raise RuntimeError("fsdp2x.rollout.ask: the client is closed")
        body = {"prompts": [plain_prompt(prompt) for prompt in prompts], **dataclasses.asdict(sampling)}
        self._request = _Request(self._connection, "sample", body, self._timeout_s)

    def collect(self) -> list[Completion]:
        """The answer to what was asked last, once it is there. Collective.

        Raises:
            RolloutError: on every rank: what happened to the request of one. An engine that is gone or hangs is lost;
                after a refusal the next request may be made.
            RuntimeError: nothing was asked.
        """
        request, self._request = self._request, None
        if request is None:
            raise RuntimeError("fsdp2x.rollout.collect: ask(...) first")
        answer, problem = request.wait()
        if problem is None and not answer["ok"]:
            problem = f"the engine refused: {answer['error']}"
        self._settle("sample", problem)
        return [
            Completion(i, tokens, log_probs, [(v, n) for v, n in spans], admitted, answer["prompts"][i], text)
            for i, tokens, log_probs, spans, admitted, text in answer["completions"]
        ]

    def status(self) -> dict[str, Any]:
        """What the engine holds: ``state``, ``version``, ``reason``, ``pid``, ``vocab_size``, ``has_weights``.

        Not collective.

        Raises:
            RolloutError: it does not answer. RuntimeError: a request is on its way.
        """
        if self._request is not None or self._connection is None:
            raise RuntimeError("fsdp2x.rollout.status: a request is on its way, or the client is closed")
        answer, problem = _Request(self._connection, "status", {}, self._timeout_s).wait()
        if problem is not None:
            raise RolloutError(f"fsdp2x.rollout: {problem}")
        return {name: value for name, value in answer.items() if name != "ok"}

    def close(self) -> None:
        """Leaves the engine, which stays as it is. Not collective."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread of a request
            self._connection.close()
            self._connection = None

    def _settle(self, phase: str, problem: str | None) -> None:
        """Every rank learns what failed on any; all raise it."""
        said = "" if problem is None else f"rank 0: {problem}"
        if dist.is_initialized():
            said = problems_of_all(problem, self._group, f"rollout ({phase})")
        if said:
            if phase == "connect":
                self.close()
            raise RolloutError(f"fsdp2x.rollout: the engine at {self._address!r} failed in {phase}: {said}")


class _Request:
    """A request on its way."""

    def __init__(self, connection: socket.socket, kind: str, body: dict[str, Any], timeout_s: float) -> None:
        self._connection, self._deadline = connection, time.monotonic() + timeout_s
        self._answer: dict[str, Any] = {}
        self._problem: str | None = "nothing was answered"
        self._thread = threading.Thread(target=self._run, args=(kind, body), name="fsdp2x-rollout", daemon=True)
        self._thread.start()

    def _run(self, kind: str, body: dict[str, Any]) -> None:
        try:
            send_frame(self._connection, kind, body, self._deadline)
            said, self._answer, _ = receive_frame(self._connection, self._deadline)
            self._problem = None if said == ANSWER else f"the engine sent {said!r} in place of an answer"
        except WireError as error:
            # What comes later would be taken for the answer to another request.
            self._connection.close()
            self._problem = f"the engine is gone or hangs: {error}"

    def wait(self) -> tuple[dict[str, Any], str | None]:
        """(answer, what went wrong)."""
        self._thread.join()
        return self._answer, self._problem


def _connect(address: str, deadline: float) -> socket.socket:
    while True:
        try:
            return connected(address, max(deadline - time.monotonic(), _RETRY_S))
        except (ConnectionRefusedError, FileNotFoundError):
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


# ---- an engine in each trainer process, which generates while the trainer's memory is away


class ColocatedRollout:
    """The methods of ``RolloutClient``, by a model of this process: ``collect`` is where it samples.

    Each rank has one, of whole weights. Nothing is sampled while another part of a push is missing.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        *,
        max_batch_rows: int = MAX_BATCH_ROWS,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        tokenizer: Any | None = None,
    ) -> None:
        """
        Args:
            model: a transformers model with a language-model head, unsharded; it belongs to this from now on.
            max_batch_rows, max_batch_tokens, tokenizer: as for ``sample``.
        """
        self._options: dict[str, Any] = {
            "max_batch_rows": max_batch_rows,
            "max_batch_tokens": max_batch_tokens,
            "tokenizer": tokenizer,
        }
        self._model = model.eval().requires_grad_(False)
        self._parameters = Parameters(dict(model.named_parameters()))
        self._version: Version = None
        self._reason = "nothing was pushed yet"
        self._request: tuple[Sequence[Prompt], Sampling] | None = None
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

    def ask(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
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
        return sample(self._model, prompts, sampling, weights=self._weights, **self._options)

    @contextlib.contextmanager
    def _weights(self) -> Iterator[Version]:
        if self._reason:
            raise RuntimeError(f"fsdp2x.rollout: the weights are not those of one version ({self._reason}); push first")
        yield self._version

    def close(self) -> None:
        """As ``RolloutClient.close``; there is nothing to leave."""
