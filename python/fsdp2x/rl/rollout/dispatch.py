"""``Dispatch``: sends a request of one rank to one or several engines, in a thread.

Several engines get prompts as their answers come back, always the one that owes the fewest tokens. So a slow engine
gets less. The prompts of an engine that ends or hangs go to the others. Only engines with the last pushed weights
sample.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp2x.rl.rollout.sampling import Completion
from fsdp2x.rl.sync.receiver.engine import WireError, close_files, receive_frame, send_frame
from fsdp2x.rl.sync.targets.transports import connected

ANSWER = "answer"
_PING_S = 1.0  # between two status requests to a working engine
_FRAME_S = 30.0  # for the rest of a frame that has begun
_RETRY_S = 0.05


@dataclass(frozen=True)
class EngineState:
    """An engine as this rank sees it.

    Attributes:
        address: address of its server.
        reason: why it does not sample now: it is gone, hangs, or has other weights. Empty while it samples.
        num_tokens: tokens of responses that it has drawn for this rank.
        num_failures: how often this rank has lost it.
    """

    address: str
    reason: str
    num_tokens: int
    num_failures: int


@dataclass(frozen=True)
class _Piece:
    """Prompts that an engine gets together. ``work`` is the expected number of tokens."""

    body: dict[str, Any]
    indices: Sequence[int]
    work: int


class Connection:
    """A rank's connection to one engine, and what the engine owes."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket: socket.socket | None = None
        self.reason = "it was not connected yet"
        self.num_tokens = self.num_failures = 0
        self.status: dict[str, Any] | None = None
        self.owed: dict[int, _Piece] = {}
        self.is_awaited = False  # whether its answer must come before an engine is chosen
        self._num_requests = 0
        self._status_id: int | None = None  # of a status request without an answer yet
        self._asked_at = self.heard_at = 0.0

    @property
    def state(self) -> EngineState:
        return EngineState(self.address, self.reason, self.num_tokens, self.num_failures)

    @property
    def num_owed(self) -> int:
        """Expected tokens."""
        return sum(piece.work for piece in self.owed.values())

    def connect(self, deadline: float) -> None:
        """Waits for the engine to start.

        Raises:
            OSError: it does not start in time.
        """
        while True:
            try:
                self.socket = connected(self.address, max(deadline - time.monotonic(), _RETRY_S))
                self.reason = ""
                return
            except (ConnectionRefusedError, FileNotFoundError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)

    def request(self, kind: str, body: dict[str, Any], deadline: float) -> int:
        """Sends a request. Returns the id, which the answer repeats.

        Raises:
            WireError: the engine is gone.
        """
        if self.socket is None:
            raise WireError(self.reason)
        self._num_requests += 1
        send_frame(self.socket, kind, {"id": self._num_requests, **body}, deadline)
        return self._num_requests

    def receive(self, deadline: float) -> dict[str, Any]:
        """Receives an answer.

        Raises:
            WireError: the engine is gone, or sends nothing in time.
        """
        if self.socket is None:
            raise WireError(self.reason)
        kind, answer, files = receive_frame(self.socket, deadline)
        close_files(files)
        if kind != ANSWER:
            raise WireError(f"the engine sent {kind!r} in place of an answer")
        self.heard_at = time.monotonic()
        return answer

    def answer_to(self, kind: str, deadline: float) -> dict[str, Any]:
        """Returns the answer to a request without a body. Drops late answers to earlier ones.

        Raises:
            WireError: there is no answer. The connection is closed.
        """
        try:
            number = self.request(kind, {}, deadline)
            while (answer := self.receive(deadline)).pop("id", None) != number:
                pass
            return answer
        except WireError as error:
            self.lose(str(error))
            raise WireError(f"the engine at {self.address!r} is gone or hangs: {error}") from None

    def ask_status(self, deadline: float) -> None:
        self._start_clock()
        self._asked_at = time.monotonic()
        self._status_id = self.request("status", {}, deadline)

    def give(self, piece: _Piece, deadline: float) -> None:
        self._start_clock()
        self.owed[self.request("sample", piece.body, deadline)] = piece

    def take(self, answer: dict[str, Any]) -> _Piece | None:
        """Returns the prompts that an answer belongs to. None if it is a status or late."""
        number = answer.pop("id", None)
        if number == self._status_id:
            self._status_id = None
            self.take_status(answer)
        return self.owed.pop(number, None)

    def take_status(self, status: dict[str, Any]) -> None:
        self.status, self.is_awaited = status, False

    def _start_clock(self) -> None:
        if not self.owes:
            self.heard_at = time.monotonic()

    @property
    def owes(self) -> bool:
        """Whether an answer must come."""
        return self._status_id is not None or bool(self.owed)

    def is_due(self, now: float) -> bool:
        """Returns whether it is time for the next status request."""
        return self._status_id is None and now - self._asked_at > _PING_S

    def lose(self, reason: str, *, is_failure: bool = True) -> list[_Piece]:
        """Closes the connection, because a late answer could be mistaken for another. Returns the owed pieces."""
        self.num_failures += is_failure and self.socket is not None
        self.close()
        self.reason = reason
        owed, self.owed = list(self.owed.values()), {}
        return owed

    def close(self) -> None:
        self.is_awaited, self._status_id, self.status = False, None, None
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
            self.socket.close()
            self.socket = None


class Dispatch:
    """A running request. ``wait`` returns its result."""

    def __init__(
        self, engines: Sequence[Connection], prompts: Sequence[Any], settings: dict[str, Any], timeout_s: float
    ) -> None:
        self._engines = engines
        self._deadline = time.monotonic() + timeout_s
        # An engine that is silent for this long hangs. The others then still have time for its prompts.
        self._silence_s = timeout_s / 2
        if len(engines) == 1:
            pieces = [_Piece({"prompts": list(prompts), **settings}, range(len(prompts)), 0)]
        else:
            pieces = [
                _Piece({"prompts": [prompt], "numbers": [index], **settings}, [index], _work(prompt, settings))
                for index, prompt in enumerate(prompts)
            ]
        self._pieces = deque(pieces)
        self._found: list[Completion] = []
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="fsdp2x-rollout", daemon=True)
        self._thread.start()

    def wait(self) -> tuple[list[Completion], str | None]:
        """Returns (completions in the order of the prompts, problem or None)."""
        self._thread.join()
        return sorted(self._found, key=lambda one: one.prompt), self._problem

    def _run(self) -> None:
        try:
            if len(self._engines) > 1:
                self._look_around()
            while (self._pieces or self._working) and self._problem is None:
                self._hand_out()
                if self._problem is None:
                    self._listen()
        except Exception as error:  # reported to the ranks that wait for this one
            self._problem = f"{type(error).__name__}: {error}"
        if self._problem is not None:
            for engine in self._working:
                engine.lose(self._problem, is_failure=time.monotonic() > self._deadline)  # otherwise it only stops

    @property
    def _working(self) -> list[Connection]:
        return [engine for engine in self._engines if engine.owed]

    def _look_around(self) -> None:
        """Asks all engines for their versions, also lost ones that may be back."""
        for engine in self._engines:
            is_known = engine.socket is not None
            engine.status = None
            try:
                if not is_known:
                    engine.connect(time.monotonic() - 1)
                    engine.reason = "it has not answered since it was lost"
                engine.ask_status(self._deadline)
                engine.is_awaited = is_known
            except (OSError, WireError) as error:
                self._lose(engine, str(error))

    def _lose(self, engine: Connection, why: str) -> None:
        self._pieces.extendleft(reversed(engine.lose(why)))
        if len(self._engines) == 1:
            self._problem = f"the engine is gone or hangs: {why}"

    def _ready(self) -> list[Connection]:
        """Returns the engines that may sample: those with the last committed weights."""
        if len(self._engines) == 1:
            return list(self._engines)
        if any(engine.is_awaited for engine in self._engines):
            return []
        known = [(engine, engine.status) for engine in self._engines if engine.status is not None]
        commits = [(status["committed_s"], status["version"]) for _, status in known if status["committed_s"]]
        newest = max(commits, key=lambda commit: commit[0], default=(None, None))
        ready = []
        for engine, status in known:
            is_current = newest[0] is None or status["committed_s"] and status["version"] == newest[1]
            if status["state"] not in ("initial", "clean"):
                engine.reason = f"its weights are {status['state']}: {status['reason']}"
            elif not status["has_weights"] or not is_current:
                held = "its own weights" if status["committed_s"] is None else f"version {status['version']!r}"
                held = held if status["has_weights"] else "no weights"
                engine.reason = f"it has {held}, not the version that was pushed last ({newest[1]!r})"
            else:
                engine.reason = ""
                ready.append(engine)
        return ready

    def _hand_out(self) -> None:
        """Gives prompts to the engines that owe least, while they owe less than half of a fair share."""
        ready = self._ready()
        if not ready:
            if not any(engine.socket is not None and engine.status is None for engine in self._engines):
                reasons = "; ".join(f"{engine.address!r}: {engine.reason}" for engine in self._engines)
                self._problem = f"no engine can sample ({reasons}). Push to engines that run."
            return
        work = sum(piece.work for piece in self._pieces) + sum(engine.num_owed for engine in ready)
        while self._pieces and ready:
            engine = min(ready, key=lambda engine: engine.num_owed)
            piece = self._pieces[0]
            if engine.owed and engine.num_owed + piece.work > work / (2 * len(ready)):
                return
            try:
                engine.give(piece, self._deadline)
                self._pieces.popleft()
            except WireError as error:
                self._lose(engine, str(error))
                ready.remove(engine)

    def _listen(self) -> None:
        """Takes messages of engines, and detects those that are gone or hang."""
        now = time.monotonic()
        if now > self._deadline:
            owing = [engine.address for engine in self._working]
            self._problem = f"the engine is gone or hangs: no answer in time from {owing}"
            return
        open_ones = {engine.socket: engine for engine in self._engines if engine.socket is not None}
        for heard in select.select(list(open_ones), [], [], min(_PING_S, self._deadline - now))[0]:
            self._take(open_ones[heard])
        if len(self._engines) == 1:
            return
        now = time.monotonic()
        for engine in open_ones.values():
            if engine.socket is not None and engine.owes and now - engine.heard_at > self._silence_s:
                self._lose(engine, f"it was silent for {self._silence_s:g} s")
            elif engine.is_due(now):
                with contextlib.suppress(WireError):  # reading from it will detect that
                    engine.ask_status(self._deadline)

    def _take(self, engine: Connection) -> None:
        try:
            answer = engine.receive(min(self._deadline, time.monotonic() + _FRAME_S))
        except WireError as error:
            return self._lose(engine, str(error))
        if (piece := engine.take(answer)) is None:
            return
        if answer["ok"]:
            for index, tokens, log_probs, spans, admitted, text in answer["completions"]:
                spans, prompt = [(version, count) for version, count in spans], answer["prompts"][index]
                self._found.append(Completion(piece.indices[index], tokens, log_probs, spans, admitted, prompt, text))
                engine.num_tokens += len(tokens)
        elif len(self._engines) > 1 and answer.get("state") == "torn":
            self._pieces.appendleft(piece)
            engine.take_status(answer)
        else:
            self._problem = f"the engine rejected the request: {answer['error']}"


def _work(prompt: Any, settings: dict[str, Any]) -> int:
    """Returns the maximum tokens of a prompt and its responses. Text counts a token per four letters."""
    is_text = isinstance(prompt, str) or any(isinstance(part, dict) for part in prompt[:1])
    length = len(str(prompt)) // 4 if is_text else len(prompt)
    return length + settings["num_samples"] * settings["max_tokens"]
