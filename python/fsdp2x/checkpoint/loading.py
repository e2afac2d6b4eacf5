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
from .match import Found, FoundState, find_parts, match_model, match_optimizer
from .optimizer import Optimizers, Restore, as_optimizers
from .rng import read_rng, seed_all, set_rng
from .sources import Source, open_source, verify_archive
from .state import PARTS, PARTS_FILE

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
    objects = {"scheduler": scheduler, "scaler": scaler, "data": data}
    wanted = {name: part for name, part in objects.items() if part is not None}
    with lost_ranks.named(what):
        Writer.of(model).wait()
        choice = _choose(path, verify, what)
        match = together(lambda: _match(choice, model, optimizers, wanted, strict, trusted), what=what)
        said = together(match.apply, what=what)
    Writer.of(model).roots.add(choice.path.parent.resolve())
    for sentence in said:
        logger.warning("optimizer: %s", sentence)
    parts, manifest = match.parts, match.manifest
    rank, world_size = rank_and_size()
    saved_by = manifest.get("world_size")
    if saved_by not in (None, world_size):
        logger.info("checkpoint of %d ranks loaded on %d", saved_by, world_size)
    if match.rng is not None:
        set_rng(match.rng, next((param.device for param in model.parameters()), torch.device("cpu")))
    elif saved_by is not None:
        logger.warning("rank %d has no random generators in %s: seeded from %d", rank, choice.path, seed)
        seed_all(seed, rank)
    for name, part in wanted.items():
        if name in parts:
            part.load_state_dict(parts[name])
    return Loaded(
        choice.path,
        parts.get("step", manifest.get("step")),
        choice.form,
        saved_by,
        *(parts.get(name) for name in PARTS),
        match.missing,
        match.unexpected,
    )


@dataclass
class Choice:
    """A whole checkpoint. `manifest` is None for a lone file, and for a directory that others wrote."""

    path: Path
    form: str
    manifest: dict[str, Any] | None


@dataclass
class Match:
    """A checkpoint that was found to fit, before anything is changed. `parts["data"]` is the position of this rank."""

    model: torch.nn.Module
    source: Source
    parts: dict[str, Any]
    manifest: Mapping[str, Any]
    tensors: Mapping[str, Any]
    aliases: Mapping[str, str]
    found: Found
    restore: Restore
    state: FoundState | None
    missing: list[str]
    unexpected: list[str]
    rng: dict[str, Any] | None

    def apply(self) -> list[str]:
        """Reads into model and optimizer; no collective. Returns what an optimizer could not take over."""
        targets = dict(self.found.targets)
        if self.state is not None:
            targets.update(self.state.targets)
        self.source.read(targets)
        whole = {**self.tensors, **self.found.objects}
        full = {**whole, **{alias: whole[kept] for alias, kept in self.aliases.items()}}
        # The model's own tensors are filled already; load_state_dict is for the hooks that the model may have.
        self.model.load_state_dict({name: full[plain_name(name)] for name in self.model.state_dict()})
        if self.state is None or not self.state.groups:
            return []
        return self.restore.apply(self.state.saved())


def _match(
    choice: Choice,
    model: torch.nn.Module,
    optimizers: Optimizers,
    wanted: Mapping[str, Any],
    strict: bool,
    trusted: bool,
) -> Match:
    """Opens the checkpoint and compares it with what is here; raises `CheckpointError` where they differ."""
    rank, world_size = rank_and_size()
    if choice.form == "per_rank" and choice.manifest["world_size"] != world_size:
        raise CheckpointError(
            f"{choice.path}: per-rank files of {choice.manifest['world_size']} ranks cannot be loaded by {world_size}; "
            "use as many ranks, or save with form='sharded' or 'full', which any number of ranks loads"
        )
    source = open_source(choice.path, choice.form, rank, trusted)
    parts = source.parts()
    manifest = choice.manifest or parts.get("manifest") or {}
    tensors, aliases = model_layout(model)
    nodes = find_parts(source.tree, {**tensors, **aliases})
    found = match_model(nodes, tensors, aliases, strict)
    restore = Restore(model, optimizers)
    state = match_optimizer(nodes, restore, manifest.get("layouts", {})) if optimizers else None
    missing = [*found.missing, *(state.missing if state else [])]
    missing += [name for name in wanted if not {name, f"{name}_of_ranks"} & set(parts)]
    unexpected = [*found.unexpected, *(state.unexpected if state else [])]
    if strict and (missing or unexpected):
        raise CheckpointError(_differences(choice.path, missing, unexpected))
    if strict and state and (mixed := restore.mixed_groups(state.groups)):
        raise CheckpointError(
            f"{choice.path}: {'; '.join(mixed)}; strict=False keeps their settings and loads the rest"
        )
    _take_own_position(parts, rank, world_size, "data" in wanted and strict)
    rng = parts["rng"][rank] if rank < len(parts.get("rng", [])) else None
    if rng is None and choice.path.is_dir():
        rng = read_rng(choice.path, rank)
    return Match(model, source, parts, manifest, tensors, aliases, found, restore, state, missing, unexpected, rng)


def _choose(path: Path, verify: bool, what: str) -> Choice:
    """The checkpoint to load: the first whole one where a folder of them is given; collective."""
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
            return Choice(option, *results[rank][1:])
        refused.append(wrong[0])
    raise CheckpointError(f"{what}: {'; '.join(refused) or 'no checkpoint there'}")


def _take_own_position(parts: dict[str, Any], rank: int, world_size: int, needed: bool) -> None:
    """Puts the data position of this rank into `parts`, where each rank saved its own."""
    positions = parts.get("data_of_ranks")
    if positions is None:
        return
    if len(positions) == world_size:
        parts["data"] = positions[rank]
    elif needed:
        raise CheckpointError(
            f"data: each of {len(positions)} ranks saved a position of its own, which {world_size} ranks cannot "
            "continue; load with data=None and place the data yourself"
        )


def _differences(path: Path, missing: list[str], unexpected: list[str]) -> str:
    said = []
    for names, text in ((missing, "it lacks"), (unexpected, "only it has")):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            said.append(f"{text} {', '.join(names[:5])}{more}")
    return f"{path}: {'; '.join(said)}; strict=False loads the rest"
