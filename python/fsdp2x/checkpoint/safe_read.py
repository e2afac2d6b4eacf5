"""Reading a DCP directory without executing anything it contains, and naming the file when something is wrong.

torch's own reader unpickles `.metadata` with plain pickle, and its planner loads non-tensor entries with
`weights_only=False`: whoever can write a checkpoint could run code in whoever loads it. Here `.metadata` goes
through an unpickler with a list of allowed names, and every entry through `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from .agree import CheckpointError
from .values import first_line, why_refused

# What DCP writes into `.metadata`, by module and name.
_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
_PATH_CLASSES = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


class MetadataUnpickler(pickle.Unpickler):
    """Resolves only the names that DCP itself writes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module in ("pathlib", "pathlib._local") and name in _PATH_CLASSES:
            return PurePosixPath  # the folder it was written to: never used, and of any system
        raise CheckpointError(f"it refers to {module}.{name}, which no checkpoint needs")

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError("it holds a persistent reference, which no checkpoint needs")


def read_metadata(folder: Path) -> Metadata:
    """The DCP metadata of a checkpoint; raises `CheckpointError` naming the file."""
    path = folder / ".metadata"
    try:
        with open(path, "rb") as file:
            metadata = MetadataUnpickler(file).load()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except Exception as error:
        raise CheckpointError(f"{path}: not the metadata of a checkpoint: {error}") from None
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path}: not the metadata of a checkpoint: got {type(metadata).__name__}")
    for info in metadata.storage_data.values():
        name = info.relative_path
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
            raise CheckpointError(f"{path}: it points to the file {name!r}, which is not inside the checkpoint")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{path}: {name} was written through {info.transform_descriptors}, which is not supported"
            )
    return metadata


class SafeReader(FileSystemReader):
    """`FileSystemReader` that executes nothing and names the file that cannot be read."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.folder = Path(folder)

    def read_metadata(self) -> Metadata:  # no kwargs: DCP then does not look for per-rank metadata
        metadata = read_metadata(self.folder)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        # One file at a time through the parent, so that an error can be told together with its file.
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(LoadPlan(items), planner).wait()
            except OSError as error:
                raise CheckpointError(f"{self.folder / name}: {error.strerror or error}") from None
            except Exception as error:
                if (call := why_refused(error)) is not None:
                    raise CheckpointError(
                        f"{self.folder / name}: reading {items[0].storage_index.fqn} or a neighbour would execute "
                        f"{call}; pass trusted=True if you know who wrote it"
                    ) from None
                raise CheckpointError(
                    f"{self.folder / name}: damaged, its contents cannot be read: {first_line(error)}"
                ) from None
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


class SafePlanner(DefaultLoadPlanner):
    """`DefaultLoadPlanner` whose non-tensor entries are read with `weights_only=True`, unless they are `trusted`."""

    def __init__(self, *args: Any, trusted: bool = False, **keywords: Any):
        super().__init__(*args, **keywords)
        self.trusted = trusted

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=not self.trusted)
        name = read_item.dest_index.fqn
        if not self.flatten_state_dict:
            self.state_dict[name] = loaded
            return
        *outer, last = self.mappings[name]
        target: Any = self.original_state_dict
        for key in outer:
            target = target[key]
        target[last] = loaded
