"""Allocates whole pages that others can map by descriptor, and packs several tensors into one buffer of bytes.

    buffer | tensor 0 |pad| tensor 1 |pad| ...        so that one collective or one copy moves them all

The engine's segments (``csrc/core/layout.cpp``) have another layout: they hold rows of all ranks in one dtype, by rules
that gathers, reductions and shards in gather buffers share.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fsdp2x.base.native import _C


def whole_pages(num_bytes: int) -> int:
    """Rounds up to whole pages, at least one, because zero bytes cannot be mapped."""
    return -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def aligned_starts(sizes: Iterable[int], begin: int = 0) -> tuple[list[int], int]:
    """Returns where each of tensors of these sizes starts, from ``begin`` on, and where the last one ends."""
    starts, end = [], begin
    for size in sizes:
        starts.append(end)
        end += _C.align_up(size)
    return starts, end


def tensor_at(buffer: torch.Tensor, start: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns the tensor that begins at byte ``start`` of a buffer of bytes."""
    return buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the CPU without a copy."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()  # numpy's annotations do not call it a Buffer
    return memoryview(array)


class MemoryFile:
    """``num_bytes`` of whole pages, allocated when they are written. ``file`` is closed with this object.

    ``bytes``, uint8 of shape (num_bytes,), has a separate mapping and may live longer. ``existing``: a descriptor of a
    file of this size, which is duplicated.
    """

    def __init__(self, name: str, num_bytes: int, existing: int | None = None) -> None:
        self.num_bytes = whole_pages(num_bytes)
        self.file = os.memfd_create(name, os.MFD_CLOEXEC) if existing is None else os.dup(existing)
        weakref.finalize(self, os.close, self.file)
        if existing is None:
            os.ftruncate(self.file, self.num_bytes)
        with torch.inference_mode(False):
            self.bytes = torch.frombuffer(mmap.mmap(self.file, self.num_bytes), dtype=torch.uint8)


def collect_handed() -> None:
    """Returns GPU memory to torch's allocator that was handed to other processes and dropped since.

    Otherwise torch only checks when it next hands memory out. Memory stays allocated while a reader maps it. If a
    reader died, it stays until this process ends.
    """
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
