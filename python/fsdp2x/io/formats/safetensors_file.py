"""The header of a safetensors file, compared with the file: every byte of it belongs to exactly one tensor.

header bytes (8) | header (JSON) | tensors, without gaps
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from fsdp2x.base.errors import CheckpointError, CorruptFile
from fsdp2x.io.formats.safe_files import OpenFiles, parse_json
from fsdp2x.io.formats.tensors import FileTensor, is_shape

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
MOST_HEADER_BYTES = 100_000_000


def read_safetensors(files: OpenFiles, path: Path) -> dict[str, FileTensor]:
    """The tensors of a file by name.

    Raises:
        CorruptFile: the header and the file contradict each other.
        CheckpointError: a file that cannot be opened, or a dtype that cannot be loaded.
    """
    num_bytes = files.num_bytes(path)
    header_bytes = int.from_bytes(files.read(path, 0, 8), "little")
    if num_bytes < 8 or header_bytes > min(num_bytes - 8, MOST_HEADER_BYTES):
        raise CorruptFile(f"{path}: not a whole safetensors file: {num_bytes} bytes, a header of {header_bytes}")
    header = parse_json(files.read(path, 8, header_bytes), f"{path}: the header")
    header.pop("__metadata__", None)
    begin = 8 + header_bytes
    found: dict[str, FileTensor] = {}
    ends: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        dtype, shape, start, end = _entry(entry, f"{path}: {name!r}"[:1000])
        found[name] = FileTensor(files, path, begin + start, shape, dtype)
        ends.append((start, end, name))
    reached = 0
    for start, end, name in sorted(ends):
        if start != reached:
            raise CorruptFile(f"{path}: damaged, {name} begins at {start}, the tensor before it ends at {reached}")
        reached = end
    if begin + reached != num_bytes:
        raise CorruptFile(
            f"{path}: not a whole safetensors file: {num_bytes} bytes, its tensors end at {begin + reached}"
        )
    return found


def _entry(entry: Any, what: str) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Dtype, shape, first and last byte of a tensor."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CorruptFile(f"{what} is not described by dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not is_shape(shape) or not isinstance(offsets, list) or not all(type(n) is int and n >= 0 for n in offsets):
        raise CorruptFile(f"{what} has the shape {shape} and the place {offsets}"[:1000])
    if not isinstance(kind, str) or kind not in DTYPES:
        raise CheckpointError(f"{what} is of type {kind}, which cannot be loaded; known are {', '.join(DTYPES)}")
    num_bytes = math.prod(shape) * DTYPES[kind].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes:
        raise CorruptFile(f"{what} of shape {shape} and type {kind} has {num_bytes} bytes, its place is {offsets}")
    return DTYPES[kind], tuple(shape), *offsets
