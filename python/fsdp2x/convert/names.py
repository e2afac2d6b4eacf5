"""Which key of a checkpoint is which weight: prefixes of wrappers and frameworks are stripped by best match."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from fsdp2x.errors import CheckpointError
from fsdp2x.hf.names import clean_name
from fsdp2x.hf.sources import Piece
from fsdp2x.reading.tensors import Source

logger = logging.getLogger("fsdp2x")

GROUPED = ".group_mlp."


def match(keys: Iterable[str], names: Collection[str], prefix: str | None, where: str) -> dict[str, str]:
    """Name -> key, for the keys that are ``prefix`` and one of ``names``.

    Args:
        prefix: None: the one that fits most names, such as ``"model_state.model."``.

    Raises:
        CheckpointError: no prefix fits any name, or several fit equally many: two copies of a model, perhaps averaged.
    """
    cleaned = {clean_name(key): key for key in keys}
    if prefix is None:
        prefix = _best_prefix(cleaned, names, where)
    found = {name: cleaned[prefix + name] for name in names if prefix + name in cleaned}
    if not found:
        raise CheckpointError(
            f"{where}: no key is {prefix!r} and the name of a weight; there are {', '.join(sorted(cleaned)[:4])}, ..."
        )
    taken = set(found.values())
    rest = sorted(key for name, key in cleaned.items() if name.startswith(prefix) and key not in taken)
    rest = [key for key in rest if prefix or not key.startswith(("optim", "scheduler", "rng", "trainer"))]
    if rest:
        logger.warning(
            "%s: %d tensors are no weights of the origin's model and are left out: %s",
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
        raise CheckpointError(f"{where}: no key ends with the name of a weight of the origin; there are {some}, ...")
    (best, most), *others = hits.most_common(2)
    if others and others[0][1] == most:
        both = f"{best!r} and {others[0][0]!r}"
        raise CheckpointError(f"{where}: the prefixes {both} fit {most} weights each; choose with --prefix (prefix=)")
    return best


def without_groups(tensors: Mapping[str, Source], num_experts: int | None, where: str) -> dict[str, Source]:
    """Weights of grouped experts, stacked row-wise as (experts x rows, columns), become one weight per expert.

    ``mlp.group_mlp.up_proj.weight`` holds ``mlp.experts.{i}.up_proj.weight`` one after the other.

    Raises:
        CheckpointError: no such weights, or their rows are no multiple of the number of experts.
    """
    if not num_experts:
        raise CheckpointError(f"{where}: --groupgemm, but the origin's config.json has no num_experts")
    result: dict[str, Source] = {}
    for key in tensors:
        source = tensors[key]
        if GROUPED not in key:
            result[key] = source
            continue
        if source.shape[0] % num_experts:
            raise CheckpointError(f"{where}: {key} has {source.shape[0]} rows, no multiple of {num_experts} experts")
        rows = source.shape[0] // num_experts
        for index in range(num_experts):
            result[key.replace(GROUPED, f".experts.{index}.")] = Piece(source, 0, index * rows, rows)
    if len(result) == len(tensors):
        raise CheckpointError(f"{where}: --groupgemm, but no tensor is named *{GROUPED}*")
    return result
