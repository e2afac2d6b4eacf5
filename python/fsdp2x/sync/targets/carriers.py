"""How the bytes of a push get to receivers: in memory files of this host, or in the stream of a TCP connection."""

from __future__ import annotations

import mmap
import os
import socket
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from fsdp2x.runtime.native import _C
from fsdp2x.sync import engine, engine_tcp
from fsdp2x.sync.targets.base import Parcel, WireLayout

Places = list[list[int]]


class Carrier(Protocol):
    """What ``Peer`` asks of either."""

    def prepare(self, layout: WireLayout) -> None:
        """Before each push."""

    def connect(self, address: str, timeout_s: float) -> socket.socket:
        """To a receiver that may take weights.

        Raises:
            OSError: there is none.
        """

    def files(self) -> tuple[list[int], list[int]]:
        """Bytes of each memory that buckets lie in, and the descriptors to send along."""

    def place(self, parcel: Parcel, indices: Mapping[str, int]) -> tuple[dict[str, Any], list[memoryview]]:
        """The body of a bucket's request, and the bytes that follow it. ``indices``: of names in the layout."""

    def close(self) -> None:
        """Lets go of memory."""


class MemoryCarrier:
    """Engines map the ring that the ranks write to.

    What is not in it (un-fused experts, merged adapters, parameters over several axes, ranks that share no memory) is
    copied into a file of this rank, as are deltas; it holds one parcel, which is enough, because a parcel is made only
    after the one before was answered for.
    """

    def __init__(self) -> None:
        self._layout: WireLayout | None = None
        self._spare: _Spare | None = None

    def prepare(self, layout: WireLayout) -> None:
        self._layout = layout
        if self._spare is None:
            self._spare = _Spare(max(layout.spare_bytes, mmap.PAGESIZE))
        self._places = {descriptor: index for index, descriptor in enumerate(self.files()[1])}

    def connect(self, address: str, timeout_s: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(engine.bind_address(address))
            if engine.peer_uid(connection) != os.getuid():
                raise OSError("it belongs to another user")
        except BaseException:
            connection.close()
            raise
        return connection

    def files(self) -> tuple[list[int], list[int]]:
        files = [*self._layout.files, (self._spare.file, self._spare.num_bytes)]
        return [num_bytes for _, num_bytes in files], [descriptor for descriptor, _ in files]

    def place(self, parcel: Parcel, indices: Mapping[str, int]) -> tuple[dict[str, Any], list[memoryview]]:
        tensors: Places = []
        deltas: Places = []
        end = 0
        for spec, tensor in zip(parcel.specs, parcel.tensors, strict=True):
            file, offset = self._places.get(parcel.file), tensor.storage_offset() * tensor.itemsize
            if file is None:
                file, offset = self._places[self._spare.file], end
                self._spare.view(end, spec.num_bytes, spec.dtype).view(spec.shape).copy_(tensor)
                end = _C.align_up(end + spec.num_bytes)
            tensors.append([indices[spec.name], file, offset])
        for delta in parcel.deltas:
            count = delta.positions.numel()
            values, num_bytes = engine.delta_bytes(count, delta.spec.dtype)
            self._spare.view(end, count * engine.POSITION_BYTES, torch.int64).copy_(delta.positions)
            self._spare.view(end + values, count * delta.spec.dtype.itemsize, delta.spec.dtype).copy_(delta.values)
            deltas.append([indices[delta.spec.name], self._places[self._spare.file], end, count])
            end = _C.align_up(end + num_bytes)
        return {"bucket": parcel.index, "tensors": tensors, "deltas": deltas}, []

    def close(self) -> None:
        self._spare = None


class StreamCarrier:
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

    def files(self) -> tuple[list[int], list[int]]:
        return [self._room], []

    def place(self, parcel: Parcel, indices: Mapping[str, int]) -> tuple[dict[str, Any], list[memoryview]]:
        tensors: Places = []
        deltas: Places = []
        parts: list[memoryview] = []
        end = 0

        def add(tensor: torch.Tensor) -> int:
            nonlocal end
            start = _C.align_up(end)
            parts.append(memoryview(bytes(start - end)))
            parts.append(_bytes_of(tensor))
            end = start + parts[-1].nbytes
            return start

        for spec, tensor in zip(parcel.specs, parcel.tensors, strict=True):
            tensors.append([indices[spec.name], 0, add(tensor)])
        for delta in parcel.deltas:
            count = delta.positions.numel()
            start = add(delta.positions)
            parts.append(_bytes_of(delta.values))  # positions end where values may begin
            end += parts[-1].nbytes
            deltas.append([indices[delta.spec.name], 0, start, count])
        return {"bucket": parcel.index, "bytes": end, "tensors": tensors, "deltas": deltas}, parts

    def close(self) -> None:
        """It holds no memory."""


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


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
