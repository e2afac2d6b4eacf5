"""Clients of engines for trainer ranks: ``RolloutClient`` for other processes, ``ColocatedRollout`` for this one.

Failures are the same on every rank. A request runs between ``ask`` and ``collect``, while the rank trains. A thread
sends it and takes its answer, so the engine never waits for a trainer that pushes weights to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import problems_of_all
from fsdp2x.rl.rollout.batch import MAX_BATCH_ROWS, MAX_BATCH_TOKENS, sample
from fsdp2x.rl.rollout.dispatch import Connection, Dispatch, EngineState
from fsdp2x.rl.rollout.sampling import Completion, Sampling, Version
from fsdp2x.rl.rollout.server import digest_of, weights_address
from fsdp2x.rl.rollout.text import Prompt, plain_prompt
from fsdp2x.rl.sync.receiver.engine import WireError
from fsdp2x.rl.sync.receiver.engine_adapter import LoraParameters
from fsdp2x.rl.sync.targets.base import EngineTarget
from fsdp2x.rl.sync.targets.in_process import InProcess
from fsdp2x.rl.sync.targets.peer import Peer


class RolloutError(RuntimeError):
    """An engine is gone, was too late, or rejected a request. Raised on every rank."""


class RolloutClient:
    """A connection of each rank to one or several engines of this host. A context manager that closes itself.

        engine = rollout.RolloutClient("@engine")
        sync = fsdp2x.sync.connect(model, engine.target, names="model")
        sync.push(version=0)
        engine.ask(prompts, rollout.Sampling(max_tokens=64, num_samples=8))
        completions = engine.collect()

    With several addresses, each rank sends prompts to the engine that owes it the fewest tokens. If an engine ends or
    hangs, its prompts go to the others, and pushes continue without it, with a warning. After another one starts at its
    address, the next full push reaches it, and it samples again. Responses do not depend on the engine. If no engine is
    left, every rank raises.
    """

    @checked
    def __init__(
        self,
        address: str | Sequence[str],
        *,
        contact_s: float = 120.0,
        timeout_s: float = 120.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Connects. Collective.

        Args:
            address: address of the ``RolloutServer``, or of several.
            contact_s: seconds to wait for all engines to start.
            timeout_s: seconds to wait for an answer. Use less than the process group's timeout, so that the request
                fails and not the group. With several engines, one that is silent for half of it is lost.
            group: ranks that fail together. Default: all.

        Raises:
            ValueError: a time is not positive, or an address is missing or repeated.
            RolloutError: on every rank if an engine does not answer one of them.
        """
        if not (contact_s > 0 and timeout_s > 0):
            raise ValueError(
                f"fsdp2x.rollout.RolloutClient: contact_s and timeout_s must be positive, got {contact_s}, {timeout_s}"
            )
        addresses = [address] if isinstance(address, str) else list(address)
        if not addresses or len(set(addresses)) < len(addresses):
            raise ValueError(f"fsdp2x.rollout.RolloutClient: each engine needs its own address, got {addresses}")
        self._timeout_s, self._group = timeout_s, group
        self._engines = [Connection(one) for one in addresses]
        self._name = repr(addresses[0]) if len(addresses) == 1 else repr(addresses)
        self._request: Dispatch | None = None
        self._failures: list[int] = []  # of each engine at the time of the request
        self._is_closed = False
        problem = None
        deadline = time.monotonic() + contact_s
        for engine in self._engines:
            try:
                engine.connect(deadline)
            except OSError as error:
                why = f"in {contact_s:g} s ({error}); is `fsdp2x rollout` running?"
                problem = f"no engine answers at {engine.address!r} {why}"
        self._settle("connect", problem)
        #: Target for ``fsdp2x.sync.connect`` with ``names="model"``. The first rank pushes.
        self.target: EngineTarget = Peer(
            [weights_address(one) for one in addresses], min_engines=None if len(addresses) == 1 else 1
        )

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @checked
    def ask(self, prompts: Sequence, sampling: Sampling) -> None:
        """Sends a request of this rank and returns at once. Not collective, but every rank must ask.

        Args:
            prompts: token ids of each prompt. An engine with a tokenizer also takes text, or a list of messages with
                ``role`` and ``content``. Ranks have different prompts, or none.
            sampling: sampling settings.

        Raises:
            RuntimeError: the previous answer was not collected, or the client is closed.
            TypeError: a prompt has another type.
        """
        if self._request is not None:
            raise RuntimeError("fsdp2x.rollout.ask: collect() the answer to the last request first")
        if self._is_closed:
            raise RuntimeError("fsdp2x.rollout.ask: the client is closed")
        asked = [plain_prompt(prompt) for prompt in prompts]
        self._failures = [engine.num_failures for engine in self._engines]
        self._request = Dispatch(self._engines, asked, dataclasses.asdict(sampling), self._timeout_s)

    def collect(self) -> list[Completion]:
        """Waits for the answer to the last request. Collective.

        Raises:
            RolloutError: on every rank if the request of one failed. If the only engine is gone or hangs, it is lost.
                After a rejection you may make the next request.
            RuntimeError: there is no request.
        """
        request, self._request = self._request, None
        if request is None:
            raise RuntimeError("fsdp2x.rollout.collect: there is no request. Call ask(...) first.")
        completions, problem = request.wait()
        self._settle("sample", problem)
        for engine, before in zip(self._engines, self._failures, strict=True):
            if engine.num_failures > before:
                warnings.warn(
                    f"fsdp2x.rollout: the engine at {engine.address!r} is lost ({engine.reason}). The other engines "
                    "take over its prompts. To use it again, restart it and push to it.",
                    stacklevel=2,
                )
        return completions

    @property
    def engines(self) -> list[EngineState]:
        """Returns the last known state of each engine: whether it samples, tokens, and failures. Not collective."""
        return [engine.state for engine in self._engines]

    def status(self) -> dict[str, Any]:
        """Returns the status of the first engine that answers. Not collective.

        Returns:
            ``state``, ``version``, ``reason``, ``pid``, ``vocab_size``, ``has_weights``, ``has_tokenizer``, and the
            default ``stop_ids``.

        Raises:
            RolloutError: no engine answers.
            RuntimeError: a request is running.
        """
        self._require_idle("status")
        problems = []
        for engine in self._engines:
            try:
                answer = engine.answer_to("status", time.monotonic() + self._timeout_s)
                return {name: value for name, value in answer.items() if name != "ok"}
            except WireError as error:
                problems.append(str(error))
        raise RolloutError(f"fsdp2x.rollout: {'; '.join(problems)}")

    @checked
    def check_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], *, dtype: torch.dtype | None = None) -> None:
        """Compares the weights of every sampling engine with ``tensors``, bit by bit. Collective.

        Call it after the first push, or to check an engine. The first rank compares SHA-256 digests.

            engine.check_weights(fsdp2x.full_tensors(model))

        Args:
            tensors: (name, full tensor) as pushed, on every rank. All ranks run the iterator to its end.
            dtype: dtype in which floating-point weights are pushed. They are cast to it, then to the engine's dtype.

        Raises:
            RolloutError: on every rank if an engine has other values, lacks a name, or does not answer.
            RuntimeError: a request is running.
        """
        self._require_idle("check_weights")
        held: list[tuple[str, dict[str, Any]]] = []
        problems = []
        is_first = not dist.is_initialized() or dist.get_rank(self._group) == 0
        for engine in self._engines if is_first else ():
            if engine.socket is not None:
                try:
                    answer = engine.answer_to("digests", time.monotonic() + self._timeout_s)
                    held.append((engine.address, answer.get("digests", {})))
                    if "error" in answer:
                        problems.append(f"the engine at {engine.address!r}: {answer['error']}")
                except WireError as error:
                    problems.append(str(error))
        wrong: dict[str, list[str]] = {}
        for name, tensor in tensors:
            for address, digests in held:
                if digests and not _is_equal(tensor, dtype, digests.get(name)):
                    wrong.setdefault(address, []).append(name)
        problems += [
            f"the engine at {address!r} has other values of {len(names)} parameters, such as {names[0]!r}"
            for address, names in wrong.items()
        ]
        self._settle("check_weights", "; ".join(problems) or None)

    def _require_idle(self, call: str) -> None:
        if self._request is not None or self._is_closed:
            raise RuntimeError(f"fsdp2x.rollout.{call}: a request is running, or the client is closed")

    def close(self) -> None:
        """Disconnects from the engines, which stay as they are. Not collective."""
        self._is_closed = True
        for engine in self._engines:
            engine.close()

    def _settle(self, phase: str, problem: str | None) -> None:
        """Exchanges failures. If one rank failed, all raise."""
        said = "" if problem is None else f"rank 0: {problem}"
        if dist.is_initialized():
            said = problems_of_all(problem, self._group, f"rollout ({phase})")
        if said:
            if phase == "connect":
                self.close()
            which = "engine" if len(self._engines) == 1 else "engines"
            raise RolloutError(f"fsdp2x.rollout: the {which} at {self._name} failed in {phase}: {said}")


def _is_equal(tensor: torch.Tensor, dtype: torch.dtype | None, held: list[Any] | None) -> bool:
    if held is None:
        return False
    name, shape, digest = held
    if tensor.is_floating_point():
        tensor = tensor.to(dtype or tensor.dtype).to(getattr(torch, name))
    return list(tensor.shape) == shape and digest_of(tensor) == digest


# ---- an engine in each trainer process, which generates while the trainer's memory is freed


class ColocatedRollout:
    """Samples with a model of this process, with the methods of ``RolloutClient``. ``collect`` does the sampling.

    Each rank has one with full weights. It does not sample between the parts of a push.
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
        """Takes over ``model``.

        Args:
            model: an unsharded transformers model with a language-model head. Do not use it yourself any more.
            max_batch_rows, max_batch_tokens, tokenizer: see ``sample``.
        """
        self._options: dict[str, Any] = {
            "max_batch_rows": max_batch_rows,
            "max_batch_tokens": max_batch_tokens,
            "tokenizer": tokenizer,
        }
        self._model = model.eval().requires_grad_(False)
        self._parameters = LoraParameters(model)
        self._version: Version = None
        self._reason = "nothing was pushed yet"
        self._request: tuple[Sequence[Prompt], Sampling] | None = None
        #: Target for ``fsdp2x.sync.connect`` with ``names="model"``.
        self.target: EngineTarget = InProcess(
            self._parameters.load,
            copies=False,
            start=self._start,
            apply_delta=self._parameters.apply_delta,
            finish=self._finish,
            abort=self._abort,
            load_adapter=self._parameters.prepare_adapter,
        )

    def _start(self, mode: str) -> None:
        if mode != "adapter":  # a push of an adapter changes nothing before its commit
            self._parameters.drop_adapter()
            self._reason = "a push is under way"

    def _finish(self, version: Version) -> None:
        self._version, self._reason = version, ""

    def _abort(self, reason: str) -> None:
        self._reason = reason

    def ask(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Stores a request. See ``RolloutClient.ask``."""
        if self._request is not None:
            raise RuntimeError("fsdp2x.rollout.ask: collect() the answer to the last request first")
        self._request = prompts, sampling

    def collect(self) -> list[Completion]:
        """Samples the responses of the last request. Not collective.

        Raises:
            RuntimeError: there is no request, or a push was not committed.
            ValueError: a prompt cannot be continued.
        """
        if self._request is None:
            raise RuntimeError("fsdp2x.rollout.collect: there is no request. Call ask(...) first.")
        (prompts, sampling), self._request = self._request, None
        return sample(self._model, prompts, sampling, weights=self._weights, **self._options)

    @contextlib.contextmanager
    def _weights(self) -> Iterator[Version]:
        if self._reason:
            raise RuntimeError(
                f"fsdp2x.rollout: the weights are not those of one version ({self._reason}). Push first."
            )
        yield self._version

    def close(self) -> None:
        """Does nothing, because there is no connection to close."""
