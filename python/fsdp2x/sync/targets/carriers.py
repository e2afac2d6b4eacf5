"""How the bytes of a push get to receivers: in memory files, in a GPU's memory, in a TCP connection, by a broadcast."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from fsdp2x.runtime.memory_file import MemoryFile
from fsdp2x.runtime.native import _C
from fsdp2x.sync import engine, engine_group, engine_ipc, engine_tcp
from fsdp2x.sync.targets.base import Parcel, WireLayout
from fsdp2x.sync.targets.handed_memory import HandedMemory, accelerator_or_cpu, collect_handed

Places = list[list[int]]


class Carrier:
    """What ``Peer`` asks of each."""

    is_group = False  # receivers are members of one: when one is lost, all begin anew

    def prepare(self, layout: WireLayout) -> None:
        """Before each push."""

    def connect(self, address: str, timeout_s: float) -> socket.socket:
        """To a receiver that may take weights: of the same user on this host.

        Raises:
            OSError: there is none.
        """
        return connected(address, timeout_s)

    def invite(self, receivers: Collection[socket.socket], timeout_s: float) -> dict[str, Any] | None:
        """What all receivers are told before they ``join`` a group, None where there is none, or they are in it.

        Raises:
            engine.WireError: there can be none.
        """

    def join(self, deadline: float, is_lost: Callable[[], bool]) -> None:
        """Meets them in that group; ``is_lost``: whether one of them is known not to come.

        Raises:
            engine.WireError: they did not come in time.
        """

    def memory(self) -> tuple[dict[str, Any], list[int]]:
        """What one receiver is told of the memory that buckets lie in, and the descriptors to send along."""
        raise NotImplementedError

    def place(self, parcel: Parcel, indices: Mapping[str, int]) -> tuple[dict[str, Any], list[memoryview]]:
        """The body of a bucket's request, and the bytes that follow it. ``indices``: of names in the layout."""
        raise NotImplementedError

    def deliver(self, deadline: float, is_lost: Callable[[], bool]) -> None:
        """What was placed and neither lies in memory nor follows the requests, which all receivers have been sent.

        Raises:
            engine.WireError: it did not reach all of them.
        """

    def close(self) -> None:
        """Lets go of memory."""


class MemoryCarrier(Carrier):
    """Engines map the ring that buckets are gathered into.

    What is not in it (un-fused experts, merged adapters, parameters over several axes, weights on a device) is copied
    into a file of this rank, as are deltas that a process group has gathered; it holds one parcel, which is
    enough, because a parcel is made only after the one before was answered for.
    """

    def __init__(self) -> None:
        self._layout: WireLayout | None = None
        self._spare: MemoryFile | None = None

    def prepare(self, layout: WireLayout) -> None:
        self._layout = layout
        if self._spare is None:
            self._spare = MemoryFile("fsdp2x-sync", layout.spare_bytes)
        self._places = {descriptor: index for index, descriptor in enumerate(self.memory()[1])}

    def memory(self) -> tuple[dict[str, Any], list[int]]:
        files = [*self._layout.files, (self._spare.file, self._spare.num_bytes)]
        return {"files": [num_bytes for _, num_bytes in files]}, [descriptor for descriptor, _ in files]

    def place(self, parcel: Parcel, indices: Mapping[str, int]) -> tuple[dict[str, Any], list[memoryview]]:
        tensors: Places = []
        deltas: Places = []
        end = 0
        for spec, tensor in zip(parcel.specs, parcel.tensors, strict=True):
            file, offset = self._places.get(parcel.file), tensor.storage_offset() * tensor.itemsize
            if file is None:
                file, offset = self._places[self._spare.file], end
                self._room(end, spec.num_bytes, spec.dtype).view(spec.shape).copy_(tensor)
                end = _C.align_up(end + spec.num_bytes)
            tensors.append([indices[spec.name], file, offset])
        for delta in parcel.deltas:
            count = delta.positions.numel()
            file = None if parcel.tensors else self._places.get(parcel.file)
            if file is not None:
                begin = delta.positions.storage_offset() * engine.POSITION_BYTES
                deltas.append([indices[delta.spec.name], file, begin, count])
                continue
            values, num_bytes = engine.delta_bytes(count, delta.spec.dtype)
            self._room(end, count * engine.POSITION_BYTES, torch.int64).copy_(delta.positions)
            self._room(end + values, count * delta.spec.dtype.itemsize, delta.spec.dtype).copy_(delta.values)
            deltas.append([indices[delta.spec.name], self._places[self._spare.file], end, count])
            end = _C.align_up(end + num_bytes)
        return {"bucket": parcel.index, "tensors": tensors, "deltas": deltas}, []

    def _room(self, offset: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        return self._spare.bytes[offset : offset + num_bytes].view(dtype)

    def close(self) -> None:
        self._spare = None


class DeviceCarrier(Carrier):
    """Engines on this host read a buffer of this rank's GPU, which holds one parcel.

    That is enough, because a parcel is made only after the one before was answered for. It lives as long as the layout:
    an engine maps it once for all pushes.
    """

    def __init__(self) -> None:
        self._memory: HandedMemory | None = None

    def prepare(self, layout: WireLayout) -> None:
        if self._memory is None:
            self._memory = HandedMemory(accelerator_or_cpu(), parcel_room(layout))

    def memory(self) -> tuple[dict[str, Any], list[int]]:
        return {"files": [], "device": engine_ipc.describe_handle(self._memory.device_handle())}, []

    def place(self, parcel: Parcel, indices: Mapping[str, int]) -> tuple[dict[str, Any], list[memoryview]]:
        body = packed(parcel, indices, self._memory.bytes)
        self._memory.settle()
        return body, []

    def close(self) -> None:
        self._memory = None
        collect_handed()


class StreamCarrier(Carrier):
    """Bytes follow a bucket's request, aligned as in memory; each engine is sent its own."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._room = 0

    def prepare(self, layout: WireLayout) -> None:
        # A parcel lies in a ring, or would in the spare file; between its tensors there is space to align them.
        largest = max([layout.spare_bytes, *(num_bytes for _, num_bytes in layout.files)])
        self._room = largest + _C.ALIGN_BYTES * len(layout.specs)

    def connect(self, address: str, timeout_s: float) -> socket.socket:
        connection = socket.create_connection(engine_tcp.split_address(address), timeout_s)
        try:
            engine_tcp.set_options(connection)
            engine_tcp.greet_engine(connection, self._secret, timeout_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def memory(self) -> tuple[dict[str, Any], list[int]]:
        return {"files": [self._room]}, []

    def place(self, parcel: Parcel, indices: Mapping[str, int]) -> tuple[dict[str, Any], list[memoryview]]:
        body, parts = arranged(parcel, indices)
        sent: list[memoryview] = []
        end = 0
        for begin, tensor in parts:
            sent += [memoryview(bytes(begin - end)), _bytes_of(tensor)]
            end = begin + tensor.nbytes
        return body, sent

    def close(self) -> None:
        """It holds no memory."""


class GroupCarrier(StreamCarrier):
    """Bytes are broadcast to all engines at once, from a buffer for one parcel, in a group of these engines."""

    is_group = True

    def __init__(self, secret: str, backend: str, num_engines: int) -> None:
        super().__init__(secret)
        self._backend, self._num_engines = backend, num_engines
        self._group: engine_group.BroadcastGroup | None = None
        self._num_bytes = 0

    def prepare(self, layout: WireLayout) -> None:
        self._room = parcel_room(layout)

    def invite(self, receivers: Collection[socket.socket], timeout_s: float) -> dict[str, Any] | None:
        if self._group is not None:
            return None
        host = engine_group.common_host([receiver.getsockname()[0] for receiver in receivers])
        opened = engine_group.BroadcastGroup.opened(self._backend, self._num_engines, host, timeout_s)
        self._group, invitation = opened
        self._bytes = torch.empty(self._room, dtype=torch.uint8, device=self._group.device)
        return invitation

    def join(self, deadline: float, is_lost: Callable[[], bool]) -> None:
        self._group.join(True, deadline, is_lost)
        self._group.meet(deadline, is_lost)

    def place(self, parcel: Parcel, indices: Mapping[str, int]) -> tuple[dict[str, Any], list[memoryview]]:
        body = packed(parcel, indices, self._bytes)
        self._num_bytes = body["bytes"]
        return body, []

    def deliver(self, deadline: float, is_lost: Callable[[], bool]) -> None:
        self._group.broadcast(self._bytes[: self._num_bytes], deadline, is_lost)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self._bytes = None


def parcel_room(layout: WireLayout) -> int:
    """Bytes that any parcel takes, packed; deltas take at most half of their tensors' bytes, and what aligns them."""
    buckets = (sum(_C.align_up(spec.num_bytes) for spec in bucket) for bucket in layout.buckets)
    return max(_C.ALIGN_BYTES, *buckets) + _C.ALIGN_BYTES * len(layout.specs)


def arranged(parcel: Parcel, indices: Mapping[str, int]) -> tuple[dict[str, Any], list[tuple[int, torch.Tensor]]]:
    """The body of a bucket's request, and the parts that lie one behind the other, each with where it begins."""
    tensors: Places = []
    deltas: Places = []
    parts: list[tuple[int, torch.Tensor]] = []
    end = 0
    for spec, tensor in zip(parcel.specs, parcel.tensors, strict=True):
        begin = _C.align_up(end)
        tensors.append([indices[spec.name], 0, begin])
        parts.append((begin, tensor))
        end = begin + tensor.nbytes
    for delta in parcel.deltas:
        begin = _C.align_up(end)
        deltas.append([indices[delta.spec.name], 0, begin, delta.positions.numel()])
        values = begin + delta.positions.nbytes  # positions end where values may begin
        parts += [(begin, delta.positions), (values, delta.values)]
        end = values + delta.values.nbytes
    return {"bucket": parcel.index, "bytes": end, "tensors": tensors, "deltas": deltas}, parts


def packed(parcel: Parcel, indices: Mapping[str, int], memory: torch.Tensor) -> dict[str, Any]:
    """The body of a bucket's request whose parts were copied into ``memory``."""
    body, parts = arranged(parcel, indices)
    for begin, tensor in parts:
        memory[begin : begin + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    return body


def connected(address: str, timeout_s: float) -> socket.socket:
    """To a receiver of the same user on this host."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(engine.bind_address(address))
        if engine.peer_uid(connection) != os.getuid():
            raise PermissionError("it belongs to another user")
    except BaseException:
        connection.close()
        raise
    return connection


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
