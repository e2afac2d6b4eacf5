"""Checkpoints in HuggingFace form: safetensors, config, generation config and tokenizer, by one process.

Tied weights are written once, names and layout of the tensors are those of the model's original files, and the
folder gets its name only when it is whole.
"""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from ..checkpoint.agree import CheckpointError
from ..checkpoint.directory import resolve
from ..checkpoint.manifest import read_manifest, verify_files
from ..checkpoint.safe_read import SafePlanner, SafeReader
from ..checkpoint.state import ASSETS_FOLDER
from .folder import make_temporary, publish, refuse_existing
from .names import unsharded_class


def export_checkpoint(checkpoint: str | Path, out: str | Path, *, force: bool = False) -> Path:
    """Writes a checkpoint of `fsdp2x train` in HuggingFace form, in one process and without a process group.

    Raises `FileExistsError` when `out` exists and not `force`, `CheckpointError` when the checkpoint cannot be read.
    """
    out = Path(out).expanduser()
    refuse_existing(out, force)
    folder = resolve(checkpoint)
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    assets = folder / ASSETS_FOLDER
    if not (assets / "config.json").is_file():
        raise CheckpointError(f"{assets / 'config.json'}: missing, without the model's config nothing can be exported")
    tensors = read_model_tensors(folder, manifest)
    return _write(out, assets, tensors, manifest["tied"], force=force)


def plain_config(model: torch.nn.Module) -> Any:
    """A copy of the model's config that names the unsharded class and the dtype, as `save_pretrained` does."""
    config = copy.deepcopy(model.config)
    config.architectures = [unsharded_class(model).__name__]
    config.dtype = next(p.dtype for p in model.parameters())
    return config


def read_model_tensors(folder: Path, manifest: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The model's whole tensors from a checkpoint, on the CPU."""
    tensors = {
        name: torch.empty(described["shape"], dtype=getattr(torch, described["dtype"]))
        for name, described in manifest["tensors"].items()
    }
    reader = SafeReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        entry = stored.get(f"model.{name}")
        if entry is None or tuple(getattr(entry, "size", ())) != tuple(tensor.shape):
            raise CheckpointError(f"{folder}: damaged, .metadata and manifest.json disagree about {name}")
    state = {"model": tensors}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=reader, planner=SafePlanner(), no_dist=True)
    except dcp.api.CheckpointException as error:
        inner = next(iter(error.failures.values()))[0]
        raise CheckpointError(str(inner)) from None
    return state["model"]


def _write(out: Path, assets: Path, tensors: dict[str, torch.Tensor], tied: Mapping[str, str], *, force: bool) -> Path:
    """Puts the tensors into an empty model and lets transformers write it: it knows the original names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(assets), local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    whole = {**tensors, **{alias: tensors[kept] for alias, kept in tied.items()}}
    model.load_state_dict(whole, strict=True, assign=True)
    model.tie_weights()
    folder = make_temporary(out, "export")
    try:
        model.save_pretrained(str(folder))
        for file in assets.iterdir():
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
        publish(out, folder, force)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return out
