"""Finds and opens the weight files of a HuggingFace folder: safetensors or torch's pickles, one or several.

``Checkpoint`` owns the open files. Reading executes no code, and entries of an index or header are compared with the
files. Every byte of a safetensors file belongs to exactly one tensor:

    header bytes (8) | header (JSON) | tensors, without gaps
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

from fsdp2x.base.failures import CheckpointError, CorruptFile, first_line, reworded
from fsdp2x.io.formats.records import read_records
from fsdp2x.io.formats.safe_files import OpenFiles, how_to_download, parse_json, read_json
from fsdp2x.io.formats.tensors import FileTensor, LoadedTensor, Source, is_shape

logger = logging.getLogger("fsdp2x")

# File names in search order. An index names its files.
_WEIGHTS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "adapter_model.safetensors",
    "adapter_model.bin",
)


def weight_files(path: str | Path) -> list[Path]:
    """Returns the weight files of a folder, or ``path`` itself if it is one."""
    path = Path(path).expanduser()
    if path.is_file():
        if not path.name.endswith(".index.json"):
            return [path]
        files = list(dict.fromkeys(path.parent / name for name in _weight_map(path).values()))
        missing = [file.name[:200] for file in files if not os.path.isfile(file)]  # also for impossible names
        if missing:
            raise CheckpointError(f"{path}: names files that are missing: {', '.join(missing)}")
        return files
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder or file.{how_to_download(path)}")
    for name in _WEIGHTS:
        if (path / name).is_file():
            return weight_files(path / name)
    raise CheckpointError(f"{path}: holds none of {', '.join(_WEIGHTS)}")


def _weight_map(index: Path) -> dict[str, str]:
    """Returns name of a tensor -> name of its file."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFile(f"{index}: not an index of weight files: no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CorruptFile(f"{index}: {name} would be in {str(file)[:200]!r}, which is not a file of the folder")
    return weight_map


class Checkpoint:
    """The tensors of some folders by name. A context manager that closes the files.

    ``folders`` are those of the files, in the given order. Raises as ``weight_files`` does, and for files that are
    damaged, contain a name twice, or lack tensors of their index.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.files = [file for path in paths for file in weight_files(path)]
        self.folders = list(dict.fromkeys(file.parent for file in self.files))
        self.tensors: dict[str, Source] = {}
        self.names_in: dict[Path, list[str]] = {}
        self._open = OpenFiles()
        try:
            for file in self.files:
                found = read_safetensors(self._open, file) if file.suffix == ".safetensors" else self._pickle(file)
                twice = next((name for name in found if name in self.tensors), None)
                if twice is not None:
                    raise CheckpointError(f"{file}: holds {twice!r}, which another file also holds")
                self.tensors.update(found)
                self.names_in[file] = list(found)
            for path in paths:
                self._compare_with_index(Path(path).expanduser())
        except BaseException:
            self.close()
            raise

    @property
    def is_pickled(self) -> bool:
        return any(file.suffix != ".safetensors" for file in self.files)

    @property
    def read_bytes(self) -> int:
        """Bytes of tensors that were read from the files so far."""
        return self._open.read_bytes

    def close(self) -> None:
        """Closes the files. Sources must not be read afterwards."""
        self._open.close()
        self.tensors = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _compare_with_index(self, path: Path) -> None:
        """Raises `CorruptFile` if files lack tensors of their index."""
        index = path if path.is_file() else index_of(path)
        if index is None or not index.name.endswith(".index.json"):
            return
        said: dict[Path, set[str]] = {}
        for name, file in _weight_map(index).items():
            said.setdefault(index.parent / file, set()).add(name)
        for file, names in said.items():
            lost = sorted(names - set(self.names_in[file]))
            if lost:
                raise CorruptFile(
                    f"{file}: damaged, it lacks {len(lost)} tensors that {index.name} lists for it: "
                    f"{', '.join(lost[:5])}"
                )

    def _pickle(self, file: Path) -> dict[str, Source]:
        found = read_records(self._open, file) if zipfile.is_zipfile(file) else _load_old(file)
        if not isinstance(found, dict):
            raise CheckpointError(f"{file}: expected a dict of tensors, got {type(found).__name__}")
        for name, one in found.items():
            if not isinstance(name, str) or not isinstance(one, Source):
                raise CheckpointError(
                    f"{file}: expected a dict of tensors, got a {type(one).__name__} under {str(name)[:200]!r}"
                )
        return found


def index_of(folder: Path) -> Path | None:
    """Returns the index that names the weight files of a folder, if there is one."""
    first = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    return first if first is not None and first.name.endswith(".index.json") else None


def _load_old(file: Path) -> object:
    """Reads torch's format from before archives completely, and returns sources for its tensors."""
    logger.warning("fsdp2x: %s has torch's old format, which cannot be read in parts. It is read completely.", file)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{file}: cannot be read with weights_only ({type(error).__name__}: {first_line(error)})"
        ) from None
    if not isinstance(state, dict):
        return state
    return {name: LoadedTensor(one.detach()) if _is_plain(one) else one for name, one in state.items()}


def _is_plain(one: object) -> bool:
    return isinstance(one, torch.Tensor) and one.layout == torch.strided and one.device.type == "cpu"


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
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
}


def read_safetensors(files: OpenFiles, path: Path) -> dict[str, FileTensor]:
    """Returns the tensors of a file by name. The safetensors library checks that the header fits the file."""
    from safetensors import SafetensorError, safe_open

    files.num_bytes(path)  # raises if it is no regular file, which the library might wait for
    with reworded(CorruptFile, lambda error: f"{path}: not a complete safetensors file: {error}", SafetensorError):
        safe_open(path, framework="pt").__exit__(None, None, None)
    begin = 8 + int.from_bytes(files.read(path, 0, 8), "little")
    header = parse_json(files.read(path, 8, begin - 8), f"{path}: the header")
    header.pop("__metadata__", None)
    found: dict[str, FileTensor] = {}
    for name, entry in header.items():
        kind, shape, (start, _) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not is_shape(shape):
            raise CorruptFile(f"{path}: {name!r} has the shape {shape}"[:1000])
        if kind not in DTYPES:
            raise CheckpointError(
                f"{path}: {name!r} has type {kind}, which cannot be loaded. Known types are {', '.join(DTYPES)}."
            )
        found[name] = FileTensor(files, path, begin + start, tuple(shape), DTYPES[kind])
    return found
