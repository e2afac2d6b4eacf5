"""HuggingFace export: safetensors, config, generation config and tokenizer that plain `from_pretrained` loads.

Tied weights are written once, names and layout of the tensors are those of the model's original files, and the
folder gets its name only when it is whole.
"""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule

from ..checkpoint.agree import CheckpointError, on_rank_0
from ..checkpoint.directory import resolve, sync_file, sync_folder
from ..checkpoint.manifest import model_layout, read_manifest, verify_files
from ..checkpoint.safe_read import SafePlanner, SafeReader
from ..checkpoint.state import ASSETS_FOLDER


def export_checkpoint(checkpoint: str | Path, out: str | Path, *, force: bool = False) -> Path:
    """Writes a checkpoint of `fsdp2x train` in HuggingFace form, in one process and without a process group.

    Raises `FileExistsError` when `out` exists and not `force`, `CheckpointError` when the checkpoint cannot be read.
    """
    out = Path(out).expanduser()
    _refuse_existing(out, force)
    folder = resolve(checkpoint)
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    assets = folder / ASSETS_FOLDER
    if not (assets / "config.json").is_file():
        raise CheckpointError(f"{assets / 'config.json'}: missing, without the model's config nothing can be exported")
    tensors = read_model_tensors(folder, manifest)
    return _write(out, assets, tensors, manifest["tied"], force=force)


def export(model: torch.nn.Module, out: str | Path, *, tokenizer: Any = None, force: bool = False) -> Path:
    """Writes a sharded (or whole) HuggingFace model; collective over the ranks that shard it, rank 0 writes.

    Gathers one tensor at a time and keeps the whole model in rank 0's CPU memory. `tokenizer` is anything with
    `save_pretrained`. Raises `FileExistsError` on every rank when `out` exists and not `force`.
    """
    out = Path(out).expanduser()
    state, aliases = model_layout(model)
    rank = dist.get_rank() if dist.is_initialized() else 0
    _refuse_existing(out, force, exists=on_rank_0(out.exists, what=f"exporting to {out}"))
    tensors = {}
    for name, tensor in state.items():
        tensor = tensor.detach()
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if rank == 0:
            tensors[name] = whole.cpu() if whole.device.type != "cpu" else whole.clone()

    def write() -> None:
        assets = _temporary(out, "assets")
        shutil.rmtree(assets, ignore_errors=True)
        assets.mkdir(parents=True)
        try:
            plain_config(model).save_pretrained(str(assets))
            if getattr(model, "generation_config", None) is not None:
                model.generation_config.save_pretrained(str(assets))
            if tokenizer is not None:
                tokenizer.save_pretrained(str(assets))
            _write(out, assets, tensors, aliases, force=force)
        finally:
            shutil.rmtree(assets, ignore_errors=True)

    on_rank_0(write, what=f"exporting to {out}")
    return out


def plain_config(model: torch.nn.Module) -> Any:
    """A copy of the model's config that names the unsharded class and the dtype, as `save_pretrained` does."""
    config = copy.deepcopy(model.config)
    config.architectures = [_unsharded_class(model).__name__]
    config.dtype = next(p.dtype for p in model.parameters())
    return config


def _unsharded_class(model: torch.nn.Module) -> type:
    """The model's class before `fully_shard` swapped in a subclass."""
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


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
    temporary = _temporary(out, "export")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        model.save_pretrained(str(temporary))
        for file in assets.iterdir():
            if file.is_file():
                shutil.copyfile(file, temporary / file.name)
        for file in temporary.iterdir():
            sync_file(file)
        sync_folder(temporary)
        _replace(out, temporary, force)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _replace(out: Path, temporary: Path, force: bool) -> None:
    if not out.exists():
        os.rename(temporary, out)
    else:
        _refuse_existing(out, force)
        replaced = _temporary(out, "old")
        os.rename(out, replaced)
        os.rename(temporary, out)
        shutil.rmtree(replaced) if replaced.is_dir() else replaced.unlink()
    sync_folder(out.parent)


def _refuse_existing(out: Path, force: bool, *, exists: bool | None = None) -> None:
    if (out.exists() if exists is None else exists) and not force:
        raise FileExistsError(f"{out}: exists already; choose another folder or replace it with --force (force=True)")


def _temporary(out: Path, purpose: str) -> Path:
    return out.parent / f".tmp-{purpose}-{out.name}"
