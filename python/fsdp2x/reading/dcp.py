"""The entries of a directory of torch's distributed checkpoint (DCP), whoever wrote it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2x.errors import CorruptFile

from .archives import load_run
from .records import read_records
from .regular import OpenFiles
from .table import METADATA, read_table
from .tensors import FileTensor, Source
from .tiles import Tile, Tiled


@dataclass(frozen=True)
class Ours:
    """What is known of a directory that we wrote: its step, and the names that share their bytes."""

    step: int
    tied: Collection[Collection[str]]

    def labels(self, name: str, offsets: Sequence[int] | None) -> set[bytes]:
        """What the archive of an entry may be labelled as."""
        names = next((names for names in self.tied if name in names), {name})
        return {label(one, offsets, self.step) for one in names}


def label(name: str, offsets: Sequence[int] | None, step: int) -> bytes:
    """What an archive of ours says that it holds, so that one in another's place is found out; as long for any step."""
    return f"{step:020d} {name} {'' if offsets is None else list(offsets)}".encode()


class DcpTensors(Mapping):
    """Key -> source of every tensor in the directory. Its files are looked at when a source is asked for.

    ``table`` has the other entries, too. Raises as ``read_table``.

    Args:
        ours: None where others wrote it.
    """

    def __init__(self, folder: Path, files: OpenFiles, ours: Ours | None = None) -> None:
        self.folder, self._files, self._ours = folder, files, ours
        self.table = read_table(folder, None if ours is None else ours.tied)

    def __iter__(self) -> Iterator[str]:
        return iter(self.table.tensors)

    def __len__(self) -> int:
        return len(self.table.tensors)

    def __getitem__(self, key: str) -> Source:
        return self.part(key)

    def part(self, key: str, box: tuple | None = None) -> Source:
        """The source of a tensor; with a box (start, sizes), only what is inside of it is looked at and can be read."""
        entry = self.table.tensors[key]
        tiles = []
        for offsets, sizes, run in entry.chunks:
            if box is not None and not _meet(box, (offsets, sizes)):
                continue
            path = self.folder / run.file
            labels = None if self._ours is None else self._ours.labels(key, offsets)
            # What stands for an object in an archive of ours is no tensor: damaged, whatever it is.
            inert = self._ours is not None
            found = read_records(self._files, path, run.offset, run.num_bytes, inert=inert, labels=labels)
            if not isinstance(found, Source) or (found.shape, found.dtype) != (sizes, entry.dtype):
                got = f"{list(found.shape)} of {found.dtype}" if isinstance(found, Source) else type(found).__name__
                raise CorruptFile(
                    f"{path}: damaged, it holds {got} where {METADATA} describes a part of {key}, {list(sizes)} of "
                    f"{entry.dtype}"
                )
            if self._ours is not None and not (isinstance(found, FileTensor) and found.is_whole):
                raise CorruptFile(f"{path}: damaged, {key} at {list(offsets)} is not all of its record")
            tiles.append(Tile(offsets, found))
        return Tiled(entry.shape, entry.dtype, tiles)

    def value(self, key: str, trusted: bool = False) -> Any:
        """An entry that is no tensor."""
        run = self.table.objects[key]
        labels = None if self._ours is None else self._ours.labels(key, None)
        return load_run(self._files, self.folder / run.file, run.offset, run.num_bytes, key, trusted, labels)


def _meet(one: tuple, other: tuple) -> bool:
    (start, sizes), (first, more) = one, other
    return all(a < b + m and b < a + n for a, n, b, m in zip(start, sizes, first, more, strict=True))
