"""The loading of a HuggingFace folder, backwards: from the weights of a model to the tensors of its files.

The recipes that loading makes say which tensors of the files make up which weight. Undone, they say which part of a
weight is which tensor, so what is written is what loading would read, under the same names, whatever was fused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp2x.errors import CheckpointError
from fsdp2x.hf.names import Family, source_families
from fsdp2x.hf.recipes import make_recipes
from fsdp2x.hf.sources import Computed, Joined, differ
from fsdp2x.hf.targets import Target
from fsdp2x.reading.tensors import Source


def values_of(targets: list[Target], stored: Mapping[str, Source], where: str) -> dict[str, Source]:
    """Each name of a target -> its values, from ``stored`` under any of its names.

    Raises:
        CheckpointError: tied weights that differ; a weight of another shape than the model's.
    """
    found: dict[str, Source] = {}
    for target in targets:
        held = [name for name in target.names if name in stored]
        if not held:
            continue
        first = stored[held[0]]
        for name in held:
            if stored[name].shape != target.shape:
                raise CheckpointError(
                    f"{where}: {name} has shape {list(stored[name].shape)}, the origin's model {list(target.shape)}"
                )
            is_other = stored[name] is not first
            if is_other and differ(first, stored[name], [0] * len(target.shape), target.shape):
                raise CheckpointError(
                    f"{where}: {held[0]} and {name} are tied in the origin's model, but differ; set "
                    "tie_word_embeddings to false in its config.json to keep both"
                )
        found.update(dict.fromkeys(target.names, first))
    return found


@dataclass
class Undone:
    """``values``: of the files' tensors by name. ``used``: those that loading uses, for the model's ``weights``."""

    values: dict[str, Source] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)


def undo_loading(model: Any, files: Mapping[str, Source], targets: list[Target], held: Mapping[str, Source]) -> Undone:
    """What tensors the files of a model have whose weights are ``held``.

    Args:
        model: on the meta device.
        files: the tensors of the folder to write; only names, shapes and dtypes are looked at.
        held: by every name of each target, as ``values_of`` gives them.
    """
    shapes = {name: target.shape for target in targets for name in target.names}
    recipes = make_recipes(model, files, shapes)
    if recipes.mismatched:
        name, (there, here) = next(iter(recipes.mismatched.items()))
        raise CheckpointError(f"the origin's config.json and files disagree: {name} is {there} there and {here} here")
    names = {id(source): name for name, source in files.items()}
    undone = Undone(weights=set(recipes.sources))
    values, used = undone.values, undone.used
    parts: dict[int, tuple[Source, dict[tuple[int, int], Source]]] = {}
    computed: list[str] = []

    def undo(source: Source, value: Source | None, weight: str) -> None:
        if id(source) in names:
            used.add(names[id(source)])
            if value is not None:
                values[names[id(source)]] = value
            return
        steps = source.undo(value if value is not None else source)
        if steps is None and value is None:
            raise CheckpointError(f"the checkpoint lacks {weight}")
        if steps is None:
            computed.append(weight)
            return
        for inner, part_value, part in steps:
            if value is None or part is None:
                undo(inner, None if value is None else part_value, weight)
            else:
                parts.setdefault(id(inner), (inner, {}))[1][part] = part_value

    for weight, source in recipes.sources.items():
        undo(source, held.get(weight), weight)
    while parts:
        inner, pieces = parts.popitem()[1]
        (dim,) = {dim for dim, _ in pieces}
        whole = Joined([value for _, value in sorted(pieces.items(), key=lambda item: item[0][1])], dim)
        undo(inner, whole if whole.shape == inner.shape else None, "")
    if computed:
        for name, value in _convert_back(model, computed, shapes, held).items():
            if name in files:
                values[name] = value
                used.add(name)
    return undone


def _convert_back(model: Any, weights: list[str], shapes: Mapping, held: Mapping[str, Source]) -> dict[str, Source]:
    """Conversions that need whole tensors, run backwards by transformers; results are made when they are read."""
    described = {name: (torch.Size(shapes[name]), held[name].dtype) for name in weights if name in held}
    values: dict[str, Source] = {}
    for family in source_families(model, described):
        pending: dict[str, torch.Tensor] = {}

        def take(name: str, family: Family = family, pending: dict[str, torch.Tensor] = pending) -> torch.Tensor:
            if name not in pending:
                made = family.convert([held[one].whole() for one in family.params])
                pending.update(zip((spec.name for spec in family.outputs), made, strict=True))
            return pending.pop(name)

        for spec in family.outputs:
            values[spec.name] = Computed(tuple(spec.shape), spec.dtype, lambda name=spec.name, take=take: take(name))
    return values
