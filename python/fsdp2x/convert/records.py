"""What a file of ``torch.save`` holds, without its bytes: tensors become sources that point into the file.

    a file, or a run of bytes in one | zip: data.pkl, data/0, data/1, ... , directory |

Nothing of the file is executed and none of its classes is looked up: ``data.pkl`` goes through an unpickler that turns
tensors into sources, DTensors into `Shard` records and everything else of torch.distributed into bare attributes, which
also reads what other versions of torch wrote. Any other name is refused.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp2x.checkpoint.agree import CheckpointError
from fsdp2x.hf.sources import FileTensor, LoadedTensor, Source

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
_LOCAL_HEADER_BYTES = 30


class OpenFiles:
    """Files that stay open while sources point into them; a context manager."""

    def __init__(self) -> None:
        self.read_bytes = [0]
        self._fds: dict[Path, int] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *exception) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def fd(self, path: Path) -> int:
        if path not in self._fds:
            self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[path]


@dataclass
class Placement:
    """``kind`` is the name of torch's class; ``dim`` and ``split_factor`` where it has them."""

    kind: str
    dim: int = 0
    split_factor: int = 1


@dataclass
class Shard:
    """A DTensor of one rank: its local part, the global shape, and where the rank is on each axis of the mesh."""

    local: Source
    shape: tuple[int, ...]
    placements: list[Placement]
    coordinate: list[int]

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype


def read_records(files: OpenFiles, path: Path, offset: int = 0, length: int | None = None) -> Any:
    """The object saved in ``length`` bytes at ``offset`` of a file, with records in place of its tensors.

    Raises:
        CheckpointError: not a whole file of ``torch.save``, or it holds what is neither a tensor nor plain data.
    """
    try:
        fd = files.fd(path)
        if length is None:
            length = os.fstat(fd).st_size - offset
        run = _Run(fd, offset, length)
        with zipfile.ZipFile(run) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            order = archive.read(members["byteorder"]) if "byteorder" in members else b"little"
            if order != b"little":
                raise CheckpointError(f"byte order {order!r} is not supported")
            places = {name: _place(fd, offset, info) for name, info in members.items() if name.startswith("data/")}
            return _Records(io.BytesIO(archive.read(members["data.pkl"])), fd, path, places, files.read_bytes).load()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    except Exception as error:
        raise CheckpointError(
            f"{path}: damaged or not written by torch.save in its zip format ({type(error).__name__}: {error})"
        ) from None


def _place(fd: int, base: int, info: zipfile.ZipInfo) -> tuple[int, int]:
    """Offset in the file and length of a member's bytes."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{info.filename} is compressed, which is not supported")
    head = os.pread(fd, _LOCAL_HEADER_BYTES, base + info.header_offset)
    if head[:4] != b"PK\x03\x04":
        raise CheckpointError(f"{info.filename} does not lie where the directory says")
    skip = _LOCAL_HEADER_BYTES + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    return base + info.header_offset + skip, info.file_size


class _Run(io.RawIOBase):
    """A run of bytes of an open file, as a file."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd, self._offset, self._length, self._position = fd, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        return self._position

    def readinto(self, buffer) -> int:
        wanted = max(0, min(len(buffer), self._length - self._position))
        data = os.pread(self._fd, wanted, self._offset + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class _Strided(Source):
    """A tensor whose elements do not lie in row-major order: its storage is read whole."""

    def __init__(self, storage: Source, shape: tuple[int, ...], stride: tuple[int, ...], first: int) -> None:
        self.shape, self.dtype = shape, storage.dtype
        self._storage, self._stride, self._first = storage, stride, first

    def read(self, start, out: torch.Tensor) -> None:
        whole = self._storage.whole().as_strided(self.shape, self._stride, self._first)
        LoadedTensor(whole).read(start, out)


class _Named:
    """An object of a class of torch.distributed: the arguments it was made with, and its attributes."""

    def __new__(cls, *args):
        self = super().__new__(cls)
        self.args = args
        return self

    def __setstate__(self, state) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            self.__dict__.update(part or {})


class _Records(pickle.Unpickler):
    def __init__(self, file, fd: int, path: Path, places: dict[str, tuple[int, int]], counter: list[int]) -> None:
        super().__init__(file)
        self._fd, self._path, self._places, self._counter = fd, path, places, counter
        self._made = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch", "Size"): lambda sizes=(): tuple(sizes),
            ("torch", "device"): lambda *args: args,
            ("torch.serialization", "_get_layout"): lambda name: name,
            ("torch._utils", "_rebuild_tensor"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._retyped,
            ("torch._utils", "_rebuild_parameter"): lambda data, *rest: data,
            ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *rest: data,
            ("torch._utils", "_rebuild_wrapper_subclass"): self._wrapper,
            ("torch._tensor", "_rebuild_from_type_v2"): self._of_type,
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._made:
            return self._made[module, name]
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module.startswith("torch.distributed.") or (module, name) == ("torch.nn.parameter", "Parameter"):
            return type(name, (_Named,), {})
        raise CheckpointError(f"it refers to {module}.{name}, which a model's state dict does not need")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str, int]:
        kind, dtype, key, _, numel = pid
        if kind != "storage":
            raise CheckpointError(f"it holds a persistent reference of kind {kind!r}")
        return dtype, key, numel

    def _tensor(self, storage: tuple, first: int, shape: tuple, stride: tuple, *rest) -> Source:
        dtype, key, _ = storage
        return self._retyped(storage, first, shape, stride, False, None, dtype)

    def _retyped(self, storage: tuple, first: int, shape: tuple, stride: tuple, _grad, _hooks, dtype, *rest) -> Source:
        offset, num_bytes = self._places[f"data/{storage[1]}"]
        shape, stride = tuple(shape), tuple(stride)
        last = first + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if 0 not in shape and (last + 1) * dtype.itemsize > num_bytes:
            raise CheckpointError(f"a tensor of shape {list(shape)} exceeds its storage of {num_bytes} bytes")
        if _is_row_major(shape, stride):
            begin = offset + first * dtype.itemsize
            return FileTensor(self._fd, str(self._path), begin, shape, dtype, self._counter)
        flat = (num_bytes // dtype.itemsize,)
        return _Strided(FileTensor(self._fd, str(self._path), offset, flat, dtype, self._counter), shape, stride, first)

    def _wrapper(self, cls: type, dtype: torch.dtype, shape: tuple, *rest) -> _Named:
        made = cls()
        made.shape = tuple(shape)
        return made

    def _of_type(self, function, cls: type, args: tuple, state: Any) -> Any:
        made = function(*args)
        if not isinstance(made, _Named):
            return made  # attributes that somebody put on a plain tensor
        if cls.__name__ != "DTensor":
            raise CheckpointError(f"it holds a {cls.__name__}, which is not supported")
        # A tuple where the class has slots.
        parts = [part for part in (state if isinstance(state, tuple) else (state,)) if part]
        state = {name: value for part in parts for name, value in part.items()}
        spec = state["_spec"]
        coordinate = spec.mesh.__dict__.get("_coordinate_on_dim")
        if coordinate is None:
            raise CheckpointError("it holds a DTensor that does not say where its rank is on the mesh")
        return Shard(state["_local_tensor"], made.shape, [_placement(one) for one in spec.placements], list(coordinate))


def _placement(named: _Named) -> Placement:
    attributes = named.__dict__
    dim = attributes.get("dim", named.args[0] if named.args and isinstance(named.args[0], int) else 0)
    return Placement(type(named).__name__, dim, attributes.get("split_factor", 1))


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, stride, expected, strict=True))
