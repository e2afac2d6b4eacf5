"""Opens checkpoints: ``open_dcp`` for directories of torch's distributed checkpoint, ``open_ranks`` for rank files.

Both return a source for each tensor by its key, made of shards from any file. ``match`` finds the weights of a model
among the keys, and strips the prefix of wrappers and frameworks that fits best.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from fsdp2x.base.failures import CheckpointError, CorruptFile
from fsdp2x.io.checkpoint.directory import MANIFEST, resolve
from fsdp2x.io.convert.checkpoints import open_verified
from fsdp2x.io.formats.dcp import METADATA, DcpTensors
from fsdp2x.io.formats.records import Shard, box_of, read_records
from fsdp2x.io.formats.safe_files import OpenFiles, read_text
from fsdp2x.io.formats.tensors import Piece, Source, Tile, tiled
from fsdp2x.sharding.wrap import clean_name

_RANK_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
# Folders of a checkpoint where frameworks put the model's DCP directory.
_BELOW = ("", "model", "dcp", "pytorch_model_fsdp_0")


def dcp_folder(path: Path) -> Path:
    """Returns the folder with .metadata for ``path``: itself, inside it, or in its newest checkpoint."""
    pointer = path / "latest_checkpointed_iteration.txt"
    roots = [path]
    if pointer.is_file():
        step = read_text(pointer, 100).strip()
        roots += [path / f"iter_{int(step):07d}", path / f"global_step_{step}"] if step.isdecimal() else []
    for root in roots:
        for below in _BELOW:
            if (root / below / METADATA).is_file():
                return root / below
    try:
        return resolve(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} There is no DCP directory ({METADATA}) in {', '.join(one or '.' for one in _BELOW)} either."
        ) from None


def open_dcp(path: Path, files: OpenFiles) -> tuple[Mapping[str, Source], dict[str, str]]:
    """Returns tensors by key, and aliases (name -> kept name) if fsdp2x wrote the checkpoint."""
    folder = dcp_folder(path)
    if not (folder / MANIFEST).is_file():
        return DcpTensors(folder, files), {}
    opened, manifest = open_verified(folder, files)
    return opened.tensors, dict(manifest["tied"])


def open_ranks(folder: Path, files: OpenFiles) -> dict[str, Source]:
    """Returns tensors by key from files ``model_world_size_{W}_rank_{r}.pt``, state dicts of DTensors and tensors."""
    paths = _rank_files(folder)
    states: list[dict[str, Source | Shard]] = []
    for path in paths:
        state = read_records(files, path)
        wrong = [state]
        if isinstance(state, dict):
            plain = {key: one.local if isinstance(one, Shard) else one for key, one in state.items()}
            wrong = [key for key, one in plain.items() if not (isinstance(key, str) and isinstance(one, Source))]
        if wrong:
            raise CheckpointError(f"{path}: expected a state dict of tensors, got {str(wrong[:3])[:200]}")
        if states and state.keys() != states[0].keys():
            other = sorted(state.keys() ^ states[0].keys())
            raise CheckpointError(f"{path}: holds other tensors than the file of rank 0: {', '.join(other[:5])}")
        states.append(state)
    return {key: _joined(f"{folder}: {key}", [state[key] for state in states]) for key in states[0]}


def _rank_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder. Pass the folder of a checkpoint.")
    found = {path: match for path in folder.iterdir() if (match := _RANK_FILE.fullmatch(path.name))}
    worlds = sorted({int(match[1]) for match in found.values()})
    if len(worlds) != 1:
        several = f"files of world sizes {worlds}" if worlds else "no file model_world_size_W_rank_R.pt"
        raise CheckpointError(f"{folder}: expected the files of one checkpoint, got {several}")
    by_rank = {int(match[2]): path for path, match in found.items()}
    missing = sorted(set(range(worlds[0])) - set(by_rank))
    if missing:
        raise CheckpointError(f"{folder}: the files of ranks {missing} of {worlds[0]} are missing")
    return [by_rank[rank] for rank in range(worlds[0])]


def _joined(name: str, ranks: list[Source | Shard]) -> Source:
    kinds = {(type(one) is Shard, one.shape, one.dtype) for one in ranks}
    if len(kinds) > 1:
        raise CorruptFile(f"{name}: the tensor differs between ranks: {sorted(map(str, kinds))}")
    if isinstance(ranks[0], Source):
        return ranks[0]
    shards = [one for one in ranks if isinstance(one, Shard)]
    _check_shards(name, shards)
    sizes = [max(column) + 1 for column in zip(*(one.coordinate for one in shards), strict=True)]
    tiles = []
    for rank, shard in enumerate(shards):
        start, shape = box_of(shard.shape, sizes, shard.coordinate, shard.placements)
        if shard.local.shape != shape:
            raise CorruptFile(
                f"{name}: rank {rank} holds {list(shard.local.shape)}, but its placements give {list(shape)}"
            )
        tiles.append(Tile(start, shard.local))
    return tiled(name, ranks[0].shape, ranks[0].dtype, tiles)


def _check_shards(name: str, shards: list[Shard]) -> None:
    """Raises `CorruptFile` for shards that no DTensor can have."""
    placements = [(one.kind, one.dim) for one in shards[0].placements]
    for rank, shard in enumerate(shards):
        fits = all(type(size) is int and size >= 0 for size in shard.shape)
        fits = fits and [(one.kind, one.dim) for one in shard.placements] == placements
        fits = fits and len(shard.coordinate) == len(placements)
        fits = fits and all(type(place) is int and 0 <= place < len(shards) for place in shard.coordinate)
        dims = [one.dim for one in shard.placements if one.kind in ("Shard", "_StridedShard")]
        if not fits or not all(type(dim) is int and 0 <= dim < len(shard.shape) for dim in dims):
            raise CorruptFile(f"{name}: rank {rank} holds a DTensor that contradicts itself or other ranks'")


logger = logging.getLogger("fsdp2x")

GROUPED = ".group_mlp."


def match(keys: Iterable[str], names: Collection[str], prefix: str | None, where: str) -> dict[str, str]:
    """Returns name -> key for keys of ``prefix`` and one of ``names``. None takes the prefix that matches most."""
    cleaned = {clean_name(key): key for key in keys}
    if prefix is None:
        prefix = _best_prefix(cleaned, names, where)
    found = {name: cleaned[prefix + name] for name in names if prefix + name in cleaned}
    if not found:
        raise CheckpointError(
            f"{where}: no key is {prefix!r} and the name of a weight. There are {', '.join(sorted(cleaned)[:4])}, ..."
        )
    taken = set(found.values())
    rest = sorted(key for name, key in cleaned.items() if name.startswith(prefix) and key not in taken)
    rest = [key for key in rest if prefix or not key.startswith(("optim", "scheduler", "rng", "trainer"))]
    if rest:
        logger.warning(
            "%s: %d tensors are not weights of the origin's model and are omitted: %s",
            where,
            len(rest),
            ", ".join(rest[:5]) + (", ..." if len(rest) > 5 else ""),
        )
    return found


def _best_prefix(keys: Collection[str], names: Collection[str], where: str) -> str:
    hits: Counter[str] = Counter()
    for key in keys:
        cut = 0
        while True:
            if key[cut:] in names:
                hits[key[:cut]] += 1
            cut = key.find(".", cut) + 1
            if not cut:
                break
    if not hits:
        some = ", ".join(sorted(keys)[:4])
        raise CheckpointError(f"{where}: no key ends with the name of a weight of the origin. There are {some}, ...")
    (best, most), *others = hits.most_common(2)
    if others and others[0][1] == most:
        both = f"{best!r} and {others[0][0]!r}"
        raise CheckpointError(f"{where}: the prefixes {both} match {most} weights each. Choose one with --prefix.")
    return best


def without_groups(tensors: Mapping[str, Source], num_experts: int | None, where: str) -> dict[str, Source]:
    """Splits weights of grouped experts, stacked row-wise as (experts x rows, columns), into one weight per expert."""
    if not num_experts:
        raise CheckpointError(f"{where}: --groupgemm needs num_experts, but the origin's config.json does not have it")
    result: dict[str, Source] = {}
    for key in tensors:
        source = tensors[key]
        if GROUPED not in key:
            result[key] = source
            continue
        if source.shape[0] % num_experts:
            raise CheckpointError(f"{where}: {key} has {source.shape[0]} rows, not a multiple of {num_experts} experts")
        rows = source.shape[0] // num_experts
        for index in range(num_experts):
            result[key.replace(GROUPED, f".experts.{index}.")] = Piece(source, 0, index * rows, rows)
    if len(result) == len(tensors):
        raise CheckpointError(f"{where}: --groupgemm was passed, but no tensor is named *{GROUPED}*")
    return result
