"""Finds and replaces the tensors inside nested lists, tuples, and mappings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def leaves(value: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """Returns the tensors inside containers with their paths. A single tensor has an empty path."""
    if isinstance(value, Tensor):
        return [] if value.is_meta else [(path, value)]
    if isinstance(value, list | tuple):
        items = [(f"[{index}]", one) for index, one in enumerate(value)]
    else:
        items = [(f".{key}", one) for key, one in value.items()] if isinstance(value, Mapping) else []
    return [leaf for key, one in items for leaf in leaves(one, path + key)]


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns the value with all tensors inside replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        items = [mapped(one, function) for one in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        copied: Any = copy.copy(value)
        for key, one in value.items():
            copied[key] = mapped(one, function)
        return copied
    return value
