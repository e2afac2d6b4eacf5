"""What carries buckets to engines: files and GPU memory that engines on this host map, or bytes to broadcast."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing import reductions

from fsdp2x.api import ALIGN_BYTES, MemoryFile, align_up, outside_expandable_segments
from fsdp2x.rl.sync.receiver import engine
from fsdp2x.rl.sync.targets.base import PushBucket, WireLayout

DEVICE_ARGUMENT = 6  # of `rebuild_cuda_tensor`: the device's number, which need not be the same in the other process


class BucketMemory:
    """Flat ``bytes`` that buckets are copied to, one at a time, and files of the layout in which they need no copy."""

    files: Mapping[int, int] = {}  # descriptors of the layout's files that engines map, and their numbers

    def __init__(self, memory: torch.Tensor) -> None:
        self.bytes = memory  # engines number it after the files

    def describe(self) -> tuple[dict[str, Any], list[int]]:
        """Returns what an engine must know of the memory, and the descriptors to send with it."""
        return {"files": [len(self.bytes)]}, []

    def place(self, bucket: PushBucket, indices: Mapping[str, int]) -> dict[str, Any]:
        """Copies tensors that are in no file of the layout. Returns the body of the bucket's request.

        ``indices`` are positions of the names in the layout.
        """
        shared, number = None if bucket.file is None else self.files.get(bucket.file), len(self.files)
        tensors: list[list[int]] = []
        deltas: list[list[int]] = []
        end = 0
        for spec, tensor in zip(bucket.specs, bucket.tensors, strict=True):
            if shared is not None:
                tensors.append([indices[spec.name], shared, int(tensor.storage_offset()) * tensor.itemsize])
                continue
            tensors.append([indices[spec.name], number, end])
            end = align_up(self._copied(tensor, end))
        for delta in bucket.deltas:
            index, count = indices[delta.spec.name], delta.positions.numel()
            if shared is not None and not bucket.tensors:
                begin = int(delta.positions.storage_offset()) * engine.POSITION_BYTES
                deltas.append([index, shared, begin, count])
                continue
            deltas.append([index, number, end, count])
            values = self._copied(delta.positions, end)  # positions end where values may begin
            end = align_up(self._copied(delta.values, values))
        return {"bucket": bucket.index, "bytes": end, "tensors": tensors, "deltas": deltas}

    def _copied(self, tensor: torch.Tensor, begin: int) -> int:
        end = begin + tensor.nbytes
        self.bytes[begin:end].view(tensor.dtype).copy_(tensor.reshape(-1))
        return end


class FileMemory(BucketMemory):
    """Engines map the ring that buckets are gathered into.

    Some tensors are not in it: un-fused experts, merged adapters, parameters over several axes, weights on a device,
    and deltas that a process group has gathered. They are copied to a file of this rank.
    """

    def __init__(self, layout: WireLayout) -> None:
        self._own = MemoryFile("fsdp2x-sync", layout.spare_bytes)
        super().__init__(self._own.bytes)
        self.files = {descriptor: number for number, (descriptor, _) in enumerate(layout.files)}
        self._sizes = [*(num_bytes for _, num_bytes in layout.files), self._own.num_bytes]

    def describe(self) -> tuple[dict[str, Any], list[int]]:
        return {"files": self._sizes}, [*self.files, self._own.file]


class DeviceMemory(BucketMemory):
    """Engines on this host map a buffer of this rank's GPU, once for all pushes of a layout."""

    def __init__(self, layout: WireLayout) -> None:
        self._handed = HandedMemory(accelerator_or_cpu(), room_for(layout))
        super().__init__(self._handed.bytes)

    def describe(self) -> tuple[dict[str, Any], list[int]]:
        return {"files": [], "device": engine.describe_handle(self._handed.device_handle())}, []

    def place(self, bucket: PushBucket, indices: Mapping[str, int]) -> dict[str, Any]:
        body = super().place(bucket, indices)
        self._handed.synchronize()
        return body


def room_for(layout: WireLayout) -> int:
    """Returns the bytes that any copied bucket takes. Deltas take at most half of their tensors' bytes, plus gaps."""
    buckets = (sum(align_up(spec.num_bytes) for spec in bucket) for bucket in layout.buckets)
    return max([ALIGN_BYTES, *buckets]) + ALIGN_BYTES * len(layout.specs)


def connected(address: str, timeout_s: float) -> socket.socket:
    """Returns a connection to a receiver of the same user on this host.

    Raises:
        OSError: there is none.
    """
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


# ---- memory for other processes


class HandedMemory:
    """``num_bytes`` of a GPU in ``bytes``, a flat tensor that other processes of this host map by CUDA IPC.

    torch counts readers by handle, so every reader needs a separate handle. Readers must unmap it before it is freed,
    or it stays allocated.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Allocates the memory.

        Raises:
            ValueError: the device is not a GPU.
        """
        if device.type != "cuda":
            raise ValueError(
                "fsdp2x.sync: engines need memory of a GPU, but this rank gathers weights on the "
                f'{device.type.upper()}. Use memory="host" of Peer and Vllm, or group="gloo" of Sglang.'
            )
        self.device = device
        with outside_expandable_segments():
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def device_handle(self) -> tuple:
        """Returns the arguments of ``rebuild_cuda_tensor`` for one reader, with the GPU's UUID as its number."""
        arguments = reductions.reduce_tensor(self.bytes)[1]
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        return (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])

    def synchronize(self) -> None:
        """Waits until written data is visible to other processes."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def accelerator_or_cpu() -> torch.device:
    """Returns the current accelerator of this process, or the CPU if there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
