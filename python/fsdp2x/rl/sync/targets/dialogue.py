"""``Dialogue``: the requests of a push to engines that run a ``Receiver`` (``receiver/engine.py``)."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from fsdp2x.api import collect_handed, require_own_process
from fsdp2x.rl.sync.receiver import engine
from fsdp2x.rl.sync.targets.base import PipelinedTarget, PushBucket, WireLayout
from fsdp2x.rl.sync.targets.transports import BucketMemory


class Dialogue(PipelinedTarget):
    """Engines that answer each request. Subclasses carry requests, and say what happens without an answer."""

    takes_adapters = True

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._memory: BucketMemory | None = None
        self._told: WireLayout | None = None  # the layout of the session that engines are in
        self._indices: dict[str, int] = {}  # of the layout's names
        self._session, self._has_begun, self._timeout_s = "", False, 0.0

    # ---- methods of subclasses

    def _reach(self, layout: WireLayout) -> None:
        """Makes ``_memory``, and connects and introduces engines that have no connection."""
        raise NotImplementedError

    def _tell(self, phase: str, kind: str, body: dict[str, Any]) -> None:
        """Sends a request to all engines, or raises TargetError."""
        raise NotImplementedError

    def _hear(self, phase: str) -> None:
        """Takes an answer from each engine, or raises TargetError."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Ends the dialogue with all engines, and frees the memory of buckets."""
        self._memory = None
        collect_handed()

    # ---- a push

    def receives(self, rank: int) -> bool:
        return rank == self._rank

    def open(self, layout: WireLayout, timeout_s: float) -> None:
        require_own_process("push weights")
        if layout is not self._told:  # another session, or one with new memory
            self._leave()
            self._told, self._session = layout, secrets.token_hex(8)
            self._indices = {spec.name: index for index, spec in enumerate(layout.specs)}
        self._timeout_s, self._has_begun = timeout_s, False
        self._reach(layout)

    def _hello(self) -> dict[str, Any]:
        return {"wire": engine.WIRE, "session": self._session}

    def _described(self, layout: WireLayout, memory: dict[str, Any]) -> dict[str, Any]:
        """Returns the request ``layout``."""
        tensors = [[spec.name, str(spec.dtype).removeprefix("torch."), list(spec.shape)] for spec in layout.specs]
        adapter = {"merged": layout.is_merged} if layout.adapter is None else {"adapter": layout.adapter}
        return {"tensors": tensors, **adapter, **memory}

    def begin(self, version: int | str, mode: str, base: int | str | None) -> None:
        self._has_begun = True
        self._ask("begin", "begin", {"version": version, "mode": mode, "base": base})

    def _deliver(self, bucket: PushBucket) -> Callable[[], None]:
        assert self._memory is not None, "made when opening"
        self._tell("load", "bucket", self._memory.place(bucket, self._indices))
        return lambda: self._hear("load")

    def finish(self, version: int | str) -> None:
        self._ask("finish", "finish", {})

    def commit(self, version: int | str) -> None:
        self._ask("commit", "commit", {"version": version})

    def _ask(self, phase: str, kind: str, body: dict[str, Any]) -> None:
        self._tell(phase, kind, body)
        self._hear(phase)

    def close(self) -> None:
        self._leave()
        self._told = None
