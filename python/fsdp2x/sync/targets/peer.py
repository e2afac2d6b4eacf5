"""``Peer``: engines in other processes of this host, which run a ``Receiver`` of ``fsdp2x.sync.engine``.

One rank talks to them. What the ranks write into their shared ring the engines read there: they are given its memory
file. Tensors that are not in such a ring (un-fused experts, merged adapters, parameters over several axes, ranks that
share no memory) are copied into a file of this rank, as are deltas; it holds one parcel, which is enough, because a
parcel is made only after the one before was answered for.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import time
import weakref
from collections.abc import Iterator, Sequence

import torch

from fsdp2x.arguments import checked
from fsdp2x.runtime.forks import require_own_process
from fsdp2x.runtime.native import _C
from fsdp2x.sync import engine
from fsdp2x.sync.outcomes import Failure, span
from fsdp2x.sync.targets.base import EngineTarget, Parcel, TargetError, WireLayout


class Peer(EngineTarget):
    """Engine processes on the host of one trainer rank, by the addresses of their receivers.

    Every rank makes it with the same arguments. An engine that dies, hangs, or is started again is found at the next
    push, which connects anew and must be a full one.
    """

    @checked
    def __init__(self, address: str | Sequence[str], *, rank: int = 0) -> None:
        """
        Args:
            address: of one ``Receiver``, or of those of all workers of an engine: "@name" or the path of a socket.
            rank: of the session's group, that talks to them; it runs on the engines' host.
        """
        self._addresses = [address] if isinstance(address, str) else list(address)
        if not self._addresses:
            raise ValueError("fsdp2x.sync.Peer: no address of a receiver")
        self._rank = rank
        self._told: WireLayout | None = None  # what the connections know
        self._session, self._has_begun = "", False
        self._connections: dict[str, socket.socket] = {}
        self._spare: _Spare | None = None
        self._timeout_s = 0.0
        self._failure: Failure | None = None
        self._taken: Parcel | None = None  # sent, not answered for yet

    def receives(self, rank: int) -> bool:
        return rank == self._rank

    # ---- requests

    def open(self, layout: WireLayout, timeout_s: float) -> None:
        require_own_process("push weights")
        self._timeout_s, self._has_begun = timeout_s, False
        if layout is not self._told:  # another session, or one whose memory was made again
            self.close()
            self._told, self._session = layout, secrets.token_hex(8)
        if self._spare is None:
            self._spare = _Spare(max(layout.spare_bytes, mmap.PAGESIZE))
        files = [*layout.files, (self._spare.file, self._spare.num_bytes)]
        self._places = {descriptor: index for index, (descriptor, _) in enumerate(files)}
        self._indices = {spec.name: index for index, spec in enumerate(layout.specs)}
        for address in self._addresses:
            if address in self._connections and engine.is_closed(self._connections[address]):
                self._disconnect(address)  # that engine ended; there may be another one at its address
            if address not in self._connections:
                self._connect(address, layout, files)

    def _connect(self, address: str, layout: WireLayout, files: list[tuple[int, int]]) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self._timeout_s)
            connection.connect(engine.bind_address(address))
            if engine.peer_uid(connection) != os.getuid():
                raise OSError("it belongs to another user")
        except OSError as error:
            connection.close()
            reason = f"no receiver answers at {address!r} ({error}); is the engine running, with a thread that polls?"
            raise TargetError(Failure("begin", reason)) from error
        self._connections[address] = connection
        hello = {"wire": engine.WIRE, "session": self._session}
        tensors = [[spec.name, str(spec.dtype).removeprefix("torch."), list(spec.shape)] for spec in layout.specs]
        body = {"tensors": tensors, "files": [num_bytes for _, num_bytes in files]}
        try:
            self._ask([address], "begin", "hello", hello)
            self._ask([address], "begin", "layout", body, [descriptor for descriptor, _ in files])
        except TargetError:
            self._disconnect(address)
            raise

    def begin(self, version: int | str, mode: str, base: int | str | None) -> None:
        self._failure, self._taken, self._has_begun = None, None, True
        self._ask(self._addresses, "begin", "begin", {"version": version, "mode": mode, "base": base})

    def take(self, parcels: Iterator[Parcel]) -> None:
        for parcel in parcels:
            self._answered()
            if self._failure is None:
                self._send(parcel)
        self._answered()
        if self._failure is not None:
            raise TargetError(self._failure)

    def _send(self, parcel: Parcel) -> None:
        try:
            body = self._place(parcel)
            self._tell(self._addresses, "load", "bucket", body)
            self._taken, parcel.wait = parcel, self._answered
        except Exception as error:
            self._failure = Failure("load", str(error), parcel.index, span(parcel.names))

    def _answered(self) -> None:
        """All engines are done with the parcel that was sent last, or it is known why not."""
        parcel, self._taken = self._taken, None
        if parcel is None:
            return
        try:
            self._hear(self._addresses, "load")
        except TargetError as error:
            self._failure = Failure("load", error.failure.reason, parcel.index, span(parcel.names))

    def _place(self, parcel: Parcel) -> dict:
        """The body of a bucket's request; what lies in no file of the layout is copied into the spare one."""
        tensors, deltas, end = [], [], 0
        for spec, tensor in zip(parcel.specs, parcel.tensors, strict=True):
            file, offset = self._places.get(parcel.file), tensor.storage_offset() * tensor.itemsize
            if file is None:
                file, offset = self._places[self._spare.file], end
                self._spare.view(end, spec.num_bytes, spec.dtype).view(spec.shape).copy_(tensor)
                end = _C.align_up(end + spec.num_bytes)
            tensors.append([self._indices[spec.name], file, offset])
        for delta in parcel.deltas:
            count = delta.positions.numel()
            values, num_bytes = engine.delta_bytes(count, delta.spec.dtype)
            self._spare.view(end, count * engine.POSITION_BYTES, torch.int64).copy_(delta.positions)
            self._spare.view(end + values, count * delta.spec.dtype.itemsize, delta.spec.dtype).copy_(delta.values)
            deltas.append([self._indices[delta.spec.name], self._places[self._spare.file], end, count])
            end = _C.align_up(end + num_bytes)
        return {"bucket": parcel.index, "tensors": tensors, "deltas": deltas}

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
        for address in list(self._connections):
            self._disconnect(address)
        self._spare = None

    # ---- the dialogue

    def _ask(self, addresses: Sequence[str], phase: str, kind: str, body: dict, files: Sequence[int] = ()) -> None:
        self._tell(addresses, phase, kind, body, files)
        self._hear(addresses, phase)

    def _tell(self, addresses: Sequence[str], phase: str, kind: str, body: dict, files: Sequence[int] = ()) -> None:
        """Raises what failed first, after all were told: an engine that was told owes an answer."""
        failed: list[str] = []
        deadline = time.monotonic() + self._timeout_s
        for address in addresses:
            try:
                if address not in self._connections:
                    raise engine.WireError("there is no connection any more")
                engine.send_frame(self._connections[address], kind, body, deadline, files)
            except engine.WireError as error:
                self._disconnect(address)
                failed.append(f"the engine at {address!r}: {error}")
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
                _, answer, files = engine.receive_frame(self._connections[address], deadline)
                engine.close_files(files)
                if not answer["ok"]:
                    reasons.append(f"the engine at {address!r} says: {answer['error']}")
            except (engine.WireError, KeyError) as error:
                self._disconnect(address)
                reasons.append(f"the engine at {address!r}: {error}")
        if reasons:
            raise TargetError(Failure(phase, "; ".join(reasons)))

    def _disconnect(self, address: str) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()


class _Spare:
    """A memory file of this process, with room for one parcel."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.file = os.memfd_create("fsdp2x-sync", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, self.num_bytes)
        self._map = mmap.mmap(self.file, self.num_bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def view(self, offset: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self._bytes[offset : offset + num_bytes].view(dtype)
