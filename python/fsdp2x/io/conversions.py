"""Lets transformers convert weights between files and memory, and records how each result is made.

transformers renames, fuses, splits, and transposes weights while it loads, and undoes that when it saves. Here it does
so with tensors on the meta device, so it decides names and shapes without any values. Each result is ``Traced``: it
knows the calls that made it. `evaluate` repeats them with values, and ``io.hf.recipes`` reads boxes of results.

This is the only module that calls transformers' conversions. Its functions for that have no stable interface.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp2x.base import torch_private
from fsdp2x.base.failures import CheckpointError, first_line
from fsdp2x.sharding.wrap import unsharded_class


class Traced(torch.Tensor):
    """A tensor on the meta device: an input with a name, or one result of a call with other such tensors."""

    inputs: tuple[str, ...]
    call: tuple[Callable, Any, dict[str, Any]] | None = None  # the function and its arguments
    index: int | None = None  # of the result, if the call returns several

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Traced:
        """Returns an input."""
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        made.inputs = (name,)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or name.endswith("_") and not name.endswith("__"):
            raise NotImplementedError(f"the conversion writes into a tensor by {name}")
        made = super().__torch_function__(func, types, args, kwargs)
        results = made if isinstance(made, tuple | list) else [made]
        # contiguous() may return its own tensor, which is known.
        fresh = [isinstance(one, Traced) and not hasattr(one, "inputs") for one in results]
        if any(fresh):
            used = [leaf for leaf in torch_private.tree_leaves((args, kwargs)) if isinstance(leaf, Traced)]
            inputs, call = tuple(dict.fromkeys(name for leaf in used for name in leaf.inputs)), (func, args, kwargs)
            for index, (one, is_fresh) in enumerate(zip(results, fresh, strict=True)):
                if is_fresh:
                    one.inputs, one.call, one.index = inputs, call, None if results is not made else index
        return made


def replaced(call: Any, change: Callable[[Traced], Any]) -> Any:
    """Copies a call with other values for its traced tensors."""
    return torch_private.tree_map_only(Traced, change, call)


def evaluate(made: Traced, values: Mapping[str, torch.Tensor], known: dict[int, Any]) -> torch.Tensor:
    """Returns the tensor that ``made`` stands for. ``values`` are those of inputs, ``known`` are results of calls."""
    if made.call is None:
        return values[made.inputs[0]]
    if id(made.call) not in known:
        func, args, kwargs = replaced(made.call, lambda used: evaluate(used, values, known))
        known[id(made.call)] = func(*args, **kwargs)
    result = known[id(made.call)]
    return result if made.index is None else result[made.index]


def is_transformers(model: nn.Module) -> bool:
    """Returns whether transformers knows the names of the model's files. Imports nothing for other models."""
    return any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__) and hasattr(model, "config")


@contextlib.contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """Restores the classes from before ``fully_shard``, because transformers finds conversions by class name."""
    swapped = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, _ in swapped:
            module.__class__ = unsharded_class(module)
        yield
    finally:
        for module, cls in swapped:
            module.__class__ = cls


class Loading:
    """What a model's weights are made of, by transformers' conversions of the tensors of its files.

    ``made`` is by name in the model. It may hold names that the model does not have. ``used`` are those conversions
    that applied, which saving undoes.
    """

    def __init__(self, model: Any, stored: Mapping[str, Traced], shapes: Mapping[str, tuple[int, ...]]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        with original_classes(model):
            conversions = get_model_conversion_mapping(model)
        renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        converters = [one for one in conversions if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        prefix, known = model.base_model_prefix, dict(shapes)
        self.made: dict[str, Traced] = {}
        self.unexpected: set[str] = set()
        members: dict[str, list[tuple[str, str]]] = {}
        for key in sorted(stored, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, known)
            if name not in shapes and key in shapes:
                # An original name that the table would have changed unnecessarily.
                name, pattern = rename_source_key(key, [], [], prefix, known)
            if pattern is None:
                self.made[name] = stored[key]
            elif name in shapes:
                members.setdefault(name, []).append((pattern, key))
            else:
                first, *_ = targets = by_pattern[pattern].target_patterns
                self.unexpected.update(name.replace(first, target) for target in targets)
        for name, found in members.items():
            self.made.update(_convert(model, name, by_pattern[found[0][0]], found, stored))
        self.used = [one for one in conversions if one.was_used()]


def _convert(
    model: Any, name: str, converter: Any, members: list[tuple[str, str]], stored: Mapping[str, Traced]
) -> dict[str, Traced]:
    """Returns what a converter makes of these (pattern, key) for the weight ``name``, by name of the result."""
    converter, first = copy.deepcopy(converter), members[0][1]
    kind = kind_of(stored[first].dtype)
    try:
        for pattern, key in members:
            if kind_of(stored[key].dtype) != kind:
                raise TypeError(f"{key} has dtype {stored[key].dtype}")
            converter.add_tensor(name, key, pattern, stored[key])
        made = converter.convert(name, model=model, config=model.config)
    except Exception as error:
        raise CheckpointError(
            f"{name} is made of {len(members)} tensors that do not fit together in the files: {first_line(error)}. "
            f"{first} has shape {list(stored[first].shape)} and dtype {stored[first].dtype}."
        ) from None
    return {target: one[0] if isinstance(one, list) else one for target, one in made.items()}


def kind_of(dtype: torch.dtype) -> str:
    """Returns the kind of a dtype. Numbers of one kind are converted into each other."""
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def saved_form(model: Any, weights: Mapping[str, Traced]) -> Mapping[str, Traced]:
    """Returns the tensors of files that transformers makes of a model's weights, by name.

    It undoes the conversions that loading used, or else those of the class.

    Raises:
        ValueError: several weights would have one name in files.
    """
    if not is_transformers(model):
        return weights
    from transformers.core_model_loading import revert_weight_conversion

    with original_classes(model):
        saved: Any = revert_weight_conversion(model, dict(weights))
    written = {name for one in saved.values() for name in one.inputs}
    if lost := [name for name in weights if name not in written]:
        raise ValueError(f"fsdp2x: {', '.join(lost[:5])} would have the names of other weights in files")
    return saved
