"""manifest.json of a checkpoint: what it holds, from which model and world, and the size of each of its files.

It is written last and read first, so that a checkpoint of another model, or one with a missing or damaged file, is
refused before anything is loaded. (torch writes checksums into its files, but does not look at them.)
"""

from __future__ import annotations

import json
import platform
import zlib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .agree import CheckpointError
from .directory import MARKED, sync_file, write_file

NAME = "manifest.json"
FORMAT = 2
NEEDED = {"format", "form", "step", "world_size", "tensors", "tied", "files"}


def model_layout(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """State-dict tensors of the model by name, ties once, and the names left out: alias -> the name that is kept.

    Names are those of the unwrapped model: wrappers of activation checkpointing and of `torch.compile` leave no trace.
    """
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = plain_name(name)
        kept = first.setdefault(id(parameter), name)
        if kept != name:
            aliases[name] = kept
    state = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    return {name: tensor for name, tensor in state.items() if name not in aliases}, aliases


def plain_name(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def describe_tensors(tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Shape and dtype of each tensor; entries of a state dict that are none have no part."""
    return {
        name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
        for name, t in tensors.items()
        if isinstance(t, torch.Tensor)
    }


def make_manifest(
    *,
    step: int,
    world_size: int,
    mesh: list[list[Any]],
    tensors: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    model_type: str,
    form: str = "sharded",
    layouts: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The manifest but for its files. `layouts`: how the tensors of model and optimizer were cut, by dotted name."""
    return {
        "format": FORMAT,
        "form": form,
        "step": step,
        "world_size": world_size,
        "mesh": mesh,
        "versions": {"fsdp2x": _own_version(), "torch": str(torch.__version__), "python": platform.python_version()},
        "model_type": model_type,
        "tensors": describe_tensors(tensors),
        "tied": dict(aliases),
        "layouts": dict(layouts or {}),
    }


def _own_version() -> str:
    try:
        return version("fsdp2x")
    except PackageNotFoundError:
        return "not installed"


def file_names(folder: Path) -> list[str]:
    """Every file of a checkpoint but the manifest, relative to it, sorted."""
    files = (p for p in folder.rglob("*") if p.is_file() and p not in (folder / NAME, folder / MARKED))
    return sorted(str(p.relative_to(folder)) for p in files)


def checksum(path: Path) -> int:
    """CRC-32 of a file, read in blocks."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Size and checksum of files, after waiting until each is on disk."""
    described = {}
    for name in names:
        sync_file(folder / name)
        described[name] = {"bytes": (folder / name).stat().st_size, "crc32": checksum(folder / name)}
    return described


def write_manifest(folder: Path, manifest: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    write_file(folder / NAME, json.dumps({**manifest, "files": dict(sorted(files.items()))}, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, after checking that every file is there with its size; raises `CheckpointError` naming the file."""
    path = folder / NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged, not valid JSON: {error}") from None
    if not isinstance(manifest, dict) or not set(manifest) >= NEEDED:
        raise CheckpointError(f"{path}: not the manifest of a checkpoint")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {manifest['format']}, this version of fsdp2x reads format {FORMAT}")
    for name, described in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing, the manifest lists it with {described['bytes']} bytes")
        if file.stat().st_size != described["bytes"]:
            raise CheckpointError(
                f"{file}: damaged, got {file.stat().st_size} bytes, the manifest says {described['bytes']}"
            )
    return manifest


def verify_files(folder: Path, manifest: Mapping[str, Any], *, rank: int = 0, world_size: int = 1) -> None:
    """Reads this rank's part of the files and raises `CheckpointError` naming the first whose contents changed."""
    for name in list(manifest["files"])[rank::world_size]:
        if checksum(folder / name) != manifest["files"][name]["crc32"]:
            raise CheckpointError(
                f"{folder / name}: damaged, its contents are not those that were written (CRC-32 differs)"
            )
