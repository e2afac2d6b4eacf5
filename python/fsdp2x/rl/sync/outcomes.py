"""What a push raises, the same on every rank, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass


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
