"""Finds the files of a data set and reads rows from JSONL and parquet. Each row knows its file and line.

JSONL is read line by line with Python's `json`, so that an error names the line and a row has exactly its own keys.
The `datasets` library reads parquet.
"""

from __future__ import annotations

import bisect
import fnmatch
import glob
import hashlib
import itertools
import json
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from fsdp2x.base.failures import ConfigError, first_line, rank_and_size

RowFormat = Literal["jsonl", "parquet"]
# Default patterns for the files of a folder or a glob.
PATTERNS: dict[str, list[str]] = {"jsonl": ["*.jsonl", "*.json"], "parquet": ["*.parquet"]}


def find_files(
    entries: Sequence[str], *, pattern: Sequence[str] = (), exclude: Sequence[str] = (), setting: str = "data.files"
) -> list[Path]:
    """Returns the files that the entries name, sorted and each once.

    Args:
        entries: files, folders (read recursively) or globs.
        pattern: name patterns, one of which a file in a folder or glob must match. Empty: every file matches.
        exclude: name patterns. A file is skipped if a part of its path matches one.
        setting: beginning of error messages.

    Raises:
        ConfigError: an entry names no file.
    """

    def wanted(path: Path) -> bool:
        if pattern and not any(fnmatch.fnmatch(path.name, one) for one in pattern):
            return False
        return not any(fnmatch.fnmatch(part, one) for part in path.parts for one in exclude)

    found: set[Path] = set()
    for entry in entries:
        path = Path(entry).expanduser()
        if path.is_dir():
            candidates = [p for p in path.rglob("*") if p.is_file()]
            kept = [p for p in candidates if wanted(p.relative_to(path))]
        elif path.is_file():
            kept = candidates = [path]
        else:
            candidates = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]
            kept = [p for p in candidates if wanted(p)]
        if not kept:
            if candidates:
                why = f"{len(candidates)} files there, none passes data.pattern and data.exclude"
            elif path.is_dir():
                why = "a folder without files"
            else:
                why = "a device or a pipe, expected a file with text" if path.exists() else "no such file"
            raise ConfigError(f"{setting}: {entry}: {why}")
        found.update(kept)
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its fields by column, and `where` it is, which begins error messages ("chat.jsonl:12")."""

    fields: dict[str, Any]
    where: str


class JsonLines:
    """A JSONL file whose rows are parsed on request. It keeps 16 bytes per row in memory."""

    def __init__(self, path: Path):
        self.path = path
        self._starts, self._lines = array("q"), array("q")
        digest, start = hashlib.sha256(), 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                digest.update(line)
                if line.strip():
                    self._starts.append(start)
                    self._lines.append(number)
                start += len(line)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        where = f"{self.path}:{self._lines[index]}"
        with open(self.path, "rb") as file:
            file.seek(self._starts[index])
            line = file.readline().rstrip(b"\r\n")
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            hint = ""
            if self._lines[index] == 1 and line.lstrip().startswith(b"["):
                hint = " The file looks like one JSON array: write one object a line."
            why = (
                f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else first_line(error)
            )
            raise ConfigError(f"{where}: not valid JSON: {why}.{hint}") from None
        if not isinstance(fields, dict):
            hint = " Write one object a line." if isinstance(fields, list) else ""
            raise ConfigError(f"{where}: expected a JSON object, got a {type(fields).__name__}.{hint}")
        return Row(fields, where)


class ParquetRows:
    """A parquet file: read into memory, or through the memory-mapped copy in the cache of `datasets`."""

    def __init__(self, path: Path, *, lazy: bool):
        self.path = path
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        self.fingerprint = digest.hexdigest()
        self._rows: Any = _read_parquet(path, lazy)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        # A parquet column of messages has every key in every message, with None for empty ones.
        return Row(_without_none(self._rows[index]), f"{self.path}, row {index + 1}")


def _read_parquet(path: Path, lazy: bool) -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise ConfigError(
            f"{path}: parquet needs the package datasets. Install it with `pip install datasets`."
        ) from None
    quiet = rank_and_size()[0] != 0 and not datasets.utils.are_progress_bars_disabled()
    if quiet:
        datasets.utils.disable_progress_bars()
    try:
        # These read local files only. `load_dataset` would access a hub.
        if lazy:
            return datasets.Dataset.from_parquet(str(path))
        with tempfile.TemporaryDirectory() as cache:  # for a lock file, which it leaves behind
            return list(datasets.Dataset.from_parquet(str(path), cache_dir=cache, streaming=True))
    except Exception as error:  # pyarrow's, or the type that datasets makes of it
        raise ConfigError(f"{path}: cannot be read as parquet: {first_line(error.__cause__ or error)}.") from None
    finally:
        if quiet:
            datasets.utils.enable_progress_bars()


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


class Rows(Sequence[Row]):
    """The rows of several files, one file after another. A row is read on request."""

    def __init__(self, files: Sequence[JsonLines | ParquetRows]):
        self._files, self.num_files = files, len(files)
        self.num_bytes = sum(file.path.stat().st_size for file in files)
        self._ends = list(itertools.accumulate(len(file) for file in files))
        self.fingerprint = " ".join(file.fingerprint for file in files)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._ends, index)
        return self._files[number][index - (self._ends[number - 1] if number else 0)]

    def __iter__(self) -> Iterator[Row]:
        return itertools.chain.from_iterable((file[i] for i in range(len(file))) for file in self._files)


def open_rows(
    files: Sequence[str],
    format: RowFormat,
    *,
    pattern: Sequence[str] = (),
    exclude: Sequence[str] = (),
    setting: str = "data.files",
    lazy: bool = True,
) -> Rows:
    """Finds the files and counts their rows. Blank lines of JSONL are not rows.

    Args:
        files: files, folders (read recursively) or globs.
        format: "jsonl" or "parquet".
        pattern, exclude: see `find_files`. Without a pattern, the format's usual endings.
        setting: beginning of errors about `files`.
        lazy: whether to keep rows on disk. For parquet, `datasets` then writes a memory-mapped copy into its cache
            (HF_DATASETS_CACHE).

    Raises:
        ConfigError: an entry names no file, a file cannot be read, or there is no row. A wrong row raises when it is
            read, with its file and line. On this rank only, so call it inside of `run_on_all_ranks`.
    """
    opened: list[JsonLines | ParquetRows] = []
    for path in find_files(files, pattern=pattern or PATTERNS[format], exclude=exclude, setting=setting):
        try:
            opened.append(JsonLines(path) if format == "jsonl" else ParquetRows(path, lazy=lazy))
        except OSError as error:
            raise ConfigError(f"{setting}: {path}: {error.strerror or error}") from None
    rows = Rows(opened)
    if len(rows) == 0:
        raise ConfigError(f"{setting}: {len(opened)} files have no rows.")
    return rows


def read_rows(files: Sequence[str], format: RowFormat, *, setting: str = "data.files") -> list[Row]:
    """Reads all rows of local files into memory. Arguments and errors are those of `open_rows`."""
    return list(open_rows(files, format, setting=setting, lazy=False))
