"""Reads and writes manifest.json: what a checkpoint holds, its model and world, and the size of each of its files.

A save writes it last and a load reads it first. So a checkpoint of another model, or with a missing or damaged file,
raises before anything is loaded. It names every entry of model and optimizer, so that a lost or exchanged entry is
found even if the checksum of its file is right.
"""

from __future__ import annotations

import json
import os
import platform
import zlib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeGuard, assert_never, get_args

import torch

from fsdp2x.base.failures import CheckpointError, CorruptFile
from fsdp2x.io.checkpoint.directory import (
    FULL_FILE,
    MANIFEST,
    MARKED,
    PARTS_FILE,
    rank_file,
    rng_file,
    sync_file,
    write_file,
)
from fsdp2x.io.formats.dcp import METADATA
from fsdp2x.io.formats.safe_files import open_regular, read_json
from fsdp2x.sharding.wrap import clean_name

FORMAT = 3
FormName = Literal["sharded", "full", "per_rank"]
FORMS: tuple[FormName, ...] = get_args(FormName)
# Name of an entry -> shape and dtype of a tensor, or None for another value.
Entries = Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]


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


def describe_entries(entries: Entries) -> dict[str, Any]:
    """Returns the entries in the form of the manifest."""
    return {
        name: entry and {"shape": list(entry[0]), "dtype": str(entry[1]).removeprefix("torch.")}
        for name, entry in entries.items()
    }


def make_manifest(
    *,
    step: int,
    world_size: int,
    mesh: list[list[Any]],
    aliases: Mapping[str, str],
    model_type: str,
    form: str = "sharded",
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
        "step": step,
        "world_size": world_size,
        "mesh": mesh,
        "versions": {"fsdp2x": own_version, "torch": str(torch.__version__), "python": platform.python_version()},
        "model_type": model_type,
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


def write_manifest(folder: Path, manifest: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    write_file(folder / MANIFEST, json.dumps({**manifest, "files": dict(sorted(files.items()))}, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest, checks it, and checks that each file has its size. Raises `CorruptFile`."""
    path = folder / MANIFEST
    manifest = read_json(path)
    check_manifest(manifest, str(path))
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(map(_is_file, files, files.values())):
        raise CorruptFile(f"{path}: not the manifest of a checkpoint, because it does not describe its files")
    lost = sorted(_needed_files(manifest) - files.keys())
    if lost:
        raise CorruptFile(f"{path}: damaged, it does not list {', '.join(lost[:5])}")
    for name, described in files.items():
        file = folder / name
        if not os.path.isfile(file):  # false also for a name that no file can have
            raise CorruptFile(f"{folder / name[:200]}: missing, the manifest lists it with {described['bytes']} bytes")
        if file.stat().st_size != described["bytes"]:
            raise CorruptFile(
                f"{file}: damaged, the manifest says {described['bytes']} bytes, got {file.stat().st_size}"
            )
    return manifest


def manifest_in(file: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the manifest in the file of a full checkpoint, or None if another program wrote the file."""
    manifest = file.get("manifest")
    return manifest if isinstance(manifest, dict) and "entries" in manifest else None


def check_manifest(manifest: Mapping[str, Any], where: str) -> None:
    """Raises `CheckpointError` for a manifest of another format and `CorruptFile` for an impossible one."""
    number = manifest.get("format")
    if type(number) is int and number != FORMAT:
        raise CheckpointError(
            f"{where}: format {number}, but this version of fsdp2x reads format {FORMAT}. Read it with the version "
            "that wrote it, or with torch.distributed.checkpoint if its form is sharded."
        )
    form, world_size = manifest.get("form"), manifest.get("world_size")
    for key, is_right in (
        ("format", type(number) is int),
        ("form", isinstance(form, str) and form in FORMS),
        ("step", _is_count(manifest.get("step"))),
        ("world_size", _is_count(world_size) and 0 < world_size < 2**32),
        ("mesh", isinstance(manifest.get("mesh"), list)),
        ("versions", _is_text(manifest.get("versions"))),
        ("model_type", isinstance(manifest.get("model_type"), str)),
        ("tied", _is_text(manifest.get("tied"))),
        ("layouts", _is_text(manifest.get("layouts"))),
        ("parts", isinstance(manifest.get("parts"), list) and all(isinstance(p, str) for p in manifest["parts"])),
        ("entries", isinstance(manifest.get("entries"), dict) and all(map(_is_entry, manifest["entries"].values()))),
        ("num_entries", _are_counts(manifest.get("num_entries")) and len(manifest["num_entries"]) == world_size),
    ):
        if not is_right:
            raise CorruptFile(f"{where}: not the manifest of a checkpoint: {key} is {str(manifest.get(key))[:100]}")


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _is_entry(entry: Any) -> bool:
    if entry is None:
        return True
    is_described = isinstance(entry, dict) and entry.keys() == {"shape", "dtype"}
    return is_described and _are_counts(entry["shape"]) and isinstance(entry["dtype"], str)


def _is_file(name: str, described: Any) -> bool:
    path = PurePosixPath(name)
    is_inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
    is_described = isinstance(described, dict) and described.keys() == {"bytes", "crc32"}
    return is_inside and is_described and all(map(_is_count, described.values()))


def _needed_files(manifest: Mapping[str, Any]) -> set[str]:
    """Returns the files that a checkpoint of this form must have."""
    form: FormName = manifest["form"]
    ranks = range(manifest["world_size"])
    match form:
        case "full":
            return {FULL_FILE}
        case "sharded":
            own = {METADATA}
        case "per_rank":
            own = {rank_file(rank) for rank in ranks}
        case _:
            assert_never(form)
    return {PARTS_FILE, *own, *(rng_file(rank) for rank in ranks)}


def tied_names(manifest: Mapping[str, Any]) -> list[set[str]]:
    """Returns the names in model and optimizer that share their bytes."""
    groups: dict[str, set[str]] = {}
    for alias, kept in manifest["tied"].items():
        groups.setdefault(kept, {f"model.{kept}"}).add(f"model.{alias}")
    return list(groups.values())


def check_entries(where: Path | str, manifest: Mapping[str, Any], found: Entries, rank: int | None = None) -> None:
    """Raises `CorruptFile` unless the entries of a checkpoint, or of a rank's file, are those of its manifest."""
    expected = dict(manifest["entries"])
    if rank is None:
        expected |= {f"model.{a}": expected.get(f"model.{kept}") for a, kept in manifest["tied"].items()}
    got = describe_entries(found)
    wrong = [name for name in got if name not in expected or got[name] != expected[name]]
    if wrong:
        name = wrong[0]
        said = "nothing" if name not in expected else expected[name] or "a value"
        raise CorruptFile(f"{where}: damaged, the manifest says {name} is {said}, got {got[name] or 'a value'}")
    lost = [name for name in expected if name not in got]
    if rank is not None:
        lost = lost[:1] if len(got) != manifest["num_entries"][rank] else []
    if lost:
        raise CorruptFile(f"{where}: damaged, it lacks {', '.join(lost[:5])}, which the manifest lists")


def verify_files(folder: Path, manifest: Mapping[str, Any], *, rank: int = 0, world_size: int = 1) -> None:
    """Reads this rank's part of the files. Raises `CorruptFile` for the first whose contents changed."""
    for name in list(manifest["files"])[rank::world_size]:
        if checksum(folder / name) != manifest["files"][name]["crc32"]:
            raise CorruptFile(
                f"{folder / name}: damaged, its contents are not those that were written (CRC-32 differs)"
            )
