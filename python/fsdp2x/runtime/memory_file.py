"""Anonymous memory of this process that others can map by its descriptor."""

from __future__ import annotations

import mmap
import os
import weakref

import torch


def whole_pages(num_bytes: int) -> int:
    """At least one page: nothing maps none."""
    return -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


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
