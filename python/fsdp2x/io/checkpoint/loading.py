"""Loads a checkpoint of any form into a model and its optimizer: the newest complete one if a folder is given."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import (
    CheckpointError,
    CorruptFile,
    gather_all,
    join_failures,
    named_call,
    rank_and_size,
    run_on_all_ranks,
)
from fsdp2x.base.optimizer_hooks import why_swapped
from fsdp2x.io.checkpoint.background import Saver
from fsdp2x.io.checkpoint.directory import MANIFEST, PARTS_FILE, find
from fsdp2x.io.checkpoint.manifest import FormName, model_layout, read_manifest
from fsdp2x.io.checkpoint.match import FoundState, find_parts, match_model, match_optimizer
from fsdp2x.io.checkpoint.optimizer import Optimizers, Restore, as_optimizers
from fsdp2x.io.checkpoint.plan import PARTS
from fsdp2x.io.checkpoint.rng import check_rng, device_of, seed_all, set_rng
from fsdp2x.io.checkpoint.sources import open_checkpoint, verify_archive, verify_folder
from fsdp2x.io.checkpoint.trees import mismatch
from fsdp2x.io.formats.dcp import METADATA
from fsdp2x.io.formats.safe_files import OpenFiles
from fsdp2x.lifecycle.replicas import check_again
from fsdp2x.lifecycle.tree import unit_states
from fsdp2x.sharding.wrap import clean_name

logger = logging.getLogger(__name__)


@dataclass
class Choice:
    """A checkpoint to load. `manifest` is None for a single file and for a directory that other programs wrote."""

    path: Path
    form: FormName
    manifest: dict[str, Any] | None


def choose(path: Path, verify: bool, files: OpenFiles, look_into: Callable[[Choice], None], what: str) -> Choice:
    """Returns the newest checkpoint that is undamaged and passes `look_into` on every rank. Collective."""
    rank, world_size = rank_and_size()
    refused = []
    for option in run_on_all_ranks(lambda: find(path), what=what):
        found: list[Choice] = []
        files.close()
        failures = _failures(lambda found=found, option=option: found.append(_examine(option, verify, files)), what)
        if not failures:
            failures = _failures(lambda found=found: look_into(found[0]), what)
        if not failures:
            if refused:
                logger.warning("%s; using %s instead", "; ".join(refused), option)
            return found[0]
        refused.append(join_failures(failures, world_size, ""))
    raise CheckpointError(f"{what}: {'; '.join(refused) or 'there is no checkpoint'}")


def _failures(work: Callable[[], Any], what: str) -> dict[int, str]:
    """Runs `work` on every rank. Returns rank -> damage found there. Raises any other failure on all ranks."""

    def attempt() -> str | None:
        try:
            work()
        except CorruptFile as error:
            return str(error)
        return None

    said = gather_all(attempt, what=what)
    return {rank: one for rank, one in enumerate(said) if one is not None}


def _examine(option: Path, verify: bool, files: OpenFiles) -> Choice:
    """Reads the manifest and checks this rank's part of the files."""
    rank, world_size = rank_and_size()
    if option.is_file():
        if verify:
            verify_archive(option)
        return Choice(option, "full", None)
    if not (option / MANIFEST).is_file() and (option / METADATA).is_file():
        if (option / PARTS_FILE).is_file():
            raise CorruptFile(f"{option}: damaged, {MANIFEST} is missing")
        return Choice(option, "sharded", None)
    manifest = read_manifest(option)
    if verify:
        verify_folder(option, files, manifest, rank=rank, world_size=world_size)
    return Choice(option, manifest["form"], manifest)


@dataclass
class Loaded:
    """Result of `load`. Tensors are already in model and optimizer.

    Attributes:
        scheduler, scaler, data: saved states, also if you passed objects for them.
        missing, unexpected: names that did not match. Empty unless `strict` was False.
        step: the saved step, or None if another program wrote the checkpoint without one.
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


@checked
@named_call("fsdp2x.checkpoint.load")
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
) -> Loaded:
    """Loads a checkpoint of `save` or `torch.distributed.checkpoint` into sharded tensors. Collective.

    A folder of checkpoints means the one that `latest` names. If that is damaged, it loads the newest complete one and
    warns. World size and mesh may differ from the save, except for per-rank files. The optimizer may be new. If
    anything is missing, damaged, or of another model, nothing changes.

    Args:
        path: a checkpoint, a folder of checkpoints, or the file of a full one.
        model: the model, sharded for training.
        optimizer: one or several optimizers. None ignores the saved state.
        scheduler, scaler, data: objects whose `load_state_dict` gets the saved state.
        strict: whether names that only the checkpoint or only the model, optimizer or arguments have raise an error.
            False loads the rest and reports both.
        verify: whether to compare all files with their checksums first. The ranks share the reading.
        trusted: whether the checkpoint may execute code while it is read. False raises if it needs to.
        seed: seed for generators of ranks that did not exist at the save.

    Returns:
        The step, saved states, and names that did not match.

    Raises:
        CheckpointError: on every rank, with the file, tensor or part.
        TypeError: `optimizer` is not an optimizer.
    """
    path = Path(path).expanduser()
    optimizers = as_optimizers(optimizer)
    what = f"loading checkpoint {path}"
    objects = {"scheduler": scheduler, "scaler": scaler, "data": data}
    wanted = {name: part for name, part in objects.items() if part is not None}
    rank, world_size = rank_and_size()
    saver = Saver.of(model)
    with saver.known_ranks().named(what), OpenFiles() as files:
        saver.wait()
        matches: list[Match] = []

        def look_into(choice: Choice) -> None:
            matches.clear()
            matches.append(_match(choice, files, model, optimizers, wanted, strict, trusted))

        choice = choose(path, verify, files, look_into, what)
        (match,) = matches
        said = _apply(match, wanted, what)
    saver.roots.add(choice.path.parent.resolve())
    for state in unit_states(model):
        check_again(state)
    for sentence in said:
        logger.warning("optimizer: %s", sentence)
    parts, manifest = match.parts, match.manifest
    step = parts.get("step")
    saved_by = manifest.get("world_size")
    if rank == 0 and saved_by not in (None, world_size):
        logger.info("checkpoint of %d ranks loaded on %d", saved_by, world_size)
    if match.rng is None and saved_by is not None:
        logger.warning("rank %d has no random generators in %s: seeded from %d", rank, choice.path, seed)
        seed_all(seed, rank)
    return Loaded(
        choice.path,
        step if type(step) is int else None,
        choice.form,
        saved_by,
        missing=match.missing,
        unexpected=match.unexpected,
        **{name: parts.get(name) for name in PARTS},
    )


@dataclass
class Match:
    """A checkpoint that fits, before anything is changed. `parts["data"]` is the position of this rank."""

    model: torch.nn.Module
    parts: dict[str, Any]
    manifest: Mapping[str, Any]
    values: Mapping[str, Any]  # by each name of the model's state dict
    restore: Restore
    state: FoundState | None
    missing: list[str]
    unexpected: list[str]
    rng: dict[str, Any] | None
    model_reads: list[Callable[[], None]]
    state_reads: list[Callable[[], None]]

    def hand_over(self, wanted: Mapping[str, Any], undo: list[Callable[[], None]]) -> list[str]:
        """Gives optimizers and other objects their states. Appends calls that restore the old ones to `undo`."""
        for name, part in wanted.items():
            if name not in self.parts:
                continue
            if hasattr(part, "state_dict"):
                undo.append(functools.partial(part.load_state_dict, copy.deepcopy(part.state_dict())))
            try:
                part.load_state_dict(self.parts[name])
            except Exception as error:
                raise CheckpointError(f"{name} does not take what was saved: {type(error).__name__}: {error}") from None
        if self.state is None or not self.state.groups:
            return []
        for optimizer in self.restore.optimizers:
            undo.append(functools.partial(optimizer.load_state_dict, optimizer.state_dict()))
        return self.restore.apply(self.state.saved())

    def fill(self) -> None:
        """Reads into the model and sets the random generators."""
        for read in self.model_reads:
            read()
        # The model's tensors already have their values. load_state_dict runs the model's hooks.
        self.model.load_state_dict({name: self.values[clean_name(name)] for name in self.model.state_dict()})
        if self.rng is not None:
            set_rng(self.rng, device_of(self.model))


def _apply(match: Match, wanted: Mapping[str, Any], what: str) -> list[str]:
    """Changes model, optimizers, generators and objects. Collective. Returns what an optimizer could not take over.

    Steps that other code may reject come first and are undone if any rank fails. The model is filled in place, last,
    because only reading its files can still fail, and they have been read once.
    """
    run_on_all_ranks(lambda: [read() for read in match.state_reads], what=what)
    undo: list[Callable[[], None]] = []
    try:
        said = run_on_all_ranks(lambda: match.hand_over(wanted, undo), what=what)
    except CheckpointError:
        for give_back in reversed(undo):
            give_back()
        raise
    try:
        run_on_all_ranks(match.fill, what=what)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. A part of it is in the model, so load again before you use it.") from (
            error.__cause__
        )
    return said


def _match(
    choice: Choice,
    files: OpenFiles,
    model: torch.nn.Module,
    optimizers: Optimizers,
    wanted: Mapping[str, Any],
    strict: bool,
    trusted: bool,
) -> Match:
    """Opens the checkpoint and compares it with its manifest and with this model."""
    rank, world_size = rank_and_size()
    if why := why_swapped(model.parameters()):
        raise CheckpointError(why)
    saved_by = (choice.manifest or {}).get("world_size")
    if choice.form == "per_rank" and saved_by != world_size:
        raise CheckpointError(
            f"{choice.path}: a per-rank checkpoint of {saved_by} ranks cannot be loaded by {world_size} ranks. "
            "Use as many ranks, or convert it by fsdp2x convert --to sharded for any number of ranks."
        )
    source = open_checkpoint(choice.path, files, choice.manifest, rank, trusted)
    parts = source.parts
    manifest: Mapping[str, Any] = choice.manifest or parts.get("manifest", {})
    rng = _own_rng(choice.path, parts, manifest, rank, device_of(model)) if manifest else None
    tensors, aliases = model_layout(model)
    model_node, optimizer_node = find_parts(source.tree(), {**tensors, **aliases})
    found = match_model(model_node, tensors, aliases, strict)
    restore = Restore(model, optimizers)
    state = match_optimizer(optimizer_node, restore, manifest.get("layouts", {})) if optimizers else None
    missing = [*found.missing, *(state.missing if state else [])]
    missing += [name for name in wanted if not {name, f"{name}_of_ranks"} & set(parts)]
    unexpected = [*found.unexpected, *(state.unexpected if state else [])]
    if strict and (missing or unexpected):
        raise CheckpointError(_differences(choice.path, missing, unexpected))
    if strict and state and (mixed := restore.mixed_groups(state.groups)):
        raise CheckpointError(
            f"{choice.path}: {'; '.join(mixed)}. strict=False keeps the new groups' settings and loads the rest."
        )
    _take_own_position(parts, rank, world_size, "data" in wanted and strict)
    for name in ("scheduler", "scaler"):
        part = wanted.get(name)
        if strict and name in parts and hasattr(part, "state_dict"):
            if wrong := mismatch(parts[name], part.state_dict(), name):
                raise CheckpointError(f"{choice.path}: {wrong}")
    values = {**tensors, **found.objects}
    values |= {alias: values[kept] for alias, kept in aliases.items()}
    model_reads, state_reads = (source.prepare(one.targets) if one else [] for one in (found, state))
    return Match(model, parts, manifest, values, restore, state, missing, unexpected, rng, model_reads, state_reads)


def _own_rng(
    path: Path, parts: Mapping[str, Any], manifest: Mapping[str, Any], rank: int, device: torch.device
) -> dict[str, Any] | None:
    """Compares the small parts with the manifest. Returns the random generators of this rank if it was there."""
    step = parts.get("step")
    if not isinstance(step, int) or step != manifest["step"]:
        raise CorruptFile(f"{path}: damaged, its parts are of step {step}, not {manifest['step']}")
    for name in ("rng", *({"data_of_ranks"} & parts.keys())):
        found = parts.get(name)
        if not isinstance(found, list) or len(found) != manifest["world_size"]:
            raise CorruptFile(f"{path}: damaged, it does not have {name} of {manifest['world_size']} ranks")
    for other, state in enumerate(parts["rng"]):
        check_rng(state, device, f"{path}: rank {other}")
    return parts["rng"][rank] if rank < len(parts["rng"]) else None


def _take_own_position(parts: dict[str, Any], rank: int, world_size: int, needed: bool) -> None:
    """Puts this rank's data position into `parts` if each rank saved a different one."""
    positions = parts.get("data_of_ranks")
    if positions is None:
        return
    if len(positions) == world_size:
        parts["data"] = positions[rank]
    elif needed:
        raise CheckpointError(
            f"data: each of {len(positions)} ranks saved its own position, which {world_size} ranks cannot "
            "continue. Load with data=None and set the position of the data yourself."
        )


def _differences(path: Path, missing: list[str], unexpected: list[str]) -> str:
    said = []
    for names, text in ((missing, "it lacks"), (unexpected, "only it has")):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            said.append(f"{text} {', '.join(names[:5])}{more}")
    return f"{path}: {'; '.join(said)}. strict=False loads the rest."
