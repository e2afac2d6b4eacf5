"""Flattens, nests and compares trees of plain values and tensors, and checks that they can be loaded."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from fsdp2x.base.failures import CheckpointError, CorruptFile
from fsdp2x.io.formats.dcp import KeyPath
from fsdp2x.io.formats.records import Shard
from fsdp2x.io.formats.tensors import Source


def same(one: Any, other: Any) -> bool:
    """Returns whether plain values, tensors, or containers of them are equal."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check_loadable(values: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` for the first value that `torch.load(weights_only=True)` would reject."""
    for name, value in values.items():
        if not _is_plain(value) and not _loads(value):
            raise CheckpointError(
                f"{name} ({type(value).__name__}) holds more than tensors, numbers, strings and containers of them, so "
                "reading it would execute code. Save its plain values, or pass trusted=True here and when loading."
            )


def _is_plain(value: Any) -> bool:
    """Returns whether a value is certainly loadable. Tried first, because `torch.save` is slow."""
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.Tensor)


def _loads(value: Any) -> bool:
    try:
        torch.load(io.BytesIO(to_bytes(value)), weights_only=True)
    except (pickle.UnpicklingError, pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def to_bytes(value: Any) -> bytes:
    """Returns the value as `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def mismatch(there: Any, here: Any, where: str) -> str | None:
    """Returns a sentence if saved values are not of the same kind as those in this process, else None.

    Numbers of any type are one kind, lists and tuples another. A key may be new. A missing key is reported unless it
    begins with an underscore. None matches everything except a number.
    """
    if here is None or (there is None and (isinstance(here, bool) or _kind(here) != "number")):
        return None
    kinds = [_kind(there), _kind(here)]
    if kinds[0] != kinds[1]:
        return f"{where}: expected {type(here).__name__}, got {str(there)[:80]!r} ({type(there).__name__})"
    if isinstance(here, Mapping):
        for key, value in here.items():
            if key in there and (found := mismatch(there[key], value, f"{where}.{key}")):
                return found
            if key not in there and not str(key).startswith("_"):
                return f"{where}: the checkpoint has no {key}"
    if isinstance(here, list | tuple) and len(here) == len(there):
        pairs = enumerate(zip(there, here, strict=True))
        return next((found for index, pair in pairs if (found := mismatch(*pair, f"{where}[{index}]"))), None)
    return None


def _kind(value: Any) -> Any:
    if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return "number"
    if isinstance(value, Mapping):
        return "mapping"
    return "sequence" if isinstance(value, list | tuple) else type(value)


def flatten(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Returns leaves and their paths by dotted name. Opens lists that hold mappings or tensors, as DCP does."""
    flat: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}

    def visit(path: KeyPath, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                visit((*path, str(key)), item)
        elif isinstance(value, list) and _opens(value):
            for index, item in enumerate(value):
                visit((*path, index), item)
        else:
            name = ".".join(map(str, path))
            if name in flat:
                raise CheckpointError(f"two entries are named {name}: at the paths {paths[name]} and {path}")
            flat[name] = value
            paths[name] = path

    visit((), tree)
    return flat, paths


def _opens(value: Any) -> bool:
    is_opened = isinstance(value, Mapping | torch.Tensor | Source | Shard)
    return is_opened or (isinstance(value, list) and any(map(_opens, value)))


def nest(paths: Mapping[str, KeyPath], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuilds the tree, including lists. Raises `CorruptFile` for paths that cannot be in one tree."""
    tree = _Node()
    for name, value in leaves.items():
        *outer, last = paths[name]
        node: Any = tree
        for key in outer:
            node = node.setdefault(key, _Node())
            if type(node) is not _Node:
                raise CorruptFile(f"the path of {name} passes through another entry")
        if last in node:
            raise CorruptFile(f"the path of {name} is also that of another entry")
        node[last] = value
    return _with_lists(tree, "")


class _Node(dict):
    """A node of the tree, in contrast to a leaf that is a mapping."""


def _with_lists(node: Any, where: str) -> Any:
    if type(node) is not _Node:
        return node
    inner = {key: _with_lists(value, f"{where}.{key}") for key, value in node.items()}
    if not any(isinstance(key, int) for key in inner):
        return inner
    if not all(isinstance(key, int) for key in inner) or sorted(inner) != list(range(len(inner))):
        raise CorruptFile(f"the list {where[1:]} has the places {sorted(map(str, inner))[:20]}")
    return [inner[index] for index in range(len(inner))]
