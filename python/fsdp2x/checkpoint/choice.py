"""Which checkpoint a path means: the first whole one where it is a folder of them; agreed by all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2x.errors import CheckpointError, CorruptFile
from fsdp2x.reading.table import METADATA
from fsdp2x.runtime.failures import gather_all, join_failures, rank_and_size, run_on_all_ranks

from . import directory
from .directory import MANIFEST, PARTS_FILE
from .manifest import read_manifest, verify_files
from .sources import verify_archive

logger = logging.getLogger(__name__)


@dataclass
class Choice:
    """A checkpoint. `manifest` is None for a lone file, and for a directory that others wrote."""

    path: Path
    form: str
    manifest: dict[str, Any] | None


def choose(path: Path, verify: bool, look_into: Callable[[Choice], None], what: str) -> Choice:
    """The checkpoint to load; collective.

    Args:
        verify: its files are compared with their checksums.
        look_into: called on every rank with a checkpoint whose files are those that were written. When it raises
            `CorruptFile` anywhere, the next checkpoint is tried.

    Raises:
        CheckpointError: on every rank, naming all that were refused; or what `look_into` raised.
    """
    rank, world_size = rank_and_size()
    refused = []
    for option in run_on_all_ranks(lambda: _options(path), what=what):
        found: list[Choice] = []
        failures = _failures(lambda found=found, option=option: found.append(_examine(option, verify)), what)
        if not failures:
            failures = _failures(lambda found=found: look_into(found[0]), what)
        if not failures:
            if refused:
                logger.warning("%s; using %s instead", "; ".join(refused), option)
            return found[0]
        refused.append(join_failures(failures, world_size, ""))
    raise CheckpointError(f"{what}: {'; '.join(refused) or 'no checkpoint there'}")


def _failures(work: Callable[[], Any], what: str) -> dict[int, str]:
    """Runs `work` on every rank; rank -> what is damaged there. Any other failure is raised on all."""

    def attempt() -> str | None:
        try:
            work()
        except CorruptFile as error:
            return str(error)
        return None

    said = gather_all(attempt, what=what)
    return {rank: one for rank, one in enumerate(said) if one is not None}


def _options(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    root = path if directory.is_root(path) else path / "checkpoints"
    if (path / MANIFEST).is_file() or (path / METADATA).is_file() or not directory.is_root(root):
        return [path if path.is_dir() and (path / METADATA).is_file() else directory.resolve(path)]
    return directory.candidates(root)


def _examine(option: Path, verify: bool) -> Choice:
    """Looks at the manifest and at this rank's part of the files."""
    rank, world_size = rank_and_size()
    if option.is_file():
        if verify:
            verify_archive(option, rank, world_size)
        return Choice(option, "full", None)
    if not (option / MANIFEST).is_file() and (option / METADATA).is_file():
        if (option / PARTS_FILE).is_file():
            raise CorruptFile(f"{option}: damaged, {MANIFEST} is missing")
        return Choice(option, "sharded", None)
    manifest = read_manifest(option)
    if verify:
        verify_files(option, manifest, rank=rank, world_size=world_size)
    return Choice(option, manifest["form"], manifest)
