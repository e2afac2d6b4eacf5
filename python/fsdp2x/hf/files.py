"""Finds and opens the weight files of a HuggingFace folder: safetensors or torch's pickles, one or several.

``Checkpoint`` owns the open files. Nothing that is read is executed: safetensors are checked by their own library,
pickles go through ``torch.load(weights_only=True)``, mapped into memory instead of read.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from fsdp2x.checkpoint.agree import CheckpointError
from fsdp2x.hf.sources import FileTensor, LoadedTensor, Source

logger = logging.getLogger("fsdp2x")

# In the order in which they are looked for; an index names its files.
_WEIGHTS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def weight_files(path: str | Path) -> list[Path]:
    """The weight files of a folder, or ``path`` itself when it is one.

    Raises:
        CheckpointError: there is none, or one that the index names is missing.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return _of_index(path) if path.name.endswith(".index.json") else [path]
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such folder or file; download a model of the hub first, for instance with "
            "huggingface_hub.snapshot_download"
        )
    for name in _WEIGHTS:
        if (path / name).is_file():
            return weight_files(path / name)
    raise CheckpointError(f"{path}: holds none of {', '.join(_WEIGHTS)}")


def _of_index(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = [index.parent / name for name in dict.fromkeys(weight_map.values())]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index}: not an index of weight files ({error!r})") from None
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{index}: names files that are missing: {', '.join(missing)}")
    return files


class Checkpoint:
    """The tensors of some folders, by name; a context manager that closes the files."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.files = [file for path in paths for file in weight_files(path)]
        self.tensors: dict[str, Source] = {}
        self.names_in: dict[Path, list[str]] = {}
        self._read_bytes = [0]
        self._fds: list[int] = []
        try:
            for file in self.files:
                found = self._safetensors(file) if file.suffix == ".safetensors" else _pickle(file)
                twice = next((name for name in found if name in self.tensors), None)
                if twice is not None:
                    raise CheckpointError(f"{file}: holds {twice!r}, which another of the files holds too")
                self.tensors.update(found)
                self.names_in[file] = list(found)
        except BaseException:
            self.close()
            raise

    @property
    def is_pickled(self) -> bool:
        return any(file.suffix != ".safetensors" for file in self.files)

    @property
    def read_bytes(self) -> int:
        """Bytes of tensors that were read from safetensors files so far."""
        return self._read_bytes[0]

    def close(self) -> None:
        """Closes the files; sources must not be read any more."""
        for fd in self._fds:
            os.close(fd)
        self._fds, self.tensors = [], {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _safetensors(self, file: Path) -> dict[str, Source]:
        from safetensors import SafetensorError, safe_open

        try:
            # The library checks the header: sizes, overlaps, the length of the file.
            with safe_open(str(file), framework="pt"):
                pass
        except SafetensorError as error:
            raise CheckpointError(f"{file}: not a whole safetensors file ({error})") from None
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._fds.append(fd)
        header_bytes = int.from_bytes(os.pread(fd, 8, 0), "little")
        header = json.loads(os.pread(fd, header_bytes, 8))
        header.pop("__metadata__", None)
        found: dict[str, Source] = {}
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(
                    f"{file}: {name!r} is of type {entry['dtype']}, which cannot be loaded; known are "
                    f"{', '.join(DTYPES)}"
                )
            offset = 8 + header_bytes + entry["data_offsets"][0]
            dtype = DTYPES[entry["dtype"]]
            found[name] = FileTensor(fd, str(file), offset, tuple(entry["shape"]), dtype, self._read_bytes)
        return found


def _pickle(file: Path) -> dict[str, Source]:
    try:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            logger.warning("fsdp2x: %s has torch's old format, which cannot be mapped: it is read whole", file)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{file}: cannot be read with weights_only ({type(error).__name__}: {reason})") from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(f"{file}: expected a dict of tensors, got {type(state).__name__}")
    return {name: LoadedTensor(tensor.detach()) for name, tensor in state.items()}
