"""What a target is given, what it has to do, and what becomes of a push."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp2x.io.names import TensorSpec


class SyncError(RuntimeError):
    """A push that was not committed. Every rank raises it, with the same fields.

    ``phase``: "begin", "load", "finish" or "commit". ``bucket``: number of the bucket that failed, None outside of one;
    ``names``: first and last tensor in it. ``rank``: of the session's group, where it failed. ``reason``: what the
    engine or its loader says.
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
    """What went wrong on one rank."""

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

    ``seconds``: from call to commit. ``num_tensors``, ``bytes_sent``: of whole tensors and of deltas (positions and
    values) that each engine was given. ``num_changed``: elements that deltas changed, 0 for a full push.
    ``waited_s``: seconds this rank waited for engines.
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
    """New values of some elements: ``positions`` are int64, into the flattened tensor, each once.

    A tensor may have several in a bucket, of other elements each.
    """

    spec: TensorSpec
    positions: torch.Tensor
    values: torch.Tensor


def _nothing_pending() -> None:
    """Nobody reads the bucket any more."""


@dataclass
class PushBucket:
    """One bucket of a push. On a rank that does not receive, there is nothing in it.

    The memory of ``tensors`` is used again when the next bucket but one is made, and then ``wait`` has returned: a
    target that goes on reading after it was given the next bucket sets it. ``file``: the memory file in which the
    tensors lie, at their storage offsets, where all do; without tensors, the deltas, values behind their positions.
    """

    index: int
    specs: tuple[TensorSpec, ...]
    tensors: tuple[torch.Tensor, ...] = ()
    deltas: tuple[Delta, ...] = ()
    file: int | None = None
    wait: Callable[[], None] = field(default=_nothing_pending)

    def failure(self, phase: str, reason: str) -> Failure:
        """A failure at this bucket, with its first and last name."""
        names = [spec.name for spec in self.specs] + [delta.spec.name for delta in self.deltas]
        return Failure(phase, reason, self.index, tuple(names) if len(names) < 3 else (names[0], names[-1]))


@dataclass(frozen=True)
class WireLayout:
    """The tensors of each bucket in the order in which they come, and the memory files that buckets may lie in.

    ``files``: descriptor and bytes of each. ``spare_bytes``: what a bucket takes that is in none of them, at most.
    ``adapter``: what the tensors are, where they are a LoRA adapter (``describe_adapter``). ``is_merged``: they have an
    adapter in them, so that engines must not add one to them.
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
    """A call of an engine that lasts as long as a push, in a thread. ``result`` or ``error`` is known at its end."""

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


# What engines say to an adapter for weights that have one in them already.
MERGED_BASE = (
    "the weights that were pushed last have an adapter merged in: push the base alone before an adapter "
    '(connect(params=lambda name, param: "lora_" not in name))'
)


class TargetError(RuntimeError):
    """A target that failed at a known place."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure

    @classmethod
    def at(cls, phase: str, reason: str, bucket: PushBucket | None = None) -> TargetError:
        return cls(Failure(phase, reason) if bucket is None else bucket.failure(phase, reason))


def refuse_adapters(layout: WireLayout, why: str) -> None:
    """Raises TargetError for engines that take the tensors of adapters as an adapter only."""
    if layout.adapter is not None:
        return
    adapter = next((spec.name for spec in layout.specs if "lora_" in spec.name), None)
    if adapter is not None:
        raise TargetError.at("begin", f'{why}, and not as weights: {adapter!r}; connect with weights="adapter"')


class EngineTarget:
    """An engine, as this rank sees it. Whatever it raises is told to all ranks; the gathers go on to their end."""

    whole_only = ""  # why an engine takes no deltas
    takes_adapters = False  # whether it takes a LoRA adapter without its base (mode "adapter")

    def receives(self, rank: int) -> bool:
        """Whether ``rank`` of the session's group wants the tensors; asked once."""
        raise NotImplementedError

    def check(self, caller: str, deltas: bool) -> None:
        """Raises ValueError or NotImplementedError for what can be known before anything is gathered."""
        if deltas and self.whole_only:
            raise NotImplementedError(f"{caller}: {self.whole_only}, it takes no deltas; connect with deltas=False")

    def open(self, layout: WireLayout, timeout_s: float) -> None:
        """Called on ranks that receive before each push; connects where there is no connection."""

    def begin(self, version: int | str, mode: str, base: int | str | None) -> None:
        """From here on the engine generates nothing. ``base``: the version that a delta changes."""

    def take(self, buckets: Iterator[PushBucket]) -> None:
        """Takes all buckets of a push."""
        raise NotImplementedError

    def finish(self, version: int | str) -> None:
        """All ranks have handed over everything: what an engine does once per push, and may fail at."""

    def commit(self, version: int | str) -> None:
        """All engines have finished: they may generate, with this version."""

    def abort(self, reason: str) -> None:
        """The push has failed, here or elsewhere."""

    def close(self) -> None:
        """Lets go of the engine."""
