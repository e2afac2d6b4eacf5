"""Reads and writes manifest.json: the form and world of a checkpoint, and its table of contents.

For each tensor, it has the place and the checksum of every chunk, by whichever rank it was written. So a load finds a
chunk that is damaged, of another step, or in the place of another one. Small files have one checksum each, and so has
the manifest. A save writes it last and a load reads it first.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeGuard, get_args

import torch

from fsdp2x.base.failures import CheckpointError, CorruptFile
from fsdp2x.io.checkpoint.directory import FULL_FILE, MANIFEST, MARKED, PARTS_FILE, write_file
from fsdp2x.io.formats.dcp import METADATA, is_path
from fsdp2x.io.formats.safe_files import open_regular, read_json
from fsdp2x.io.formats.tensors import covers, is_shape
from fsdp2x.io.hf.folder import sync_file
from fsdp2x.sharding.wrap import clean_name

FORMAT = 4
OLD_FORMAT = 3  # without `tensors` and `values`; read, but no longer written
FormName = Literal["sharded", "full", "per_rank"]
FORMS: tuple[FormName, ...] = get_args(FormName)


def model_layout(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Returns state-dict tensors by name, ties once, and alias -> kept name for the others.

    Names are those of the unwrapped model, without levels of activation checkpointing and of `torch.compile`.
    """
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = clean_name(name)
        kept = first.setdefault(id(parameter), name)
        if kept != name:
            aliases[name] = kept
    state = {clean_name(name): tensor for name, tensor in model.state_dict().items()}
    return {name: tensor for name, tensor in state.items() if name not in aliases}, aliases


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def make_manifest(
    *,
    step: int,
    world_size: int,
    aliases: Mapping[str, str],
    form: FormName = "sharded",
    layouts: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Returns the manifest without its files and without what only rank 0 knows."""
    try:
        own_version = version("fsdp2x")
    except PackageNotFoundError:
        own_version = "not installed"
    return {
        "format": FORMAT,
        "form": form,
        "same_world": form == "per_rank",
        "step": step,
        "world_size": world_size,
        "versions": {"fsdp2x": own_version, "torch": str(torch.__version__), "python": platform.python_version()},
        "tied": dict(aliases),
        "layouts": dict(layouts or {}),
    }


def file_names(folder: Path) -> list[str]:
    """Returns every file of a checkpoint except the manifest, relative to it and sorted."""
    files = (p for p in folder.rglob("*") if p.is_file() and p not in (folder / MANIFEST, folder / MARKED))
    return sorted(str(p.relative_to(folder)) for p in files)


def checksum(path: Path) -> int:
    """Returns the CRC-32 of a file, read in blocks."""
    crc = 0
    with open(open_regular(path), "rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Waits until the files are on disk. Returns their sizes and checksums."""
    described = {}
    for name in names:
        sync_file(folder / name)
        described[name] = {"bytes": (folder / name).stat().st_size, "crc32": checksum(folder / name)}
    return described


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    write_file(folder / MANIFEST, json.dumps({**manifest, "crc32": _own_checksum(manifest)}) + "\n")


def _own_checksum(manifest: Mapping[str, Any]) -> int:
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest, checks it, and checks that each file has its size. Raises `CorruptFile`."""
    path = folder / MANIFEST
    manifest = read_json(path)
    if not _each(manifest.get("files"), _is_file):
        raise CorruptFile(f"{path}: not the manifest of a checkpoint, because it does not describe its files")
    check_manifest(manifest, str(path))
    for name, described in manifest["files"].items():
        file = folder / name
        if not os.path.isfile(file):  # false also for a name that no file can have
            raise CorruptFile(f"{folder / name[:200]}: missing, the manifest lists it with {described['bytes']} bytes")
        if file.stat().st_size != described["bytes"]:
            raise CorruptFile(
                f"{file}: damaged, the manifest says {described['bytes']} bytes, got {file.stat().st_size}"
            )
    return manifest


def check_manifest(manifest: Mapping[str, Any], where: str) -> None:
    """Raises `CheckpointError` for a manifest of another format and `CorruptFile` for an impossible one."""
    number, form, world_size = (manifest.get(key) for key in ("format", "form", "world_size"))
    is_old = number == OLD_FORMAT
    if type(number) is int and (number not in (FORMAT, OLD_FORMAT) or is_old and form == "per_rank"):
        raise CheckpointError(
            f"{where}: format {number} ({form}), but this version of fsdp2x reads format {FORMAT}. Convert it with the "
            "version that wrote it: fsdp2x convert --to sharded."
        )
    known = (
        ("format", type(number) is int),
        ("form", isinstance(form, str) and form in FORMS),
        ("step", _is_count(manifest.get("step"))),
        ("world_size", _is_count(world_size) and 0 < world_size < 2**32),
        ("versions", _is_text(manifest.get("versions"))),
        ("tied", _is_text(manifest.get("tied"))),
        ("layouts", _is_text(manifest.get("layouts"))),
    )
    for key, is_right in itertools.chain(known, () if is_old else _checks(manifest)):
        if not is_right:
            raise CorruptFile(f"{where}: not the manifest of a checkpoint: {key} is {str(manifest.get(key))[:100]}")


def _checks(manifest: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yields what only this format has: a key, and whether its value is possible."""
    form, files = manifest.get("form"), manifest.get("files", {})
    yield "same_world", manifest.get("same_world") is (form == "per_rank")
    yield "files", _each(files, _is_file) and {PARTS_FILE, FULL_FILE if form == "full" else METADATA} <= files.keys()
    yield "tensors", _each(manifest.get("tensors"), lambda name, entry: _is_tensor(name, entry, files))
    yield "values", _each(manifest.get("values"), is_path)
    yield "crc32", manifest.get("crc32") == _own_checksum(manifest)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _each(values: Any, is_right: Callable[[str, Any], bool]) -> bool:
    return isinstance(values, dict) and all(is_right(name, value) for name, value in values.items())


def _is_file(name: str, described: Any) -> bool:
    path = PurePosixPath(name)
    is_inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
    is_described = isinstance(described, dict) and {"bytes"} <= described.keys() <= {"bytes", "crc32"}
    return is_inside and is_described and all(map(_is_count, described.values()))


def _is_tensor(name: str, entry: Any, files: Mapping[str, Any]) -> bool:
    """Returns whether the chunks of a tensor are inside their files and make it up."""
    if not isinstance(entry, dict) or entry.keys() != {"path", "shape", "dtype", "chunks"}:
        return False
    shape, dtype, chunks = entry["shape"], getattr(torch, str(entry["dtype"]), None), entry["chunks"]
    is_right = is_path(name, entry["path"]) and is_shape(shape) and isinstance(chunks, list)
    if not is_right or not isinstance(dtype, torch.dtype):
        return False
    return all(_is_chunk(one, dtype, files) for one in chunks) and not covers(
        shape, [(one["offsets"], one["sizes"]) for one in chunks]
    )


def _is_chunk(chunk: Any, dtype: torch.dtype, files: Mapping[str, Any]) -> bool:
    """`first_byte` is that of the chunk in its file. In the full form, the header of the file has the places."""
    if not isinstance(chunk, dict) or chunk.keys() | {"first_byte"} != _CHUNK_KEYS:
        return False
    first, sizes, file = chunk.get("first_byte", 0), chunk["sizes"], chunk["file"]
    is_right = is_shape(chunk["offsets"]) and is_shape(sizes) and 0 not in sizes and _is_count(first)
    is_right = is_right and _is_count(chunk["crc32"]) and isinstance(file, str) and file in files
    return is_right and first + math.prod(sizes) * dtype.itemsize <= files[file]["bytes"]


_CHUNK_KEYS = {"offsets", "sizes", "crc32", "file", "first_byte"}
