"""Opens and reads untrusted files within limits: regular files, JSON, trees of plain values."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp2x.base.failures import CheckpointError, CorruptFile, first_line, reworded

DEEPEST = 100
MOST_VALUES = 20_000_000


def check_plain(tree: Any, where: str) -> None:
    """Raises `CorruptFile` for values that contain themselves, are nested too deep, or become too many.

    A file can refer to earlier values, so a few bytes may stand for a tree that fits in no memory.
    """
    known: dict[int, tuple[int, int]] = {}
    open_: set[int] = set()

    def measure(node: Any, depth: int) -> tuple[int, int]:
        """Returns the number of values below a node, and of levels."""
        if isinstance(node, Mapping):
            children = node.values()
        elif isinstance(node, list | tuple | set | frozenset):
            children = node
        else:
            return 1, 0
        if id(node) in open_:
            raise CorruptFile(f"{where}: damaged, a value in it contains itself")
        if id(node) not in known:
            if depth == DEEPEST:
                raise CorruptFile(f"{where}: damaged, its values are nested deeper than {DEEPEST} levels")
            open_.add(id(node))
            num = levels = 0
            for child in children:
                num_below, levels_below = measure(child, depth + 1)
                num, levels = num + num_below, max(levels, levels_below)
            open_.discard(id(node))
            known[id(node)] = num + 1, levels + 1
        num, levels = known[id(node)]
        if depth + levels > DEEPEST:
            raise CorruptFile(f"{where}: damaged, its values are nested deeper than {DEEPEST} levels")
        if num > MOST_VALUES:
            raise CorruptFile(f"{where}: damaged, references expand it to more than {MOST_VALUES} values")
        return num, levels

    measure(tree, 0)


def how_to_download(path: str | Path) -> str:
    """Returns the command that downloads a model, if a missing path can be a name of the hub, else an empty text."""
    name = str(path)
    if os.path.exists(name) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        return ""
    folder = name.partition("/")[2]
    return f" fsdp2x downloads nothing. Run `hf download {name} --local-dir {folder}`, and pass the folder {folder}."


_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO}


def open_regular(path: Path) -> int:
    """Returns a descriptor for reading a regular file. Raises `CheckpointError` that names it."""
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
    """Files that stay open while sources point into them, the last `most` of them. A context manager.

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
        """Returns ``num_bytes`` bytes of a file, or fewer at its end."""
        return os.pread(self._fd(path), num_bytes, offset)

    def fill(self, path: Path, offset: int, target: memoryview) -> None:
        """Reads until the memory is full. Raises `CorruptFile` if the file ends first."""
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
        self._fds[path] = fd  # last, because the least recently used comes first
        return fd


MOST_BYTES = 1 << 30


def read_text(path: Path, most_bytes: int = MOST_BYTES, *, may_be_pipe: bool = False) -> str:
    """Returns a UTF-8 file of at most ``most_bytes``. Raises `CheckpointError`, or `CorruptFile` for other contents."""
    with (
        reworded(CheckpointError, str(path), OSError),
        open(path if may_be_pipe else open_regular(path), "rb") as file,
    ):
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise CorruptFile(f"{path}: damaged, it has more than {most_bytes} bytes")
    with reworded(CorruptFile, f"{path}: damaged, not UTF-8 text", UnicodeDecodeError):
        return content.decode("utf-8")


def read_json(path: Path, *, unique: bool = True) -> dict[str, Any]:
    """Returns the mapping in a JSON file. With `unique`, a repeated key raises."""
    return parse_json(read_text(path), str(path), unique=unique)


def parse_json(text: str | bytes, where: str, *, unique: bool = True) -> dict[str, Any]:
    """Does the same for text. Errors name `where`."""
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise CorruptFile(f"{where}: damaged, its values are nested too deep") from None
    except ValueError as error:
        raise CorruptFile(f"{where}: damaged, not valid JSON: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise CorruptFile(f"{where}: expected a mapping, got {type(value).__name__}")
    check_plain(value, where)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:100]!r} is there twice")
    return found
