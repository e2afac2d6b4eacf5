"""Opening what has to be a file: a pipe in its place would be waited for without end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from fsdp2x.errors import CheckpointError, CorruptFile

_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO}


def open_regular(path: Path) -> int:
    """A descriptor of a regular file, for reading; raises `CheckpointError` naming it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        kind = CorruptFile if error.errno in _DAMAGE else CheckpointError
        raise kind(f"{path}: {error.strerror or error}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptFile(f"{path}: not a regular file")
    return fd


class OpenFiles:
    """Files that stay open while sources point into them, the last `most` of them; a context manager.

    A checkpoint of many ranks has more files than a process may open at once.
    """

    def __init__(self, most: int = 256) -> None:
        self.read_bytes = 0
        self._most = most
        self._fds: dict[Path, int] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def read(self, path: Path, offset: int, num_bytes: int) -> bytes:
        """So many bytes of a file, fewer at its end."""
        return os.pread(self._fd(path), num_bytes, offset)

    def fill(self, path: Path, offset: int, target: memoryview) -> None:
        """Reads into memory until it is full; raises `CorruptFile` when the file ends before."""
        self.read_bytes += len(target)
        while len(target):
            count = os.preadv(self._fd(path), [target], offset)
            if count == 0:
                raise CorruptFile(f"{path}: ends {len(target)} bytes before a tensor does: the file is truncated")
            target, offset = target[count:], offset + count

    def num_bytes(self, path: Path) -> int:
        return os.fstat(self._fd(path)).st_size

    def _fd(self, path: Path) -> int:
        fd = self._fds.pop(path, None)
        if fd is None:
            if len(self._fds) >= self._most:
                os.close(self._fds.pop(next(iter(self._fds))))
            fd = open_regular(path)
        self._fds[path] = fd  # at the end: the least recently used comes first
        return fd
