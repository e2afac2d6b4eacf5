"""Opens a checkpoint of any form: its tensors as sources, its other values, and its small parts.

Every rank reads only what it needs. Nothing here is collective. `prepare` checks everything that will be read and
changes nothing.
"""

from __future__ import annotations

import functools
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import CheckpointError, CorruptFile, reworded
from fsdp2x.io.checkpoint.directory import FULL_FILE, OLD_FULL_FILE, PARTS_FILE
from fsdp2x.io.checkpoint.manifest import FORMAT, check_manifest, checksum
from fsdp2x.io.checkpoint.plan import OWN, chunks_of
from fsdp2x.io.checkpoint.trees import flatten, nest
from fsdp2x.io.formats.dcp import DcpTensors, KeyPath
from fsdp2x.io.formats.records import Shard, detached, open_archive
from fsdp2x.io.formats.safe_files import OpenFiles, open_regular, read_json
from fsdp2x.io.formats.tensors import FileTensor, Source, Tile, Tiled, checksum_of_box
from fsdp2x.io.hf.files import read_safetensors

_TOPS = ("model", "optimizer")


@dataclass(frozen=True)
class Leaf:
    """A stored tensor. `name` is its dotted name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Opened:
    """An open checkpoint. `values` are entries of model and optimizer that are no tensors. `parts` are the rest."""

    tensors: Mapping[str, Source]
    values: dict[str, Any]
    paths: Mapping[str, KeyPath]
    parts: dict[str, Any]

    def tree(self) -> dict[str, Any]:
        """Returns the entries as nested mappings, with a `Leaf` for each tensor."""
        table = self.tensors.table.tensors if isinstance(self.tensors, DcpTensors) else self.tensors
        leaves = {name: Leaf(name, one.shape, one.dtype) for name, one in table.items()}
        return nest(self.paths, {**leaves, **self.values})

    def prepare(self, targets: Mapping[Leaf, torch.Tensor]) -> list[Callable[[], None]]:
        """Returns calls that each read the bytes of one of this rank's chunks into ``targets``."""
        by_name = {leaf.name: target for leaf, target in targets.items()}
        reads = []
        for chunk in chunks_of(by_name):
            if isinstance(self.tensors, DcpTensors):
                source = self.tensors.part(chunk.name, (chunk.offsets, chunk.sizes))
            else:
                source = self.tensors[chunk.name]
            target = by_name[chunk.name]
            local = target.to_local() if isinstance(target, DTensor) else target
            reads.append(functools.partial(source.read, chunk.offsets, local.detach()))
        return reads


def open_checkpoint(
    path: Path, files: OpenFiles, manifest: Mapping[str, Any] | None, rank: int | None = None, trusted: bool = False
) -> Opened:
    """Opens a checkpoint with its manifest, or a file or a DCP directory without one.

    Args:
        rank: the rank whose own entries of a per-rank checkpoint to take, or None for each of the first that has it.
    """
    if manifest is not None and manifest["format"] == FORMAT:
        return _open_ours(path, files, manifest, rank, trusted)
    if path.is_file() or manifest is not None and manifest["form"] == "full":
        return _open_file(path if path.is_file() else path / OLD_FULL_FILE, files, trusted)
    tensors = DcpTensors(path, files)
    values = {name: tensors.value(name, trusted) for name in tensors.table.objects}
    parts = read_parts(path, trusted)
    if manifest is not None:
        parts["rng"] = [_old_rng(path, rank, manifest["step"]) for rank in range(manifest["world_size"])]
    return Opened(tensors, values, tensors.table.paths, parts)


def _open_ours(folder: Path, files: OpenFiles, manifest: Mapping[str, Any], rank: int | None, trusted: bool) -> Opened:
    parts = _read_parts(folder, trusted)
    stored = {**manifest["tensors"], **manifest["values"]}
    values = parts.get("values")
    if not isinstance(values, dict) or values.keys() != manifest["values"].keys():
        raise CorruptFile(f"{folder / PARTS_FILE}: damaged, its values are not those of the manifest")
    found = {**tensors_of(folder, files, manifest), **values}
    names = _names_of(stored, rank)
    paths: dict[str, KeyPath] = {}
    for name, one in names.items():
        path = stored[one]["path"] if one in manifest["tensors"] else stored[one]
        paths[name] = tuple(path if name == one else path[2:])
    tensors = {name: found[one] for name, one in names.items() if one not in values}
    return Opened(tensors, {name: values[one] for name, one in names.items() if one in values}, paths, parts)


def _names_of(stored: Iterable[str], rank: int | None) -> dict[str, str]:
    """Returns name -> name in the manifest, of entries of all ranks and of this one, or of the first that has it."""
    names: dict[str, str] = {}
    for name in stored:
        top, _, rest = name.partition(".")
        owner, _, own = rest.partition(".")
        if top != OWN:
            names[name] = name
        elif rank is None or owner == str(rank):
            names.setdefault(own, name)
    return names


def tensors_of(folder: Path, files: OpenFiles, manifest: Mapping[str, Any]) -> dict[str, Source]:
    """Returns the tensors that the manifest lists. That of format 3 lists none."""
    if manifest["format"] != FORMAT:
        return {}
    with reworded(CorruptFile, str, CheckpointError):  # a type that fsdp2x did not write is damage
        whole = read_safetensors(files, folder / FULL_FILE) if manifest["form"] == "full" else {}
    found: dict[str, Source] = {}
    for name, entry in manifest["tensors"].items():
        shape, dtype = tuple(entry["shape"]), getattr(torch, entry["dtype"])
        if manifest["form"] == "full":
            one = whole.get(name)
            if one is None or (one.shape, one.dtype) != (shape, dtype):
                raise CorruptFile(f"{folder / FULL_FILE}: damaged, it has no {name} of {list(shape)} and {dtype}")
            found[name] = one
            continue
        tiles = [
            Tile(
                tuple(one["offsets"]),
                FileTensor(files, folder / one["file"], one["first_byte"], tuple(one["sizes"]), dtype),
            )
            for one in entry["chunks"]
        ]
        found[name] = Tiled(shape, dtype, tiles)
    return found


def _open_file(path: Path, files: OpenFiles, trusted: bool) -> Opened:
    """Opens a file of `torch.save` with full tensors, such as a full checkpoint of format 3."""
    values, records = open_archive(files, path, trusted)
    if "manifest" in values:
        manifest = values["manifest"]
        check_manifest(manifest if isinstance(manifest, dict) else {}, f"{path}: manifest")
    flat, paths = flatten({name: values[name] for name in _TOPS if name in values})
    found, _ = flatten({name: records[name] for name in _TOPS if name in records})
    sources: dict[str, Source] = {}
    for name, value in flat.items():
        if not isinstance(value, torch.Tensor):
            continue
        source = found.get(name)
        if isinstance(source, Shard) or isinstance(value, DTensor):
            raise CheckpointError(f"{path}: {name} is a DTensor, one rank's part of a tensor. Save full tensors.")
        if not isinstance(source, Source) or (source.shape, source.dtype) != (tuple(value.shape), value.dtype):
            raise CorruptFile(f"{path}: damaged, {name} is {list(value.shape)} of {value.dtype}, its record is another")
        sources[name] = source
    rest = {name: value for name, value in flat.items() if name not in sources}
    parts = detached({name: value for name, value in values.items() if name not in _TOPS})
    return Opened(sources, rest, paths, parts)


@checked
def read_parts(folder: str | Path, trusted: bool = False) -> dict[str, Any]:
    """Reads the small parts of a checkpoint, not its tensors, in one process.

    Args:
        folder: a checkpoint.
        trusted: whether the parts may execute code while they are read.

    Returns:
        step, scheduler, scaler, data, and extra, as far as they were saved. Empty if the folder has no such parts.

    Raises:
        CheckpointError: the parts are damaged, or need ``trusted=True``.
    """
    path = Path(folder).expanduser()
    found = _read_parts(path, trusted) if (path / PARTS_FILE).is_file() else {}
    return {name: part for name, part in found.items() if name not in ("rng", "values")}


def _read_parts(folder: Path, trusted: bool) -> dict[str, Any]:
    with OpenFiles() as files:
        return detached(open_archive(files, folder / PARTS_FILE, trusted)[0])


def _old_rng(folder: Path, rank: int, step: int) -> dict[str, Any]:
    """Returns the random generators of a rank in a checkpoint of format 3."""
    path = folder / f"rng-{rank:05d}.json"
    state = read_json(path)
    if (state.pop("rank", None), state.pop("step", None)) != (rank, step):
        raise CorruptFile(f"{path}: damaged, not the random generators of rank {rank} at step {step}")
    return state


_CHANGED = "damaged, its contents are not those that were written (CRC-32 differs)"


def verify_folder(
    folder: Path, files: OpenFiles, manifest: Mapping[str, Any], *, rank: int = 0, world_size: int = 1
) -> None:
    """Reads this rank's part of a checkpoint. Raises `CorruptFile` for the first file or chunk that was changed."""
    checked_files = [name for name, described in manifest["files"].items() if "crc32" in described]
    for name in checked_files[rank::world_size]:
        if checksum(folder / name) != manifest["files"][name]["crc32"]:
            raise CorruptFile(f"{folder / name}: {_CHANGED}")
    tensors = tensors_of(folder, files, manifest)
    chunks = [(name, chunk) for name in tensors for chunk in manifest["tensors"][name]["chunks"]]
    for name, chunk in chunks[rank::world_size]:
        if checksum_of_box(tensors[name], chunk["offsets"], chunk["sizes"]) != chunk["crc32"]:
            raise CorruptFile(f"{folder / chunk['file']}: {name} at {chunk['offsets']}: {_CHANGED}")


def verify_archive(path: Path) -> None:
    """Compares a `torch.save` file with the checksums in it."""
    try:
        with open(open_regular(path), "rb") as opened, zipfile.ZipFile(opened) as archive:
            if damaged := archive.testzip():
                raise CorruptFile(f"{path}: damaged, {damaged} has another checksum")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, ValueError, RuntimeError, EOFError) as error:
        raise error if isinstance(error, CheckpointError) else CorruptFile(f"{path}: damaged, {error}") from None
