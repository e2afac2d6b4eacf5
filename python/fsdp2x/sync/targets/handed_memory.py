"""Memory that processes beside this one map by a handle: of an accelerator by CUDA IPC, of the host as a file.

A handle is (function, arguments): calling it in the other process gives a flat tensor of bytes over the same memory.
torch counts who reads memory of a device, one reader for each handle: every reader is made one of its own. Who maps it
lets go of it before the memory is freed, or it stays taken.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
from torch.multiprocessing import reductions

from fsdp2x.runtime import torch_private
from fsdp2x.runtime.memory_file import MemoryFile

Handle = tuple[Callable[..., torch.Tensor], tuple]
DEVICE_ARGUMENT = 6  # of `rebuild_cuda_tensor`: the device's number, which need not be the same in the other process


class HandedMemory:
    """``num_bytes`` of ``device`` in ``bytes``, a flat tensor."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """
        Raises:
            NotImplementedError: neither CUDA nor the CPU.
        """
        self.device = device
        self._file: MemoryFile | None = None
        if device.type == "cuda":
            with torch_private.outside_expandable_segments():
                self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            return
        if device.type != "cpu":
            raise NotImplementedError(
                f"fsdp2x.sync: memory of {device} cannot be handed to another process; CUDA's and the CPU's can"
            )
        self._file = MemoryFile("fsdp2x-handed", num_bytes)
        self._num_bytes = num_bytes
        self.bytes = self._file.bytes[:num_bytes]

    def handle(self) -> Handle:
        """For one reader, which ``pickle`` can write."""
        if self._file is None:
            return reductions.reduce_tensor(self.bytes)
        rebuild = functools.partial(torch.from_file, dtype=torch.uint8)
        return rebuild, (f"/proc/{os.getpid()}/fd/{self._file.file}", True, self._num_bytes)

    def device_handle(self) -> tuple:
        """The arguments of ``rebuild_cuda_tensor`` for one reader, with the GPU's UUID for its number.

        Raises:
            ValueError: the memory is not that of a GPU.
        """
        if self._file is not None:
            raise ValueError(
                "fsdp2x.sync: engines are handed memory of a GPU, and this rank gathers weights on the CPU; "
                'use memory="host" of Peer and Vllm, group="gloo" of Sglang'
            )
        arguments = reductions.reduce_tensor(self.bytes)[1]
        return (*arguments[:DEVICE_ARGUMENT], device_uuid(self.device), *arguments[DEVICE_ARGUMENT + 1 :])

    def synchronize(self) -> None:
        """Waits until what was written is visible to other processes."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def accelerator_or_cpu() -> torch.device:
    """The current accelerator of this process, the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def device_uuid(device: torch.device) -> str:
    """A GPU's own name, which it has in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)
