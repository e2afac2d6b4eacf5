"""Defines targets: what they get, what they must do, and the result of a push."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2x.io.names import TensorSpec


class SyncError(RuntimeError):
    """A push that was not committed. Every rank raises it, with the same fields.

    Attributes:
        phase: "begin", "load", "finish" or "commit".
        bucket: number of the failed bucket, or None outside of one.
        names: first and last tensor of the bucket.
        rank: the rank of the session's group where it failed.
        reason: the message of the engine or its loader.
    """

    def __init__(self, message: str, failure: Failure, rank: int) -> None:
        super().__init__(message)
        self.phase, self.bucket, self.names = failure.phase, failure.bucket, failure.names
        self.reason, self.rank = failure.reason, rank

    def __reduce__(self):
        failure = Failure(self.phase, self.reason, self.bucket, self.names)
        return SyncError, (str(self), failure, self.rank)


@dataclass(frozen=True)
class Failure:
    """A failure of one rank."""

    phase: str
    reason: str
    bucket: int | None = None
    names: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        if self.bucket is None:
            return f"phase {self.phase!r}"
        return f"phase {self.phase!r}, bucket {self.bucket} ({' to '.join(repr(name) for name in self.names)})"


@dataclass
class PushReport:
    """A committed push.

    Attributes:
        seconds: time from the call to the commit.
        num_tensors, bytes_sent: full tensors and deltas (positions and values) that each engine got.
        num_changed: elements that deltas changed, 0 for a full push.
        waited_s: seconds that this rank waited for engines.
    """

    version: int | str
    mode: str
    seconds: float = 0.0
    num_buckets: int = 0
    num_tensors: int = 0
    bytes_sent: int = 0
    num_changed: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True)
class Delta:
    """New values of some elements. ``positions`` are int64 indices into the flattened tensor, each once.

    A bucket may have several deltas of a tensor, each with different elements.
    """

    spec: TensorSpec
    positions: torch.Tensor
    values: torch.Tensor


@dataclass
class PushBucket:
    """One bucket of a push. It is empty on a rank that does not receive.

    The memory of ``tensors`` is reused for the next bucket but one, after ``wait`` has returned. A target that still
    reads after it got the next bucket sets ``wait``. ``file`` is the memory file with all tensors, at their storage
    offsets, if there is one. Without tensors, it has the deltas, with values after their positions.
    """

    index: int
    specs: tuple[TensorSpec, ...]
    tensors: tuple[torch.Tensor, ...] = ()
    deltas: tuple[Delta, ...] = ()
    file: int | None = None
    wait: Callable[[], None] = lambda: None  # no engine still reads the bucket

    def failure(self, phase: str, reason: str) -> Failure:
        """Returns a failure at this bucket, with its first and last name."""
        names = [spec.name for spec in self.specs] + [delta.spec.name for delta in self.deltas]
        return Failure(phase, reason, self.index, tuple(names) if len(names) < 3 else (names[0], names[-1]))


@dataclass(frozen=True)
class WireLayout:
    """The tensors of each bucket in order, and the memory files that buckets may be in.

    ``files`` has the descriptor and bytes of each. ``spare_bytes`` is the most that a bucket takes outside of them.
    ``adapter`` describes the tensors if they are a LoRA adapter (``describe_adapter``). ``is_merged``: an adapter is
    merged into them, so engines must not add one.
    """

    buckets: tuple[tuple[TensorSpec, ...], ...]
    files: tuple[tuple[int, int], ...]
    spare_bytes: int
    adapter: dict[str, Any] | None = None
    is_merged: bool = False

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for bucket in self.buckets for spec in bucket)


class BackgroundCall(threading.Thread):
    """A thread for an engine call that lasts as long as a push. ``result`` or ``error`` is set at its end."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(name="fsdp2x-call", daemon=True)
        self._call = call
        self.result: Any = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.error = error


class TargetError(RuntimeError):
    """A target that failed at a known place."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure

    @classmethod
    def at(cls, phase: str, reason: str, bucket: PushBucket | None = None) -> TargetError:
        return cls(Failure(phase, reason) if bucket is None else bucket.failure(phase, reason))


def refuse_adapters(layout: WireLayout, why: str) -> None:
    """Raises TargetError for engines that take an adapter's tensors only as an adapter."""
    if layout.adapter is not None:
        return
    adapter = next((spec.name for spec in layout.specs if "lora_" in spec.name), None)
    if adapter is not None:
        raise TargetError.at("begin", f'{why}, and not as weights: {adapter!r}. Connect with weights="adapter".')


class EngineTarget:
    """An engine from the view of this rank. All ranks learn what it raises, and the gathers continue to their end."""

    whole_only = ""  # why an engine takes no deltas
    takes_adapters = False  # whether it takes a LoRA adapter without its base (mode "adapter")

    def receives(self, rank: int) -> bool:
        """Returns whether ``rank`` of the session's group wants the tensors. Called once."""
        raise NotImplementedError

    def check(self, caller: str, deltas: bool) -> None:
        """Raises ValueError or NotImplementedError for problems that are known before gathering."""
        if deltas and self.whole_only:
            raise NotImplementedError(f"{caller}: {self.whole_only}, it takes no deltas. Connect with deltas=False.")

    def open(self, layout: WireLayout, timeout_s: float) -> None:
        """Connects if there is no connection. Called before each push on ranks that receive."""

    def begin(self, version: int | str, mode: str, base: int | str | None) -> None:
        """Begins a push. The engine must not generate from here on. ``base`` is the version that a delta changes."""

    def take(self, buckets: Iterator[PushBucket]) -> None:
        """Takes all buckets of a push."""
        raise NotImplementedError

    def finish(self, version: int | str) -> None:
        """Does what an engine does once per push and may fail at. All ranks have handed over everything."""

    def commit(self, version: int | str) -> None:
        """Lets the engine generate with this version. All engines have finished."""

    def abort(self, reason: str) -> None:
        """Ends a push that failed, here or elsewhere."""

    def close(self) -> None:
        """Releases the engine."""


class PipelinedTarget(EngineTarget):
    """A target whose engines load a bucket while the ranks gather the next one."""

    _delivered: tuple[PushBucket, Callable[[], None]] | None = None  # bucket without an answer, and what waits for it
    _failure: Failure | None = None

    def _deliver(self, bucket: PushBucket) -> Callable[[], None]:
        """Gives the bucket to engines. Returns what waits for their answers and raises for one that failed."""
        raise NotImplementedError

    def take(self, buckets: Iterator[PushBucket]) -> None:
        self._delivered = self._failure = None
        for bucket in buckets:
            self._await_answers()
            if self._failure is not None:
                continue  # to the last one, because the other ranks are in these gathers
            try:
                self._delivered, bucket.wait = (bucket, self._deliver(bucket)), self._await_answers
            except Exception as error:
                self._failure = bucket.failure("load", str(error))
        self._await_answers()
        if self._failure is not None:
            raise TargetError(self._failure)

    def _await_answers(self) -> None:
        """Waits until all engines have loaded the last bucket, or it is known why not."""
        if self._delivered is None:
            return
        (bucket, wait), self._delivered = self._delivered, None
        try:
            wait()
        except Exception as error:
            self._failure = bucket.failure("load", str(error))
