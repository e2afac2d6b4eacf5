"""`load`: a checkpoint of any form into a model and its optimizer; the newest whole one when a folder is given."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import directory
from .agree import CheckpointError, LostRanks, gather_all, rank_and_size, together
from .background import Writer
from .manifest import model_layout, plain_name, read_manifest, verify_files
from .match import Found, find_parts, match_model, match_optimizer
from .optimizer import Restore, as_optimizers
from .rng import read_rng, seed_all, set_rng
from .sources import Source, open_source, verify_archive
from .state import PARTS_FILE

logger = logging.getLogger(__name__)


@dataclass
class Loaded:
    """What `load` found. Tensors are in model and optimizer already; `scheduler`, `scaler` and `data` also where
    objects were given. `missing` and `unexpected` are empty unless `strict` was False. `step` is None when the
    checkpoint, written by others, does not say.
    """

    path: Path
    step: int | None
    form: str
    world_size: int | None
    scheduler: Any = None
    scaler: Any = None
    data: Any = None
    extra: Any = None
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def load(
    path: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    strict: bool = True,
    verify: bool = True,
    trusted: bool = False,
    seed: int = 0,
    lost_ranks: LostRanks | None = None,
) -> Loaded:
    """Loads what `save` wrote, or what stock `torch.distributed.checkpoint` did, into sharded tensors; collective.

    A folder of checkpoints means the one that `latest` names; where that is damaged, the newest whole one, and a
    warning says so. Any world size and mesh, but for per-rank files. The optimizer may be fresh. Nothing is changed
    when anything is missing, damaged or of another model.

    Args:
        path: a checkpoint, a folder of them, or the file of a full one.
        model: the model, sharded as it will be trained.
        optimizer: one or several; None leaves the saved state alone.
        scheduler, scaler, data: objects whose `load_state_dict` is called with what was saved.
        strict: what the model, the optimizer or an argument expects and the checkpoint lacks, and what only the
            checkpoint has, is an error that names it. False: the rest is loaded, both are reported.
        verify: compare all files with their checksums before anything is loaded; the ranks share the reading.
        trusted: the checkpoint may execute code while it is read. Otherwise what needs that is refused.
        seed: generators of ranks that did not exist at the save are drawn from it.
        lost_ranks: who names the ranks that die meanwhile.

    Raises:
        CheckpointError: on every rank, naming the file, tensor or part.
    """
    path = Path(path).expanduser()
    optimizers = as_optimizers(optimizer)
    what = f"loading checkpoint {path}"
    lost_ranks = lost_ranks or LostRanks()
    wanted = {"scheduler": scheduler, "scaler": scaler, "data": data}
    with lost_ranks.named(what):
        Writer.of(model).wait()
        chosen, form, manifest = _choose(path, verify, what)
        rank, world_size = rank_and_size()
        device = next((param.device for param in model.parameters()), torch.device("cpu"))

        def examine() -> tuple:
            if form == "per_rank" and manifest["world_size"] != world_size:
                raise CheckpointError(
                    f"{chosen}: per-rank files of {manifest['world_size']} ranks cannot be loaded by {world_size}; use "
                    "as many ranks, or save with form='sharded' or 'full', which any number of ranks loads"
                )
            source = open_source(chosen, form, rank, trusted)
            parts = source.parts()
            tensors, aliases = model_layout(model)
            found = find_parts(source.tree, {**tensors, **aliases}, bool(optimizers))
            matched = match_model(found, tensors, aliases, strict)
            restore = Restore(model, optimizers)
            layouts = (manifest or parts.get("manifest") or {}).get("layouts", {})
            state = match_optimizer(found, restore, layouts) if optimizers else None
            missing = [*matched.missing, *(state.missing if state else [])]
            missing += [
                name
                for name, part in wanted.items()
                if part is not None and not {name, f"{name}_of_ranks"} & set(parts)
            ]
            unexpected = [*matched.unexpected, *(state.unexpected if state else [])]
            if strict and (missing or unexpected):
                raise CheckpointError(_differences(chosen, missing, unexpected))
            position = _own(parts, rank, world_size, data is not None and strict)
            rng = parts["rng"][rank] if "rng" in parts and rank < len(parts["rng"]) else None
            if rng is None and chosen.is_dir():
                rng = read_rng(chosen, rank)
            return source, parts, tensors, aliases, matched, restore, state, missing, unexpected, position, rng

        source, parts, tensors, aliases, matched, restore, state, missing, unexpected, position, rng = together(
            examine, what=what
        )
        said = together(lambda: _apply(model, tensors, aliases, source, matched, restore, state, strict), what=what)
        for sentence in said:
            logger.warning("optimizer: %s", sentence)
    saved_by = manifest["world_size"] if manifest else (parts.get("manifest") or {}).get("world_size")
    if saved_by not in (None, world_size):
        logger.info("checkpoint of %d ranks loaded on %d", saved_by, world_size)
    if rng is not None:
        set_rng(rng, device)
    elif saved_by is not None:
        logger.warning("rank %d has no random generators in %s: seeded from %d", rank, chosen, seed)
        seed_all(seed, rank)
    for name, part in wanted.items():
        value = position if name == "data" else parts.get(name)
        if part is not None and value is not None:
            part.load_state_dict(value)
    step = parts.get("step", manifest["step"] if manifest else None)
    return Loaded(
        chosen, step, form, saved_by, parts.get("scheduler"), parts.get("scaler"), position, parts.get("extra"),
        missing, unexpected,
    )  # fmt: skip


def _choose(path: Path, verify: bool, what: str) -> tuple[Path, str, dict[str, Any] | None]:
    """The checkpoint to load, its form and its manifest (None for a file, and for one that others wrote)."""
    rank, world_size = rank_and_size()

    def list_them() -> list[Path]:
        if path.is_file():
            return [path]
        root = path if directory.is_root(path) else path / "checkpoints"
        if (path / "manifest.json").is_file() or (path / ".metadata").is_file() or not directory.is_root(root):
            return [path if path.is_dir() and (path / ".metadata").is_file() else directory.resolve(path)]
        return directory.candidates(root)

    options = together(list_them, what=what)

    def examine(option: Path) -> tuple[str | None, str, dict[str, Any] | None]:
        """(what is wrong with it, form, manifest)"""
        try:
            if option.is_file():
                if verify:
                    verify_archive(option, rank, world_size)
                return None, "full", None
            if not (option / "manifest.json").is_file() and (option / ".metadata").is_file():
                if (option / PARTS_FILE).is_file():
                    return f"{option}: damaged, manifest.json is missing", "", None
                return None, "sharded", None
            manifest = read_manifest(option)
            if verify:
                verify_files(option, manifest, rank=rank, world_size=world_size)
            return None, manifest["form"], manifest
        except CheckpointError as error:
            return str(error), "", None

    refused = []
    for option in options:
        results = gather_all(lambda option=option: examine(option), what=what)
        wrong = [reason for reason, _, _ in results if reason is not None]
        if not wrong:
            if refused:
                logger.warning("%s; using %s instead", "; ".join(refused), option)
            return option, results[rank][1], results[rank][2]
        refused.append(wrong[0])
    raise CheckpointError(f"{what}: {'; '.join(refused) or 'no checkpoint there'}")


def _apply(
    model: torch.nn.Module,
    tensors: Mapping[str, Any],
    aliases: Mapping[str, str],
    source: Source,
    matched: Found,
    restore: Restore,
    state: Any,
    strict: bool,
) -> list[str]:
    """Reads into model and optimizer; no collective."""
    targets = dict(matched.targets)
    if state is not None:
        targets.update(state.targets)
    source.read(targets)
    whole = {**tensors, **matched.objects}
    full = {**whole, **{alias: whole[kept] for alias, kept in aliases.items()}}
    # The model's own tensors are filled already; load_state_dict is for the hooks that the model may have.
    model.load_state_dict({name: full[plain_name(name)] for name in model.state_dict()})
    return restore.apply(state.saved(), strict) if state is not None and state.groups else []


def _own(parts: Mapping[str, Any], rank: int, world_size: int, needed: bool) -> Any:
    """The data position of this rank."""
    positions = parts.get("data_of_ranks")
    if positions is None:
        return parts.get("data")
    if len(positions) == world_size:
        return positions[rank]
    if needed:
        raise CheckpointError(
            f"data: each of {len(positions)} ranks saved a position of its own, which {world_size} ranks cannot "
            "continue; load with data=None and place the data yourself"
        )
    return None


def _differences(path: Path, missing: list[str], unexpected: list[str]) -> str:
    said = []
    for names, text in ((missing, "it lacks"), (unexpected, "only it has")):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            said.append(f"{text} {', '.join(names[:5])}{more}")
    return f"{path}: {'; '.join(said)}; strict=False loads the rest"
