"""Memory in whole pages: a process's own that others can map by its descriptor, and advice to have it in large ones."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import weakref
from collections.abc import Iterable

import torch

from fsdp2x.runtime.native import _C

_LEAST_BYTES = 2 << 20  # for large pages


def whole_pages(num_bytes: int) -> int:
    """At least one page: nothing maps none."""
    return -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def aligned_starts(sizes: Iterable[int], begin: int = 0) -> tuple[list[int], int]:
    """Where each of some tensors of so many bytes starts, one behind the other from ``begin`` on, and the end."""
    starts, end = [], begin
    for size in sizes:
        starts.append(end)
        end += _C.align_up(size)
    return starts, end


class MemoryFile:
    """``num_bytes`` of whole pages, which are there where somebody writes; ``file`` is closed with this object.

    ``bytes``, uint8 of shape (num_bytes,), is mapped by itself and may live longer.
    """

    def __init__(self, name: str, num_bytes: int) -> None:
        self.num_bytes = whole_pages(num_bytes)
        self.file = os.memfd_create(name, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, self.num_bytes)
        self.bytes = torch.frombuffer(mmap.mmap(self.file, self.num_bytes), dtype=torch.uint8)


def advise_large_pages(tensor: torch.Tensor) -> None:
    """Lets fresh memory of the CPU appear in pages of 2 MiB, which costs a small part of the faults of 4 KiB pages.

    Only advice: nothing happens where the system has no such pages, or for memory of less than 2 MiB.
    """
    num_bytes = tensor.numel() * tensor.itemsize
    if tensor.device.type != "cpu" or num_bytes < _LEAST_BYTES or not sys.platform.startswith("linux"):
        return
    start = whole_pages(tensor.data_ptr())
    end = (tensor.data_ptr() + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc().madvise(start, end - start, mmap.MADV_HUGEPAGE)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
