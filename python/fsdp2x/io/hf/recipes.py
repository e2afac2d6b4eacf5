"""Describes how weights of a model are made of tensors of files, and the other way round, as sources.

A source can be read by boxes, so a rank reads its rows of a weight that transformers fuses while loading. If a
conversion is more than stacking, joining, cutting and transposing, it runs on full tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from fsdp2x.io.conversions import Loading, Traced, is_transformers, replaced, saved_form
from fsdp2x.io.formats.tensors import Computed, Joined, Piece, Source, Stacked, Turned


@dataclass
class Recipes:
    """``sources`` by name of the weight in the model. Names in the report are those of transformers.

    ``used`` are the names of the tensors in files that weights of the model are made of.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)  # file, model
    conversions: list | None = None  # used conversions, which saving undoes


def make_recipes(base: nn.Module, stored: Mapping[str, Source], shapes: Mapping[str, tuple[int, ...]]) -> Recipes:
    """Makes recipes for the weights in ``shapes`` (names in ``base``, and PEFT's names of adapter weights)."""
    recipes = Recipes()
    made: Mapping[str, Traced] = {name: Traced.of(name, one.shape, one.dtype) for name, one in stored.items()}
    if is_transformers(base):
        loading = Loading(base, made, shapes)
        made, recipes.unexpected, recipes.conversions = loading.made, loading.unexpected, loading.used
    for name, one in made.items():
        if name not in shapes:
            recipes.unexpected.add(name)
            continue
        recipes.used.update(one.inputs)
        if tuple(one.shape) != tuple(shapes[name]):
            recipes.mismatched[name] = (tuple(one.shape), tuple(shapes[name]))
        else:
            recipes.sources[name] = source_of(one, stored)
    return recipes


def _split(source: Source, sizes: list[int], dim: int = 0) -> list[Source]:
    return [Piece(source, dim, end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _chunk(source: Source, chunks: int, dim: int = 0) -> list[Source]:
    num = source.shape[dim]
    size = max(1, -(-num // chunks))
    return _split(source, [min(size, num - first) for first in range(0, max(num, 1), size)], dim)


# Functions whose results are boxes of their arguments.
_BY_BOXES: dict[Any, Callable] = {
    torch.stack: lambda tensors, dim=0: Stacked(tensors, dim),
    torch.cat: lambda tensors, dim=0: Joined(tensors, dim),
    torch.transpose: lambda source, dim0, dim1: Turned(source, dim0, dim1),
    torch.Tensor.transpose: lambda source, dim0, dim1: Turned(source, dim0, dim1),
    torch.Tensor.contiguous: lambda source: source,
    torch.chunk: _chunk,
    torch.Tensor.chunk: _chunk,
    torch.split: _split,
}


def source_of(made: Traced, inputs: Mapping[str, Source]) -> Source:
    """Returns the source of a traced tensor whose ``inputs`` have these sources."""
    if made.call is None:
        return inputs[made.inputs[0]]
    is_computed = False

    def inside(used: Traced) -> Source:
        nonlocal is_computed
        found = source_of(used, inputs)
        is_computed |= isinstance(found, Computed)
        return found

    func, args, kwargs = replaced(made.call, inside)
    # A box of something computed would compute it again for each box.
    if func in _BY_BOXES and not is_computed:
        found = _BY_BOXES[func](*args, **kwargs)
        return found if made.index is None else found[made.index]

    def compute() -> torch.Tensor:
        function, args, kwargs = replaced(made.call, lambda used: source_of(used, inputs).whole())
        found = function(*args, **kwargs)
        return found if made.index is None else found[made.index]

    return Computed(tuple(made.shape), made.dtype, compute)


def file_values(
    model: nn.Module, described: Mapping[str, tuple[torch.Size, torch.dtype]], held: Mapping[str, Source]
) -> dict[str, Source]:
    """Returns the tensors of files, by name, that are made of the weights in ``held`` only.

    Args:
        model: a model on the meta device.
        described: shapes and dtypes of the weights to write, by name in the model.
        held: weights by name.
    """
    saved = saved_form(model, {name: Traced.of(name, *one) for name, one in described.items()})
    return {name: source_of(made, held) for name, made in saved.items() if held.keys() >= set(made.inputs)}
