"""Files of ``torch.save`` whole: their values as torch loads them, their tensors as sources, which agree.

What torch would believe (how many bytes a tensor has, where it lies) is compared before torch reads it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from fsdp2x.errors import CheckpointError, CorruptFile, first_line

from .plain import check_plain
from .records import read_records
from .regular import OpenFiles


def open_archive(files: OpenFiles, path: Path, trusted: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """A file that holds a mapping: as torch loads it, tensors mapped from the file; the same with sources for tensors.

    Args:
        trusted: classes are looked up and called, which may execute code. Otherwise what needs that is refused.

    Raises:
        CorruptFile: it is missing, no such file, or contradicts itself.
        CheckpointError: it needs to be trusted.
    """
    records = read_records(files, path, inert=True)
    values = _load(path, str(path), trusted, mmap=True)
    for one in (values, records):
        if not isinstance(one, dict):
            raise CorruptFile(f"{path}: got {type(one).__name__}, expected a mapping of parts")
    return values, records


def load_run(
    files: OpenFiles,
    path: Path,
    offset: int,
    num_bytes: int,
    name: str,
    trusted: bool,
    labels: Collection[bytes] | None = None,
) -> Any:
    """The value in a run of bytes of a file; ``name``: of the entry, for errors. Raises as `open_archive`."""
    read_records(files, path, offset, num_bytes, inert=True, labels=labels)
    return _load(io.BytesIO(files.read(path, offset, num_bytes)), f"{path}: {name}", trusted)


def detached(tree: Any) -> Any:
    """The tree with tensors of their own memory in place of those that are mapped from a file."""
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if type(tree) in (list, tuple):
        return type(tree)(map(detached, tree))
    return {key: detached(value) for key, value in tree.items()} if type(tree) is dict else tree


def _load(source: Any, where: str, trusted: bool, **options: Any) -> Any:
    try:
        loaded = torch.load(source, map_location="cpu", weights_only=not trusted, **options)
    except Exception as error:
        if (call := _why_refused(error)) is not None:
            raise CheckpointError(
                f"{where}: reading it would execute {call}; pass trusted=True if you know who wrote it"
            ) from None
        raise CorruptFile(f"{where}: damaged, its contents cannot be read: {first_line(error)}") from None
    check_plain(loaded, where)
    return loaded


def _why_refused(error: Exception) -> str | None:
    """What `torch.load(weights_only=True)` would have had to call; None for an error of another kind."""
    text = str(error)
    if "weights_only" not in text and "weights only" not in text.lower():
        return None
    named = re.search(r"GLOBAL ([\w.]+)", text)
    return named.group(1) if named else "code"
