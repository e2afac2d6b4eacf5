"""Finds tensors in containers that the engine does not walk: dataclasses, named tuples, ModelOutput, subclasses.

The engine calls it for objects that are neither tensors nor plain tuples, lists and dicts. Anything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def tensors_in(tree: Any, _unused: None = None) -> Iterator[torch.Tensor]:
    """Yields all tensors in ``tree``, depth first, in the order :func:`map_tensors` replaces them."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)
    elif _is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name, None))


def map_tensors(tree: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a copy of ``tree`` with replaced tensors, or ``tree`` itself if none changed."""
    if isinstance(tree, torch.Tensor):
        return replace(tree)
    if isinstance(tree, PackedSequence):
        data = replace(tree.data)
        return tree if data is tree.data else tree._replace(data=data)
    if isinstance(tree, dict):
        return _with_items(tree, {key: map_tensors(value, replace) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        values = [map_tensors(value, replace) for value in tree]
        if all(new is old for new, old in zip(values, tree, strict=True)):
            return tree
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if _is_dataclass(tree):
        changed = {}
        for field in dataclasses.fields(tree):
            old = getattr(tree, field.name, None)
            new = map_tensors(old, replace)
            if new is not old:
                changed[field.name] = new
        return _with_attributes(tree, changed) if changed else tree
    return tree


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _with_items(tree: dict, items: dict) -> dict:
    if all(items[key] is tree[key] for key in tree):
        return tree
    result = copy.copy(tree)  # keeps the class: OrderedDict, ModelOutput, defaultdict
    for key, value in items.items():
        result[key] = value
    return result


def _with_attributes(tree: Any, changed: dict[str, Any]) -> Any:
    # copy, not dataclasses.replace, because fields with init=False and __post_init__ must survive. Frozen ones need
    # object's setter.
    result = copy.copy(tree)
    for name, value in changed.items():
        object.__setattr__(result, name, value)
    return result
