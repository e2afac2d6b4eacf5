"""``Peer``: engines in other processes of this host, which map the memory that the ranks write to."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any, Literal

from fsdp2x.base.arguments import checked
from fsdp2x.rl.sync.receiver import engine
from fsdp2x.rl.sync.targets.base import TargetError, WireLayout
from fsdp2x.rl.sync.targets.dialogue import Dialogue
from fsdp2x.rl.sync.targets.transports import DeviceMemory, FileMemory, connected

_LAST_WORD_S = 0.1  # for the answer of an engine that refuses a trainer and closes the connection


class Peer(Dialogue):
    """Engine processes on the host of the rank that talks to them, by the addresses of their receivers.

        Peer("@engine")                                    also a list of them

    Make it with the same arguments on every rank. If an engine dies, hangs, or restarts, the next push notices and
    connects again, and must be a full one. ``GroupPeer`` is for engines on other hosts.
    """

    @checked
    def __init__(
        self,
        address: str | Sequence[str],
        *,
        rank: int = 0,
        memory: Literal["host", "device"] = "host",
    ) -> None:
        """Describes the receivers. The first push connects to them.

        Args:
            address: one receiver, or those of all workers of an engine: "@name" or the path of a socket.
            rank: rank of the session's group that talks to them. It runs on their host.
            memory: memory that carries buckets. ``"device"`` is that of the rank's current GPU, by CUDA IPC, with room
                for one bucket. Engines must see that GPU and not write to tensors they do not copy.

        Raises:
            ValueError: there is no address.
        """
        super().__init__(rank)
        self._addresses = [address] if isinstance(address, str) else list(address)
        if not self._addresses:
            raise ValueError("fsdp2x.sync.Peer: got no address. Pass the address of a receiver.")
        self._is_on_device = memory == "device"
        self._connections: dict[str, socket.socket] = {}

    def _reach(self, layout: WireLayout) -> None:
        if self._memory is None:
            self._memory = DeviceMemory(layout) if self._is_on_device else FileMemory(layout)
        for address in self._addresses:
            if address in self._connections and not engine.is_closed(self._connections[address]):
                continue
            self._disconnect(address)  # that engine ended, and another one may use its address
            if (reason := self._introduced(address, layout)) is not None:
                self._disconnect(address)
                raise TargetError.at("begin", reason)

    def _introduced(self, address: str, layout: WireLayout) -> str | None:
        """Connects to an engine. Returns the problem, if there is one."""
        try:
            self._connections[address] = connected(address, self._timeout_s)
        except OSError as error:
            return f"no receiver answers at {address!r} ({error}); is the engine running, with a thread that polls?"
        assert self._memory is not None
        try:
            memory, files = self._memory.describe()  # for each engine, because a handle of GPU memory has one reader
        except ValueError:
            self._disconnect(address)
            raise
        deadline = time.monotonic() + self._timeout_s
        reason = self._asked(address, "hello", self._hello(), deadline)
        return reason or self._asked(address, "layout", self._described(layout, memory), deadline, files)

    def abort(self, reason: str) -> None:
        self._delivered = None
        for address in list(self._connections) if self._has_begun else ():
            # If it fails, the connection is closed, which notifies the engine as well.
            self._asked(address, "abort", {"reason": reason}, time.monotonic() + self._timeout_s)

    def _leave(self) -> None:
        for address in self._addresses:
            self._disconnect(address)
        super()._leave()

    # ---- requests

    def _tell(self, phase: str, kind: str, body: dict[str, Any]) -> None:
        deadline = time.monotonic() + self._timeout_s
        reasons = [self._sent(address, kind, body, deadline) for address in list(self._connections)]
        try:
            _require(phase, reasons)
        except TargetError:
            # Take the others' answers now, so that none is mistaken for that of a later request.
            with contextlib.suppress(TargetError):
                self._hear(phase)
            raise

    def _hear(self, phase: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        _require(phase, [self._heard(address, deadline) for address in list(self._connections)])

    def _asked(
        self, address: str, kind: str, body: dict[str, Any], deadline: float, files: Sequence[int] = ()
    ) -> str | None:
        """Sends a request and takes its answer. Returns the problem, if there is one."""
        return self._sent(address, kind, body, deadline, files) or self._heard(address, deadline)

    def _sent(
        self, address: str, kind: str, body: dict[str, Any], deadline: float, files: Sequence[int] = ()
    ) -> str | None:
        try:
            engine.send_frame(self._connections[address], kind, body, deadline, files)
            return None
        except engine.WireError as error:
            said = self._heard(address, time.monotonic() + _LAST_WORD_S) or ""
            self._disconnect(address)
            return said if " says: " in said else f"the engine at {address!r}: {error}"

    def _heard(self, address: str, deadline: float) -> str | None:
        try:
            _, answer, files = engine.receive_frame(self._connections[address], deadline)
            engine.close_files(files)
            return None if answer["ok"] else f"the engine at {address!r} says: {answer['error']}"
        except (engine.WireError, KeyError) as error:
            self._disconnect(address)
            return f"the engine at {address!r}: {error}"

    def _disconnect(self, address: str) -> None:
        if address in self._connections:
            self._connections.pop(address).close()


def _require(phase: str, reasons: list[str | None]) -> None:
    """Raises TargetError if a receiver has failed, with the reasons of all that have."""
    if failed := [reason for reason in reasons if reason is not None]:
        raise TargetError.at(phase, "; ".join(failed))
