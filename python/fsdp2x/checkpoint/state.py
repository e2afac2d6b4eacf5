"""Saving and loading a whole training state: every rank calls, every rank raises the same error.

step-000010/  manifest.json           see manifest.py
              .metadata, __R_0.distcp torch DCP: model.<name>, optimizer.state.<name>.<moment>, optimizer.param_groups
              trainer.json            step, schedule, data position, as the caller gave them
              rng-0000R.json          random generators of rank R
              hf/                     config, generation config and tokenizer, for the export
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from . import directory
from .agree import CheckpointError, LostRanks, join_failures, on_rank_0, sentence, together
from .manifest import (
    check_same_model,
    describe_files,
    file_names,
    make_manifest,
    model_layout,
    plain_name,
    read_manifest,
    verify_files,
    write_manifest,
)
from .rng import read_rng, save_rng, seed_all, set_rng
from .safe_read import SafePlanner, SafeReader

logger = logging.getLogger(__name__)

TRAINER_FILE = "trainer.json"
ASSETS_FOLDER = "hf"


@dataclass
class Loaded:
    """What `load_checkpoint` found beside the tensors, which are in model and optimizer already."""

    path: Path
    step: int
    world_size: int
    trainer: dict[str, Any]


def save_checkpoint(
    root: str | Path,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    trainer: dict[str, Any],
    *,
    keep: int = 2,
    write_assets: Callable[[Path], None] | None = None,
    lost_ranks: LostRanks | None = None,
) -> Path:
    """Writes `root/step-<step>` from all ranks, points `root/latest` to it and deletes old ones; collective.

    `trainer` must be JSON. `write_assets(folder)` runs on rank 0 and adds files for the export. A kill at any
    moment leaves the previous checkpoint whole. Raises `CheckpointError` on every rank when any rank fails.
    """
    root = Path(root)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    what = f"saving checkpoint {root / directory.step_name(step)}"
    device = next(model.parameters()).device
    lost_ranks = lost_ranks or LostRanks()
    with lost_ranks.named(what):
        tensors, aliases = model_layout(model)
        state = {"model": tensors, "optimizer": get_optimizer_state_dict(model, optimizer)}
        on_rank_0(lambda: directory.prepare(root, step), what=what)
        temporary = directory.temporary_path(root, step)
        try:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(temporary, sync_files=True))
        except CheckpointException as error:
            raise _failures(error, what) from None
        together(lambda: save_rng(temporary, rank, device), what=what)

        def add_rest() -> list[str]:
            directory.write_file(temporary / TRAINER_FILE, json.dumps({**trainer, "step": step}, indent=1) + "\n")
            if write_assets is not None:
                (temporary / ASSETS_FOLDER).mkdir()
                write_assets(temporary / ASSETS_FOLDER)
            return file_names(temporary)

        names = on_rank_0(add_rest, what=what)
        files = _merged(together(lambda: describe_files(temporary, names[rank::world_size]), what=what))

        def finish() -> None:
            manifest = make_manifest(
                step=step,
                world_size=world_size,
                mesh=_mesh_of(tensors),
                tensors=tensors,
                aliases=aliases,
                model_type=str(getattr(getattr(model, "config", None), "model_type", type(model).__name__)),
            )
            write_manifest(temporary, manifest, files)
            directory.publish(root, step)
            for old in directory.retain(root, keep):
                logger.info("deleted old checkpoint %s", old)

        on_rank_0(finish, what=what)
    return root / directory.step_name(step)


def load_checkpoint(
    path: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    seed: int = 0,
    lost_ranks: LostRanks | None = None,
) -> Loaded:
    """Loads a checkpoint, or the latest of a folder, into a sharded model and a (fresh) optimizer; collective.

    Works at another world size than the one that saved; ranks that did not exist then draw their generators from
    `seed`. Nothing is changed when the checkpoint belongs to another model or a file is missing or damaged:
    `CheckpointError` on every rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    what = f"loading checkpoint {path}"
    device = next(model.parameters()).device
    lost_ranks = lost_ranks or LostRanks()
    with lost_ranks.named(what):
        tensors, aliases = model_layout(model)

        def examine() -> tuple[Path, dict[str, Any], dict[str, Any], dict[str, Any] | None]:
            folder = directory.resolve(path)
            manifest = read_manifest(folder)
            check_same_model(manifest, tensors, folder)
            verify_files(folder, manifest, rank=rank, world_size=world_size)
            return folder, manifest, _read_trainer(folder), read_rng(folder, rank)

        folder, manifest, trainer, rng = together(examine, what=what)
        state: dict[str, Any] = {"model": tensors}
        if optimizer is not None:
            state["optimizer"] = get_optimizer_state_dict(model, optimizer)
        reader = SafeReader(folder)
        together(reader.read_metadata, what=what)
        try:
            dcp.load(state, storage_reader=reader, planner=SafePlanner())
        except CheckpointException as error:
            raise _failures(error, what) from None
        # DCP wrote into the model's own tensors; load_state_dict is for the hooks that the model may have.
        full = {**state["model"], **{alias: state["model"][kept] for alias, kept in aliases.items()}}
        model.load_state_dict({name: full[plain_name(name)] for name in model.state_dict()})
        if optimizer is not None:
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        if manifest["world_size"] != world_size:
            logger.info("checkpoint of %d ranks loaded on %d", manifest["world_size"], world_size)
        if rng is not None:
            set_rng(rng, device)
        else:
            logger.warning("rank %d has no random generators in %s: seeded from %d", rank, folder, seed)
            seed_all(seed, rank)
    return Loaded(folder, int(manifest["step"]), int(manifest["world_size"]), trainer)


def _merged(mine: dict[str, Any]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {name: value for part in parts for name, value in part.items()}


def _read_trainer(folder: Path) -> dict[str, Any]:
    path = folder / TRAINER_FILE
    try:
        trainer = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged, not valid JSON: {error}") from None
    if not isinstance(trainer, dict):
        raise CheckpointError(f"{path}: damaged, got {type(trainer).__name__}, expected a mapping")
    return trainer


def _mesh_of(tensors: dict[str, torch.Tensor]) -> list[list[Any]]:
    """Axis names and sizes of the mesh that shards the model; empty when nothing is sharded."""
    for tensor in tensors.values():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            names = mesh.mesh_dim_names or [None] * mesh.ndim
            return [[name, mesh.size(axis)] for axis, name in enumerate(names)]
    return []


def _failures(error: CheckpointException, what: str) -> CheckpointError:
    """DCP's exception without its tracebacks."""
    said = {rank: sentence(inner) for rank, (inner, _) in error.failures.items()}
    return CheckpointError(join_failures(said, dist.get_world_size(), what))
