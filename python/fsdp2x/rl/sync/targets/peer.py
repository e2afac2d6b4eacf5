"""``Peer``: engines in other processes, which run a ``Receiver`` of ``fsdp2x.sync.engine`` or a ``TcpReceiver``.

One rank sends requests to them, over one connection each. Engines on its host map the memory that the ranks write to.
To engines on any host, buckets are broadcast in a process group.
"""

from __future__ import annotations

import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from fsdp2x.base.arguments import checked
from fsdp2x.base.processes import require_own_process
from fsdp2x.rl.sync.receiver import engine, engine_tcp
from fsdp2x.rl.sync.targets.base import EngineTarget, Failure, PushBucket, TargetError, WireLayout
from fsdp2x.rl.sync.targets.transports import BroadcastTransport, BucketTransport, FileTransport, IpcTransport

_NAMED_S = 1.0  # after a broadcast failed, for a word of the engine that is the cause


class Peer(EngineTarget):
    """Engine processes, by the addresses of their receivers.

        Peer("@engine")                                    on the host of the rank that talks to it; also a list of them
        Peer("tcp://10.0.0.7:7000", secret=secret)         on any host, where a ``TcpReceiver`` knows the same secret

    Every rank makes it with the same arguments. An engine that dies, hangs, or is started again is found at the next
    push, which connects anew and must be a full one.
    """

    @checked
    def __init__(
        self,
        address: str | Sequence[str],
        *,
        rank: int = 0,
        secret: str | None = None,
        memory: Literal["host", "device"] = "host",
        group: Literal["gloo", "nccl"] | None = None,
    ) -> None:
        """
        Args:
            address: of one receiver, or of those of all workers of an engine: "@name" or the path of a socket; or
                "tcp://host:port", all of them or none.
            rank: of the session's group, that talks to them; but over TCP it runs on the engines' host.
            secret: for TCP, and needed there: what both sides must know, of 16 characters or more.
            memory: which one carries buckets on this host. ``"device"``: that of the rank's current GPU, by CUDA IPC:
                engines see that GPU, and do not write to what they are
                given without a copy. Takes one bucket there.
            group: over TCP: backend of the process group in which each bucket is broadcast to all engines at once. The
                talking rank makes it, and engines join by a port of that rank's host. Takes memory for one bucket on
                the rank and on each engine. ``"nccl"``: on its current GPU, which no other member may share. None:
                ``"gloo"``.

        Raises:
            ValueError: no address, addresses of both kinds, no secret where it is needed or one where it is not, or a
                group where nothing goes over TCP.
        """
        self._addresses = [address] if isinstance(address, str) else list(address)
        if not self._addresses:
            raise ValueError("fsdp2x.sync.Peer: no address of a receiver")
        self._transport = _transport_for(self._addresses, secret, memory, group)
        self._rank = rank
        self._told: WireLayout | None = None  # what the connections know
        self._session, self._has_begun = "", False
        self._connections: dict[str, socket.socket] = {}
        self._timeout_s = 0.0
        self._failure: Failure | None = None
        self._early: dict[str, dict] = {}  # answers that came while others were in the group
        self._taken: PushBucket | None = None  # sent, not answered for yet

    def receives(self, rank: int) -> bool:
        return rank == self._rank

    # ---- requests

    def open(self, layout: WireLayout, timeout_s: float) -> None:
        require_own_process("push weights")
        self._timeout_s, self._has_begun = timeout_s, False
        if layout is not self._told:  # another session, or one whose memory was made again
            self.close()
            self._told, self._session = layout, secrets.token_hex(8)
        self._transport.prepare(layout)
        self._indices = {spec.name: index for index, spec in enumerate(layout.specs)}
        known = self._connections
        lost = [address for address in self._addresses if address not in known or engine.is_closed(known[address])]
        if lost and self._transport.is_group:
            lost = self._addresses
            self._transport.close()
        for address in lost:
            self._disconnect(address)  # that engine ended; there may be another one at its address
        for address in lost:
            self._connect(address, layout)
        self._gather_group()

    def _connect(self, address: str, layout: WireLayout) -> None:
        try:
            self._connections[address] = self._transport.connect(address, self._timeout_s)
        except OSError as error:
            reason = f"no receiver answers at {address!r} ({error}); is the engine running, with a thread that polls?"
            raise TargetError.at("begin", reason) from error
        hello = {"wire": engine.WIRE, "session": self._session}
        tensors = [[spec.name, str(spec.dtype).removeprefix("torch."), list(spec.shape)] for spec in layout.specs]
        try:
            self._ask([address], "begin", "hello", hello)
            memory, descriptors = self._transport.describe_memory()
            self._ask([address], "begin", "layout", {"tensors": tensors, **memory}, descriptors)
        except (TargetError, ValueError):
            self._disconnect(address)
            raise

    def _gather_group(self) -> None:
        """Makes engines and this rank join the transport's group, if it has one that they are not in."""
        try:
            invitation = self._transport.invite(self._connections.values(), self._timeout_s)
            if invitation is None:
                return
            self._ask(self._addresses, "begin", "invite", invitation)
            self._tell(self._addresses, "begin", "join", {})
            self._together("begin", self._transport.join)
            self._hear(self._addresses, "begin")
        except TargetError:
            self.close()  # whoever waits in the group hears of it
            raise
        except engine.WireError as error:
            self.close()
            raise TargetError.at("begin", str(error)) from error

    def _together(self, phase: str, act: Callable[[float, Callable[[], bool]], None]) -> None:
        """Runs what the transport does with all engines at once. If it fails, nobody knows what each engine got.

        Raises:
            TargetError: with what engines said or did meanwhile, and then what failed.
        """
        self._early = {}
        try:
            act(time.monotonic() + self._timeout_s, self._has_one_failed)
        except engine.WireError as error:
            self._has_one_failed(_NAMED_S)
            reasons = [
                f"the engine at {address!r}: {answer['error']}"
                for address, answer in self._early.items()
                if not answer["ok"]
            ]
            self.close()
            raise TargetError.at(phase, "; ".join([*reasons, str(error)])) from error

    def _has_one_failed(self, wait_s: float = 0.0) -> bool:
        """Looks at what came from engines: answers that are errors, connections that ended."""
        rest = {self._connections[address]: address for address in self._addresses if address not in self._early}
        for connection in select.select(list(rest), [], [], wait_s)[0]:
            try:
                _, answer, files = engine.receive_frame(connection, time.monotonic() + self._timeout_s)
                engine.close_files(files)
            except engine.WireError as error:
                answer = {"ok": False, "error": str(error)}
            self._early[rest[connection]] = answer
        return not all(answer["ok"] for answer in self._early.values())

    def begin(self, version: int | str, mode: str, base: int | str | None) -> None:
        self._failure, self._taken, self._has_begun = None, None, True
        self._ask(self._addresses, "begin", "begin", {"version": version, "mode": mode, "base": base})

    def take(self, buckets: Iterator[PushBucket]) -> None:
        for bucket in buckets:
            self._answered()
            if self._failure is None:
                self._send(bucket)
        self._answered()
        if self._failure is not None:
            raise TargetError(self._failure)

    def _send(self, bucket: PushBucket) -> None:
        try:
            body = self._transport.place(bucket, self._indices)
            self._tell(self._addresses, "load", "bucket", body)
            self._together("load", self._transport.deliver)
            self._taken, bucket.wait = bucket, self._answered
        except Exception as error:
            self._failure = bucket.failure("load", str(error))

    def _answered(self) -> None:
        """All engines are done with the bucket that was sent last, or it is known why not."""
        bucket, self._taken = self._taken, None
        if bucket is None:
            return
        try:
            self._hear(self._addresses, "load")
        except TargetError as error:
            self._failure = bucket.failure("load", error.failure.reason)

    def finish(self, version: int | str) -> None:
        self._ask(self._addresses, "finish", "finish", {})

    def commit(self, version: int | str) -> None:
        self._ask(self._addresses, "commit", "commit", {"version": version})

    def abort(self, reason: str) -> None:
        self._taken = None
        for address in list(self._connections) if self._has_begun else ():
            try:
                self._ask([address], "abort", "abort", {"reason": reason})
            except TargetError:
                pass  # the connection is closed by then, which tells the engine as well

    def close(self) -> None:
        self._early = {}
        for address in list(self._connections):
            self._disconnect(address)
        self._transport.close()

    # ---- the dialogue

    def _ask(self, addresses: Sequence[str], phase: str, kind: str, body: dict, files: Sequence[int] = ()) -> None:
        self._tell(addresses, phase, kind, body, files)
        self._hear(addresses, phase)

    def _tell(self, addresses: Sequence[str], phase: str, kind: str, body: dict, files: Sequence[int] = ()) -> None:
        """Raises what failed first, after all were told: an engine that was told owes an answer."""
        failed: list[str] = []
        for address in addresses:
            deadline = time.monotonic() + self._timeout_s
            try:
                if address not in self._connections:
                    raise engine.WireError("there is no connection any more")
                engine.send_frame(self._connections[address], kind, body, deadline, files)
            except engine.WireError as error:
                self._disconnect(address)
                failed.append(f"the engine at {address!r}: {error}")
        if failed and self._transport.is_group and kind in ("join", "bucket"):
            self.close()  # the others wait for all, and cannot answer
            raise TargetError.at(phase, "; ".join(failed))
        if failed:
            # The others' answers are taken now, so that none is mistaken for that of a later request.
            self._hear([address for address in addresses if address in self._connections], phase, failed)

    def _hear(self, addresses: Sequence[str], phase: str, failed: Sequence[str] = ()) -> None:
        """Takes one answer of each.

        Raises:
            TargetError: one of them says that it failed, or says nothing in time.
        """
        reasons = list(failed)
        deadline = time.monotonic() + self._timeout_s
        for address in addresses:
            try:
                if address not in self._connections:
                    raise engine.WireError("there is no connection any more")
                answer = self._early.pop(address, None)
                if answer is None:
                    _, answer, files = engine.receive_frame(self._connections[address], deadline)
                    engine.close_files(files)
                if not answer["ok"]:
                    reasons.append(f"the engine at {address!r} says: {answer['error']}")
            except (engine.WireError, KeyError) as error:
                self._disconnect(address)
                reasons.append(f"the engine at {address!r}: {error}")
        if reasons:
            raise TargetError.at(phase, "; ".join(reasons))

    def _disconnect(self, address: str) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()


def _transport_for(addresses: Sequence[str], secret: str | None, memory: str, group: str | None) -> BucketTransport:
    over_tcp = [address.startswith(engine_tcp.SCHEME) for address in addresses]
    if not any(over_tcp):
        if secret is not None or group is not None:
            raise ValueError(
                f"fsdp2x.sync.Peer: a {'group' if secret is None else 'secret'} is for addresses such as "
                "tcp://host:port; leave it out"
            )
        return FileTransport() if memory == "host" else IpcTransport()
    if memory != "host":
        raise ValueError('fsdp2x.sync.Peer: memory="device" is for engines on this host, not for addresses of TCP')
    if not all(over_tcp):
        raise ValueError("fsdp2x.sync.Peer: addresses of TCP and of this host; take one kind for all receivers")
    try:
        for address in addresses:
            engine_tcp.split_address(address)
        return BroadcastTransport(engine_tcp.check_secret(secret), group or "gloo", len(addresses))
    except ValueError as error:
        raise ValueError(f"fsdp2x.sync.Peer: {error}") from None
