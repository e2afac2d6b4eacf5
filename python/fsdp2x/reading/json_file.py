"""JSON of others: read with limits, and every mistake is one sentence that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsdp2x.errors import CheckpointError, CorruptFile, first_line

from .plain import check_plain
from .regular import open_regular

MOST_BYTES = 1 << 30


def read_text(path: Path, most_bytes: int = MOST_BYTES, *, may_be_pipe: bool = False) -> str:
    """A UTF-8 file of at most so many bytes; raises `CheckpointError`, or `CorruptFile` for what is no such text."""
    try:
        with open(path if may_be_pipe else open_regular(path), "rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    if len(content) > most_bytes:
        raise CorruptFile(f"{path}: damaged, it has more than {most_bytes} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{path}: damaged, not UTF-8 text: {error}") from None


def read_json(path: Path, *, unique: bool = True) -> dict[str, Any]:
    """The mapping in a JSON file.

    Args:
        unique: a key that is there twice is an error; JSON itself would take the last one without a word.

    Raises:
        CheckpointError: the file cannot be opened.
        CorruptFile: not JSON, no mapping, nested too deep.
    """
    return parse_json(read_text(path), str(path), unique=unique)


def parse_json(text: str | bytes, where: str, *, unique: bool = True) -> dict[str, Any]:
    """The same for text; `where` names it in errors."""
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise CorruptFile(f"{where}: damaged, its values are nested too deep") from None
    except ValueError as error:
        raise CorruptFile(f"{where}: damaged, not valid JSON: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise CorruptFile(f"{where}: got {type(value).__name__}, expected a mapping")
    check_plain(value, where)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:100]!r} is there twice")
    return found
