"""Maps tensors of files to weights of a model by transformers' conversion tables.

It reads names and shapes only. Sources describe what transformers fuses while loading, so a rank can read its rows of
the fused weight. If a conversion is more than stacking, joining, cutting and transposing, transformers runs it on full
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fsdp2x.base.failures import CheckpointError, first_line
from fsdp2x.io.formats.tensors import Computed, Joined, Piece, Source, Stacked, Turned
from fsdp2x.io.names import Family, is_transformers, original_classes, run_converter, source_families


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
    if is_transformers(base):
        found = _converted(base, stored, shapes, recipes)
    else:
        found = dict(stored)
        recipes.used = stored.keys() & shapes.keys()
    for name, source in found.items():
        if name not in shapes:
            recipes.unexpected.add(name)
        elif tuple(source.shape) != tuple(shapes[name]):
            recipes.mismatched[name] = (tuple(source.shape), tuple(shapes[name]))
        else:
            recipes.sources[name] = source
    return recipes


def _converted(base, stored: Mapping[str, Source], shapes: Mapping, recipes: Recipes) -> dict[str, Source]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    with original_classes(base):
        conversions = get_model_conversion_mapping(base)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix = base.base_model_prefix
    found: dict[str, Source] = {}
    known = dict(shapes)
    collected: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in shapes and key in shapes:
            # An original name that the table would have changed unnecessarily.
            name, pattern = rename_source_key(key, [], [], prefix, known)
        if name in shapes:
            recipes.used.add(key)
        if pattern is None:
            found[name] = stored[key]
        elif name in shapes:
            collected.setdefault(name, (by_pattern[pattern], []))[1].append((pattern, key))
        else:
            targets = by_pattern[pattern].target_patterns
            recipes.unexpected.update(name.replace(targets[0], target) for target in targets)
    for name, (converter, members) in collected.items():
        found.update(_Conversion(base, name, converter, members, stored).outputs())
    recipes.conversions = [one for one in conversions if one.was_used()]
    return found


class _Conversion:
    """One converter applied to the tensors of one or several weights."""

    def __init__(self, model, name: str, converter, members: list[tuple[str, str]], stored: Mapping[str, Source]):
        self._model, self._name, self._converter = model, name, converter
        self._members, self._stored = members, stored
        self._made: dict[str, torch.Tensor] = {}

    def outputs(self) -> dict[str, Source]:
        dtype = next(self._stored[key].dtype for _, key in self._members)
        odd = [key for _, key in self._members if kind_of(self._stored[key].dtype) != kind_of(dtype)]
        if odd:
            raise self._unfit(f"{odd[0]} has dtype {self._stored[odd[0]].dtype}")
        # On the meta device, where transformers decides names and shapes of the results.
        try:
            made = self._run(lambda key: torch.empty(self._stored[key].shape, dtype=dtype, device="meta"))
        except Exception as error:
            raise self._unfit(first_line(error)) from None
        try:
            described = self._describe()
        except _NotDescribable:
            described = []
        if [source.shape for source in described] == [tuple(tensor.shape) for tensor in made.values()]:
            return dict(zip(made, described, strict=True))
        return {
            name: Computed(tuple(tensor.shape), dtype, lambda name=name: self._take(name))
            for name, tensor in made.items()
        }

    def _unfit(self, reason: str) -> CheckpointError:
        one = self._members[0][1]
        return CheckpointError(
            f"{self._name} is made of {len(self._members)} tensors that do not fit together in the files: {reason}. "
            f"{one} has shape {list(self._stored[one].shape)} and dtype {self._stored[one].dtype}."
        )

    def _run(self, tensor_of) -> dict[str, torch.Tensor]:
        tensors = ((key, pattern, tensor_of(key)) for pattern, key in self._members)
        return run_converter(self._converter, self._model, self._name, tensors)

    def _take(self, name: str) -> torch.Tensor:
        if name not in self._made:
            self._made = self._run(lambda key: self._stored[key].whole())
        return self._made.pop(name)

    def _describe(self) -> list[Source]:
        """Returns the results as sources, in the converter's order."""
        from transformers import core_model_loading as loading

        values: dict[str, list[Source]] = {}
        for pattern, key in self._members:
            values.setdefault(pattern, []).append(self._stored[key])
        converter = self._converter
        for op in converter.operations:
            if type(op) is loading.MergeModulelist:
                values = {pattern: [Stacked(sources, op.dim)] for pattern, sources in values.items()}
            elif type(op) is loading.Concatenate:
                order = [pattern for pattern in converter.source_patterns if pattern in values]
                values = {"": [Joined([source for pattern in order for source in values[pattern]], op.dim)]}
            elif type(op) is loading.Chunk:
                source = _only(values)
                num = len(op.get_target_patterns(converter.target_patterns, config=self._model.config))
                size = source.shape[op.dim]
                if size % num:
                    raise _NotDescribable
                part = size // num
                values = {str(i): [Piece(source, op.dim, i * part, part)] for i in range(num)}
            elif type(op) is loading.Transpose and not op.check_dims:
                values = {"": [Turned(_only(values), op.dim0, op.dim1)]}
            else:
                raise _NotDescribable
        if any(len(sources) > 1 for sources in values.values()):
            raise _NotDescribable
        return [sources[0] for sources in values.values()]


class _NotDescribable(Exception):
    """An operation needs full tensors."""


def kind_of(dtype: torch.dtype) -> str:
    """Returns the kind of a dtype. Numbers of one kind are converted into each other."""
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def _only(values: dict[str, list[Source]]) -> Source:
    if len(values) != 1 or len(next(iter(values.values()))) != 1:
        raise _NotDescribable
    return next(iter(values.values()))[0]


def file_values(
    model: nn.Module, described: Mapping[str, tuple[torch.Size, torch.dtype]], held: Mapping[str, Source]
) -> dict[str, Source]:
    """Returns the tensors of files, by name, that are made of the weights in ``held`` only.

    transformers undoes the conversions of loading when their results are read.

    Args:
        model: a model on the meta device.
        described: shapes and dtypes of the weights to write, by name in the model.
        held: weights by name.
    """
    values: dict[str, Source] = {}
    for family in source_families(model, described):
        if not all(name in held for name in family.params):
            continue
        if family.is_renamed_only:
            values[family.outputs[0].name] = held[family.params[0]]
            continue
        pending: dict[str, torch.Tensor] = {}

        def take(name: str, family: Family = family, pending: dict[str, torch.Tensor] = pending) -> torch.Tensor:
            if name not in pending:
                made = family.convert([held[one].whole() for one in family.params])
                pending.update(zip((spec.name for spec in family.outputs), made, strict=True))
            return pending.pop(name)

        for spec in family.outputs:
            values[spec.name] = Computed(tuple(spec.shape), spec.dtype, lambda name=spec.name, take=take: take(name))
    return values
