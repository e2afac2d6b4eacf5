"""Handles of a GPU's memory without one: what torch's CUDA IPC takes and gives, over files of the host's memory."""

import contextlib
import gc
import os
import weakref
from unittest import mock

import torch
from torch.multiprocessing import reductions

from fsdp2x.base.memory_file import MemoryFile
from fsdp2x.rl.sync.targets.transports import HandedMemory
from fsdp2x.sync import engine

UUID, INDEX = "8f3c1c3e-0000-0000-0000-000000000007", 5


class Rebuilding:
    """In place of torch's `rebuild_cuda_tensor`: counts readers, of which each handle has one."""

    def __init__(self):
        self.num_readers, self._memories = 0, weakref.WeakSet()
        self.__module__ = reductions.__name__

    def __reduce__(self):
        return "rebuild_cuda_tensor"  # pickled by the name of what it stands for

    def num_open(self):
        """Memories that were handed out and are not freed."""
        gc.collect()
        return len(self._memories)

    def reduce(self, memory):
        """The arguments of a CUDA tensor's handle, with the UUID in place of the device."""
        self._memories.add(memory)
        path, num_bytes = f"/proc/{os.getpid()}/fd/{memory._file.file}", len(memory.bytes)
        head = (torch.Tensor, torch.Size([num_bytes]), (1,), 0, torch.UntypedStorage, torch.uint8, UUID)
        return (*head, path.encode(), num_bytes, 0, False, b"counter", 3, b"event", False)

    def __call__(self, cls, size, stride, offset, storage, dtype, device, handle, num_bytes, *rest):
        assert device == (INDEX if isinstance(device, int) else UUID) and rest == (0, False, b"counter", 3, b"event", 0)
        self.num_readers += 1
        return torch.from_file(handle.decode(), True, num_bytes, dtype=dtype)[: size[0]]


rebuilding = Rebuilding()


def allocate(memory, device, num_bytes):
    memory.device, memory._file = device, MemoryFile("handed", num_bytes)
    memory.bytes = memory._file.bytes[:num_bytes]


@contextlib.contextmanager
def installed():
    """While it lasts memory of the CPU is handed out as a GPU's; gives what rebuilds it."""
    with (
        mock.patch.object(HandedMemory, "__init__", allocate),
        mock.patch.object(HandedMemory, "device_handle", lambda memory: rebuilding.reduce(memory)),
        mock.patch.object(engine, "device_of", lambda uuid: {UUID: INDEX}[uuid]),
        mock.patch.object(reductions, "rebuild_cuda_tensor", rebuilding),
    ):
        yield rebuilding
