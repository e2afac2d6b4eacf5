"""``Peer``: engines in other processes that run a ``Receiver`` of ``fsdp2x.sync.engine`` or a ``TcpReceiver``.

One rank sends them requests, over one connection each. Engines on its host map the memory that the ranks write to. To
engines on other hosts, a process group broadcasts buckets.
"""

from __future__ import annotations

import secrets
import select
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from fsdp2x.base.arguments import checked
from fsdp2x.base.processes import require_own_process
from fsdp2x.rl.sync.receiver import engine, engine_tcp
from fsdp2x.rl.sync.targets.base import EngineTarget, Failure, PushBucket, TargetError, WireLayout
from fsdp2x.rl.sync.targets.transports import BroadcastTransport, BucketTransport, FileTransport, IpcTransport

_NAMED_S = 1.0  # after a failed broadcast, wait this long for a message of the engine that caused it
_RETURN_S = 10.0  # for the first answer of an engine that missed a push, so that a hanging one costs no full timeout


class Peer(EngineTarget):
    """Engine processes, by the addresses of their receivers.

        Peer("@engine")                                    on the host of the rank that talks to it; also a list of them
        Peer("tcp://10.0.0.7:7000", secret=secret)         on any host, where a ``TcpReceiver`` knows the same secret

    Make it with the same arguments on every rank. If an engine dies, hangs, or restarts, the next push notices and
    connects again, and must be a full one. By default that engine makes the push fail. With ``min_engines`` the push
    continues without it, warns, and tries it again next time.
    """

    takes_adapters = True

    @checked
    def __init__(
        self,
        address: str | Sequence[str],
        *,
        rank: int = 0,
        secret: str | None = None,
        memory: Literal["host", "device"] = "host",
        group: Literal["gloo", "nccl"] | None = None,
        min_engines: int | None = None,
    ) -> None:
        """Describes the receivers. The first push connects to them.

        Args:
            address: one receiver, or those of all workers of an engine: "@name" or the path of a socket, or
                "tcp://host:port", all of one kind.
            rank: rank of the session's group that talks to them. Except over TCP it runs on the engines' host.
            secret: for TCP, where it is required: a secret of at least 16 characters that both sides know.
            memory: memory that carries buckets on this host. ``"device"`` is that of the rank's current GPU, by CUDA
                IPC, with room for one bucket. Engines must see that GPU and not write to tensors they do not copy.
            group: for TCP, backend of the process group that broadcasts each bucket to all engines. It needs memory for
                one bucket on the rank and on each engine. ``"nccl"`` uses the current GPU, which no other member may
                share. None: ``"gloo"``.
            min_engines: number of receivers that must take a push. Use it for independent engines on this host, not for
                the workers of one. None: all.

        Raises:
            ValueError: addresses are missing or of both kinds, ``secret`` or ``group`` does not fit them, or
                ``min_engines`` is impossible.
        """
        self._addresses = [address] if isinstance(address, str) else list(address)
        if not self._addresses:
            raise ValueError("fsdp2x.sync.Peer: got no address. Pass the address of a receiver.")
        self._transport = _transport_for(self._addresses, secret, memory, group)
        self._min_engines = len(self._addresses) if min_engines is None else min_engines
        if not 0 < self._min_engines <= len(self._addresses) or min_engines is not None and self._transport.is_group:
            raise ValueError(
                f"fsdp2x.sync.Peer: min_engines must be from 1 to {len(self._addresses)}, the number of addresses, and "
                f"unset over TCP, got {min_engines}"
            )
        self._missing: dict[str, str] = {}  # receivers that missed this push or the last one, and why
        self._rank = rank
        self._told: WireLayout | None = None  # the layout that the connections got
        self._session, self._has_begun = "", False
        self._connections: dict[str, socket.socket] = {}
        self._timeout_s = 0.0
        self._failure: Failure | None = None
        self._early: dict[str, dict] = {}  # answers that came while other engines were in the group
        self._taken: PushBucket | None = None  # sent, but not answered yet

    def receives(self, rank: int) -> bool:
        return rank == self._rank

    @property
    def missing(self) -> dict[str, str]:
        """Receivers that missed the last push, and why. Known on the rank that talks to them."""
        return dict(self._missing)

    @property
    def _present(self) -> list[str]:
        return [address for address in self._addresses if address not in self._missing]

    def _go_on_without(self, phase: str, failed: dict[str, str]) -> None:
        """Excludes receivers from this push.

        Raises:
            TargetError: too few remain.
        """
        if not failed:
            return
        if len(set(self._present) - set(failed)) < self._min_engines:
            raise TargetError.at(phase, "; ".join({**self._missing, **failed}.values()))
        for address, reason in failed.items():
            self._disconnect(address)  # which shows a surviving engine that its weights are torn
            self._missing[address] = reason

    # ---- requests

    def open(self, layout: WireLayout, timeout_s: float) -> None:
        require_own_process("push weights")
        self._timeout_s, self._has_begun = timeout_s, False
        if layout is not self._told:  # another session, or one with new memory
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
            self._disconnect(address)  # that engine ended, and another one may use its address
        before, self._missing = self._missing, {}
        for address in lost:
            try:
                self._connect(address, layout, min(timeout_s, _RETURN_S) if address in before else timeout_s)
            except TargetError as error:
                if self._min_engines == len(self._addresses):
                    raise
                self._go_on_without("begin", {address: error.failure.reason})
        self._gather_group()

    def _connect(self, address: str, layout: WireLayout, timeout_s: float) -> None:
        try:
            self._connections[address] = self._transport.connect(address, timeout_s)
        except OSError as error:
            reason = f"no receiver answers at {address!r} ({error}); is the engine running, with a thread that polls?"
            raise TargetError.at("begin", reason) from error
        hello = {"wire": engine.WIRE, "session": self._session}
        tensors = [[spec.name, str(spec.dtype).removeprefix("torch."), list(spec.shape)] for spec in layout.specs]
        adapter: dict = {"merged": layout.is_merged} if layout.adapter is None else {"adapter": layout.adapter}
        own, self._timeout_s = self._timeout_s, timeout_s
        try:
            self._ask_one(address, "begin", "hello", hello)
            memory, descriptors = self._transport.describe_memory()
            self._ask_one(address, "begin", "layout", {"tensors": tensors, **adapter, **memory}, descriptors)
        except (TargetError, ValueError):
            self._disconnect(address)
            raise
        finally:
            self._timeout_s = own

    def _gather_group(self) -> None:
        """Makes engines and this rank join the transport's group, unless they have."""
        try:
            invitation = self._transport.invite(self._connections.values(), self._timeout_s)
            if invitation is None:
                return
            self._ask("begin", "invite", invitation)
            self._tell("begin", "join", {})
            self._together("begin", self._transport.join)
            self._hear("begin")
        except TargetError:
            self.close()  # notifies those that wait in the group
            raise
        except engine.WireError as error:
            self.close()
            raise TargetError.at("begin", str(error)) from error

    def _together(self, phase: str, act: Callable[[float, Callable[[], bool]], None]) -> None:
        """Runs an operation of the transport with all engines. If it fails, it is unknown what each engine got.

        Raises:
            TargetError: with messages and ends of engines meanwhile, and then the failure.
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
        """Returns whether an engine sent an error or its connection ended."""
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
        self._ask("begin", "begin", {"version": version, "mode": mode, "base": base})

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
            self._tell("load", "bucket", body)
            self._together("load", self._transport.deliver)
            self._taken, bucket.wait = bucket, self._answered
        except Exception as error:
            self._failure = bucket.failure("load", str(error))

    def _answered(self) -> None:
        """Waits until all engines are done with the last bucket, or it is known why not."""
        bucket, self._taken = self._taken, None
        if bucket is None:
            return
        try:
            self._hear("load")
        except TargetError as error:
            self._failure = bucket.failure("load", error.failure.reason)

    def finish(self, version: int | str) -> None:
        self._ask("finish", "finish", {})

    def commit(self, version: int | str) -> None:
        self._ask("commit", "commit", {"version": version})
        if self._missing:
            reasons = "; ".join(self._missing.values())
            warnings.warn(
                f"fsdp2x.sync: {len(self._present)} of {len(self._addresses)} engines took version {version!r}. The "
                f"others keep other weights until a full push reaches them: {reasons}",
                stacklevel=3,
            )

    def abort(self, reason: str) -> None:
        self._taken = None
        for address in list(self._connections) if self._has_begun else ():
            try:
                self._ask_one(address, "abort", "abort", {"reason": reason})
            except TargetError:
                pass  # the connection is already closed, which notifies the engine as well

    def close(self) -> None:
        self._early = {}
        for address in list(self._connections):
            self._disconnect(address)
        self._transport.close()

    # ---- the protocol

    def _ask(self, phase: str, kind: str, body: dict) -> None:
        self._tell(phase, kind, body)
        self._hear(phase)

    def _ask_one(self, address: str, phase: str, kind: str, body: dict, files: Sequence[int] = ()) -> None:
        reason = self._sent(address, kind, body, files) or self._heard(address, time.monotonic() + self._timeout_s)
        if reason is not None:
            raise TargetError.at(phase, reason)

    def _tell(self, phase: str, kind: str, body: dict) -> None:
        """Sends to all engines, then raises the first failure, because an engine that got a request must answer."""
        told = self._present
        reasons = {address: self._sent(address, kind, body) for address in told}
        failed = {address: reason for address, reason in reasons.items() if reason is not None}
        if failed and self._transport.is_group and kind in ("join", "bucket"):
            self.close()  # the others wait for all, and cannot answer
            raise TargetError.at(phase, "; ".join(failed.values()))
        try:
            self._go_on_without(phase, failed)
        except TargetError:
            # Take the others' answers now, so that none is mistaken for that of a later request.
            self._hear(phase, failed)

    def _hear(self, phase: str, failed: Mapping[str, str] | None = None) -> None:
        """Takes one answer from each engine that got a request.

        Raises:
            TargetError: too many of them report a failure or do not answer in time.
        """
        found = dict(failed or {})
        deadline = time.monotonic() + self._timeout_s
        for address in self._present:
            if address not in found and (reason := self._heard(address, deadline)) is not None:
                found[address] = reason
        self._go_on_without(phase, found)

    def _sent(self, address: str, kind: str, body: dict, files: Sequence[int] = ()) -> str | None:
        """Sends a request. Returns the problem of an engine that cannot be sent to."""
        try:
            if address not in self._connections:
                raise engine.WireError("the connection is gone")
            engine.send_frame(self._connections[address], kind, body, time.monotonic() + self._timeout_s, files)
            return None
        except engine.WireError as error:
            self._disconnect(address)
            return f"the engine at {address!r}: {error}"

    def _heard(self, address: str, deadline: float) -> str | None:
        """Takes an answer. Returns the problem of an engine that reports one or does not answer."""
        try:
            if address not in self._connections:
                raise engine.WireError("the connection is gone")
            answer = self._early.pop(address, None)
            if answer is None:
                _, answer, files = engine.receive_frame(self._connections[address], deadline)
                engine.close_files(files)
            return None if answer["ok"] else f"the engine at {address!r} says: {answer['error']}"
        except (engine.WireError, KeyError) as error:
            self._disconnect(address)
            return f"the engine at {address!r}: {error}"

    def _disconnect(self, address: str) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()


def _transport_for(addresses: Sequence[str], secret: str | None, memory: str, group: str | None) -> BucketTransport:
    over_tcp = [address.startswith(engine_tcp.SCHEME) for address in addresses]
    if not any(over_tcp):
        if secret is not None or group is not None:
            raise ValueError(
                f"fsdp2x.sync.Peer: a {'group' if secret is None else 'secret'} is only for addresses such as "
                "tcp://host:port. Leave it out."
            )
        return FileTransport() if memory == "host" else IpcTransport()
    if memory != "host":
        raise ValueError('fsdp2x.sync.Peer: memory="device" is for engines on this host, not for addresses of TCP')
    if not all(over_tcp):
        raise ValueError("fsdp2x.sync.Peer: got addresses of TCP and of this host. Use one kind for all receivers.")
    try:
        for address in addresses:
            engine_tcp.split_address(address)
        return BroadcastTransport(engine_tcp.check_secret(secret), group or "gloo", len(addresses))
    except ValueError as error:
        raise ValueError(f"fsdp2x.sync.Peer: {error}") from None
