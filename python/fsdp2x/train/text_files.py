"""Which files hold the text of a run."""

from __future__ import annotations

import fnmatch
import glob
from pathlib import Path

from .config import ConfigError, DataConfig


def find_files(config: DataConfig) -> list[Path]:
    """The files that `data.files` names, sorted and each once; raises `ConfigError` for an entry that names none."""
    found: set[Path] = set()
    for entry in config.files:
        path = Path(entry).expanduser()
        if path.is_dir():
            candidates = [p for p in path.rglob("*") if p.is_file()]
            kept = [p for p in candidates if _wanted(p.relative_to(path), config)]
        elif path.is_file():
            kept = candidates = [path]
        else:
            candidates = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]
            kept = [p for p in candidates if _wanted(p, config)]
        if not kept:
            if candidates:
                why = f"{len(candidates)} files there, none passes data.pattern and data.exclude"
            elif path.is_dir():
                why = "a folder without files"
            else:
                why = "a device or a pipe, expected a file with text" if path.exists() else "no such file"
            raise ConfigError(f"data.files: {entry}: {why}")
        found.update(kept)
    return sorted(found)


def _wanted(path: Path, config: DataConfig) -> bool:
    if config.pattern and not any(fnmatch.fnmatch(path.name, pattern) for pattern in config.pattern):
        return False
    return not any(fnmatch.fnmatch(part, pattern) for part in path.parts for pattern in config.exclude)
