"""Writes one large file front to back, past the page cache if the file system allows.

Fresh pages of the page cache cost more than the disk. Writes with O_DIRECT from a few aligned blocks are several times
faster and leave the caches of other programs alone. File systems without O_DIRECT get ordinary writes. The file is on
disk when `close()` returns.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import zlib
from pathlib import Path

import torch

from fsdp2x.base.memory_file import memory_of, whole_pages

BLOCK_BYTES = 8 << 20
_PAGE = 4096


def page_aligned(num_bytes: int) -> torch.Tensor:
    """Returns zeroed bytes of this process that fill whole pages, in large pages if the system has them."""
    # Private, because shared mappings (the default) get large pages only where the system is configured for them.
    memory = mmap.mmap(-1, whole_pages(num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a tensor as flat bytes on its device. Copies only if it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class DirectFile:
    """One file. `put` appends bytes, `data` a tensor. `num_bytes` is what was written."""

    def __init__(self, path: Path):
        self.path = path
        self.num_bytes = 0
        self._direct = True
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
        try:
            self._file = os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = False
            self._file = os.open(path, flags, 0o666)
        self._blocks = [page_aligned(BLOCK_BYTES) for _ in range(2)]
        self._filled = 0
        self._writing: threading.Thread | None = None
        self._error: BaseException | None = None

    def put(self, content: bytes) -> None:
        if content:
            self.data(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def data(self, source: torch.Tensor) -> int:
        """Appends flat bytes and returns their CRC-32."""
        crc = done = 0
        while done < source.numel():
            count = min(source.numel() - done, BLOCK_BYTES - self._filled)
            target = self._blocks[0][self._filled : self._filled + count]
            target.copy_(source[done : done + count])
            crc = zlib.crc32(memory_of(target), crc)
            self._filled += count
            self.num_bytes += count
            done += count
            if self._filled == BLOCK_BYTES:
                self._turn()
        return crc

    def close(self) -> None:
        try:
            self._turn()
            self._wait()
            os.ftruncate(self._file, self.num_bytes)
            os.fsync(self._file)
        except OSError as error:
            error.filename = str(self.path)
            raise
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes the file as it is, after an error."""
        if self._writing is not None:
            self._writing.join()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _turn(self) -> None:
        """Writes the filled block, while the other one is filled."""
        self._wait()
        task = (self._blocks[0], self._filled, self.num_bytes - self._filled)
        # No executor of concurrent.futures, which takes no work once the main thread has ended.
        writing = threading.Thread(target=self._try_to_write, args=task, name="fsdp2x-disk", daemon=True)
        try:
            writing.start()
            self._writing = writing
        except RuntimeError:  # Python 3.12 then starts no thread either
            self._try_to_write(*task)
        self._blocks.reverse()
        self._filled = 0

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._error is not None:
            raise self._error

    def _try_to_write(self, block: torch.Tensor, num_bytes: int, offset: int) -> None:
        try:
            self._write(block, num_bytes, offset)
        except BaseException as error:
            self._error = error

    def _write(self, block: torch.Tensor, num_bytes: int, offset: int) -> None:
        """Writes the first `num_bytes` of a page-aligned block. With O_DIRECT it fills the last page."""
        whole = -(-num_bytes // _PAGE) * _PAGE if self._direct else num_bytes
        content = memory_of(block)[:whole]
        while content:
            try:
                written = os.pwrite(self._file, content, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    error.filename = str(self.path)
                    raise
                written = 0
            if self._direct and written % _PAGE:
                written -= written % _PAGE
            if self._direct and written == 0:
                # The file system opens files with O_DIRECT, but rejects such writes.
                self._direct = False
                fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT)
            content, offset = content[written:], offset + written
