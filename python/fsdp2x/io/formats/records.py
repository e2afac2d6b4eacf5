"""Reads a file of ``torch.save`` without its bytes: tensors become sources that point into the file.

    a file, or a run of bytes in one | zip: data.pkl, data/0, data/1, ... , directory |

It executes no code of the file and looks up none of its classes. The unpickler turns tensors in ``data.pkl`` into
sources, DTensors into `Shard` records, and everything else of torch.distributed into bare attributes. So it also reads
files of other torch versions. Any other name raises, or becomes an `OpaqueObject`.

It compares directory, headers and pickle: a record ends where the file ends or another begins, and a tensor is inside
its record."""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp2x.base.failures import CheckpointError, CorruptFile, first_line
from fsdp2x.io.formats.safe_files import OpenFiles, check_plain
from fsdp2x.io.formats.tensors import Computed, FileTensor, Source, is_shape

STORAGES = {  # by name of torch's class
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
_ENCRYPTED, _HAS_TAIL = 1, 8


@dataclass
class Placement:
    """``kind`` is the name of torch's class. ``dim`` and ``split_factor`` are set if it has them."""

    kind: str
    dim: int = 0
    split_factor: int = 1


@dataclass
class Shard:
    """A DTensor of one rank: its local part, the global shape, and the rank's position on each axis of the mesh."""

    local: Source
    shape: tuple[int, ...]
    placements: list[Placement]
    coordinate: list[int]

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    __setstate__ = Source.__setstate__


class OpaqueObject:
    """An object whose class was not looked up: its arguments and attributes. Other operations on it are lost."""

    args: tuple
    state: Any = None
    shape: tuple[int, ...]  # if it is a tensor

    def __new__(cls, *args: Any, **keywords: Any) -> OpaqueObject:
        self = super().__new__(cls)
        self.args = args
        return self

    def __init__(self, *args: Any, **keywords: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update((name, value) for name, value in part.items() if isinstance(name, str))

    def get(self, name: str) -> Any:
        return self.__dict__.get(name)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def _take(self, *values: Any) -> None:
        pass

    append = extend = add = update = _take


def read_records(
    files: OpenFiles,
    path: Path,
    offset: int = 0,
    length: int | None = None,
    *,
    opaque: bool = False,
) -> Any:
    """Returns the object saved in ``length`` bytes at ``offset`` of a file, with records in place of its tensors.

    Args:
        opaque: whether objects of classes that a state dict does not need become `OpaqueObject` instead of raising.
    """
    if length is None:
        length = files.num_bytes(path) - offset
    try:
        with zipfile.ZipFile(_Run(files, path, offset, length)) as archive:
            members, places = _places(files, path, offset, archive)
            order = archive.read(members["byteorder"]) if "byteorder" in members else b"little"
            if order != b"little":
                raise CheckpointError(f"byte order {order!r} is not supported")
            pickled = archive.read(members["data.pkl"])
        found = _Records(io.BytesIO(pickled), files, path, places, opaque).load()
    except CorruptFile as error:
        raise CorruptFile(f"{path}: damaged, {error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    except Exception as error:
        raise CorruptFile(
            f"{path}: damaged or not written by torch.save in its zip format "
            f"({type(error).__name__}: {first_line(error)})"
        ) from None
    check_plain(found, str(path))
    return found


def _places(
    files: OpenFiles, path: Path, base: int, archive: zipfile.ZipFile
) -> tuple[dict[str, zipfile.ZipInfo], dict]:
    """Returns records of an archive by name without the folder, and (offset in the file, bytes) of each.

    Raises `CorruptFile` if they are not as torch writes them: plain, in one folder, each in a separate place.
    """
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    members = {info.filename.partition("/")[2]: info for info in infos}
    if len(members) != len(infos) or len({info.filename.partition("/")[0] for info in infos}) > 1:
        raise CorruptFile("it mixes records of several archives")
    data = {}
    followers = [info.header_offset for info in infos[1:]] + [archive.start_dir]
    if infos and infos[0].header_offset != 0:
        raise CorruptFile("it does not begin with its first record")
    for name, info, follower in zip(members, infos, followers, strict=True):
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
            raise CorruptFile(f"{info.filename} is compressed or encrypted, which torch.save never does. Save it again")
        header = files.read(path, base + info.header_offset, _LOCAL_HEADER_BYTES + len(info.filename.encode()))
        if header[:4] != b"PK\x03\x04" or header[_LOCAL_HEADER_BYTES:] != info.filename.encode():
            raise CorruptFile(f"{info.filename} is not at the offset in the archive's directory")
        skip = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = info.header_offset + _LOCAL_HEADER_BYTES + skip
        end = start + info.file_size
        tail = b"" if end >= follower else files.read(path, base + end, min(follower - end, 25))
        if end > follower or info.file_size != info.compress_size or tail not in _tails(info):
            raise CorruptFile(f"{info.filename} does not end where the next record begins")
        data[name] = base + start, info.file_size
    return members, data


def _tails(info: zipfile.ZipInfo) -> list[bytes]:
    """Returns what may follow the data of a record: its checksum and sizes, if its flags say so."""
    if not info.flag_bits & _HAS_TAIL:
        return [b""]
    sizes = [struct.pack("<QQ", info.file_size, info.file_size)]
    sizes += [struct.pack("<II", info.file_size, info.file_size)] if info.file_size < 2**32 else []
    return [b"PK\x07\x08" + struct.pack("<I", info.CRC) + one for one in sizes]


class _Run(io.RawIOBase):
    """A run of bytes of an open file, as a file."""

    def __init__(self, files: OpenFiles, path: Path, offset: int, length: int) -> None:
        self._files, self._path, self._offset, self._length, self._position = files, path, offset, length, 0

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
        data = self._files.read(self._path, self._offset + self._position, wanted)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class _Records(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, files: OpenFiles, path: Path, places: dict[str, tuple[int, int]], opaque: bool
    ) -> None:
        super().__init__(file)
        self._files, self._path, self._places, self._opaque = files, path, places, opaque
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
        if module in ("torch", "torch.storage") and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        known = module.startswith("torch.distributed.") or (module, name) == ("torch.nn.parameter", "Parameter")
        if known or self._opaque:
            return type(name, (OpaqueObject,), {"__module__": module})
        raise CheckpointError(f"it refers to {module}.{name}, which a model's state dict does not need")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, int, int]:
        """Returns dtype of a storage, offset in the file, and bytes."""
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise CorruptFile(f"it holds a persistent reference of kind {kind!r}")
        offset, num_bytes = self._places.get(f"data/{key}", (0, -1))
        if type(numel) is not int or numel * dtype.itemsize != num_bytes:
            raise CorruptFile(f"its storage {key} has {num_bytes} bytes, but should have {numel} elements of {dtype}")
        return dtype, offset, num_bytes

    def _tensor(
        self, storage: tuple, first: int, shape: tuple, stride: tuple, grad=False, hooks=None, more=None
    ) -> Source:
        return self._retyped(storage, first, shape, stride, grad, hooks, storage[0], more)

    def _retyped(
        self, storage: tuple, first: int, shape: tuple, stride: tuple, _grad, _hooks, dtype: torch.dtype, more=None
    ) -> Source:
        _, offset, num_bytes = storage
        shape, stride = tuple(shape), tuple(stride)
        fits = is_shape(shape) and len(shape) == len(stride)
        if not fits or any(type(one) is not int or one < 0 for one in (first, *stride)):
            raise CorruptFile(f"a tensor has shape {shape}, strides {stride} and first element {first}")
        if more:
            raise CheckpointError(f"it holds a tensor with {more}, which is not supported")
        last = first + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if 0 not in shape and (last + 1) * dtype.itemsize > num_bytes:
            raise CorruptFile(f"a tensor of shape {list(shape)} exceeds its storage of {num_bytes} bytes")
        if is_row_major(shape, stride):
            begin = offset + first * dtype.itemsize
            return FileTensor(self._files, self._path, begin, shape, dtype)
        flat = FileTensor(self._files, self._path, offset, (num_bytes // dtype.itemsize,), dtype)
        return Computed(shape, dtype, lambda: flat.whole().as_strided(shape, stride, first))

    def _wrapper(self, cls: type, dtype: torch.dtype, shape: tuple, *rest) -> OpaqueObject:
        made = cls()
        made.shape = tuple(shape)
        return made

    def _of_type(self, function, cls: type, args: tuple, state: Any) -> Any:
        made = function(*args)
        if not isinstance(made, OpaqueObject):
            return made  # attributes that users set on a plain tensor
        if cls.__name__ != "DTensor":
            if self._opaque:
                return made
            raise CheckpointError(f"it holds a {cls.__name__}, which is not supported")
        # A tuple if the class has slots.
        parts = [part for part in (state if isinstance(state, tuple) else (state,)) if part]
        state = {name: value for part in parts for name, value in part.items()}
        spec = state["_spec"]
        coordinate = spec.mesh.__dict__.get("_coordinate_on_dim")
        if coordinate is None:
            raise CheckpointError("it holds a DTensor without its rank's position on the mesh")
        return Shard(state["_local_tensor"], made.shape, [_placement(one) for one in spec.placements], list(coordinate))


def _placement(named: OpaqueObject) -> Placement:
    attributes = named.__dict__
    dim = attributes.get("dim", named.args[0] if named.args and isinstance(named.args[0], int) else 0)
    return Placement(type(named).__name__, dim, attributes.get("split_factor", 1))


def is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, stride, expected, strict=True))


def open_archive(files: OpenFiles, path: Path, trusted: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the mapping in a file twice: as torch loads it, mapped from the file, and with sources for tensors."""
    records = read_records(files, path, opaque=True)
    values = _load(path, str(path), trusted, mmap=True)
    for one in (values, records):
        if not isinstance(one, dict):
            raise CorruptFile(f"{path}: expected a mapping of parts, got {type(one).__name__}")
    return values, records


def load_run(
    files: OpenFiles,
    path: Path,
    offset: int,
    num_bytes: int,
    name: str,
    trusted: bool,
) -> Any:
    """Returns the value in a run of bytes of a file. Errors name the entry ``name``. Raises as `open_archive`."""
    read_records(files, path, offset, num_bytes, opaque=True)
    return _load(io.BytesIO(files.read(path, offset, num_bytes)), f"{path}: {name}", trusted)


def detached(tree: Any) -> Any:
    """Copies the tree, with tensors in separate memory in place of those that are mapped from a file."""
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
                f"{where}: reading it would execute {call}. Pass trusted=True only if you trust its author."
            ) from None
        raise CorruptFile(f"{where}: damaged, its contents cannot be read: {first_line(error)}") from None
    check_plain(loaded, where)
    return loaded


def _why_refused(error: Exception) -> str | None:
    """Returns what `torch.load(weights_only=True)` would have to call, or None for another kind of error."""
    text = str(error)
    if "weights_only" not in text and "weights only" not in text.lower():
        return None
    named = re.search(r"GLOBAL ([\w.]+)", text)
    return named.group(1) if named else "code"


def box_of(
    shape: Sequence[int], sizes: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns start and shape of the part that the rank at ``coordinate`` of a mesh of ``sizes`` has.

    A dim is cut into chunks of ceil(d/W), axis after axis. A later axis cut a strided shard first, as with FSDP over
    tensor parallelism. Raises `CheckpointError` for other strided shards, of blocks of a fused matrix.
    """
    start, box = [0] * len(shape), list(shape)
    axes = [axis for axis, one in enumerate(placements) if one.kind != "_StridedShard"]
    axes += [axis for axis, one in reversed(list(enumerate(placements))) if one.kind == "_StridedShard"]
    for axis in axes:
        placement = placements[axis]
        if placement.kind == "Replicate":
            continue
        if placement.kind not in ("Shard", "_StridedShard"):
            raise CheckpointError(f"placement {placement.kind} is not supported")
        later = zip(placements[axis + 1 :], sizes[axis + 1 :], strict=True)
        cuts = math.prod(size for one, size in later if one.kind != "Replicate" and one.dim == placement.dim)
        if placement.kind == "_StridedShard" and placement.split_factor != cuts:
            raise CheckpointError(
                f"a strided shard of dim {placement.dim} with split factor {placement.split_factor}, over {cuts} later "
                "cuts, is not supported: tensor parallelism cut each block of a fused matrix"
            )
        dim = placement.dim
        chunk = -(-box[dim] // sizes[axis])
        first = min(chunk * coordinate[axis], box[dim])
        start[dim] += first
        box[dim] = min(chunk, box[dim] - first)
    return tuple(start), tuple(box)
