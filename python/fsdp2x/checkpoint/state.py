"""What belongs to one checkpoint, collected on every rank before a byte is written.

`tree` holds model and optimizer as nested dicts; `flat` the same leaves by dotted name, as DCP names them. Small parts
(schedule, scaler, data position, extra) are kept apart: they are Python values, read back with `weights_only=True`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp2x.errors import CheckpointError, CorruptFile
from fsdp2x.reading.records import Shard
from fsdp2x.reading.table import KeyPath
from fsdp2x.reading.tensors import Source
from fsdp2x.runtime.swapped import why_swapped

from .manifest import model_layout
from .optimizer import Optimizers, layout_of, named_state
from .rng import device_of, rng_state
from .values import check_loadable

PARTS = ("scheduler", "scaler", "data", "extra")


@dataclass
class State:
    """Of this rank. `signature` is equal exactly when names, shapes, dtypes and layouts of the tensors are.

    `plain`: the layouts of plain tensors that an optimizer keeps beside DTensors.
    """

    tree: dict[str, Any]
    flat: dict[str, Any]
    paths: dict[str, KeyPath]
    aliases: dict[str, str]
    model_names: dict[str, torch.Tensor]
    small: dict[str, Any]
    rng: dict[str, Any]
    signature: tuple = field(default=())
    layouts: dict[str, str] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)


def collect(model: torch.nn.Module, optimizers: Optimizers, small: Mapping[str, Any], trusted: bool) -> State:
    """Everything of this rank; no collective. Raises `CheckpointError` for what could not be loaded again."""
    if why := why_swapped(model.parameters()):
        raise CheckpointError(why)
    tensors, aliases = model_layout(model)
    tree: dict[str, Any] = {"model": tensors}
    plain: dict[KeyPath, str] = {}
    if optimizers:
        tree["optimizer"], plain = named_state(model, optimizers)
    flat, paths = flatten(tree)
    layouts = {name: layout for name, value in flat.items() if (layout := layout_of(value)) is not None}
    plain_layouts = {name: plain[path[1:]] for name, path in paths.items() if path[1:] in plain}
    layouts.update(plain_layouts)
    for name, value in flat.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise CheckpointError(f"{name} is on the meta device: it has no values to save")
    # Copied: some state dicts hold the lists that the next step changes, while a thread may still write this.
    parts = {name: copy.deepcopy(state_of(value)) for name, value in small.items() if value is not None}
    if not trusted:
        check_loadable({**{n: v for n, v in flat.items() if not isinstance(v, torch.Tensor)}, **parts})
    signature = tuple(
        (name, value.dtype, value.shape, layouts.get(name)) if isinstance(value, torch.Tensor) else (name,)
        for name, value in flat.items()
    )
    return State(
        tree, flat, paths, aliases, tensors, parts, rng_state(device_of(model)), signature, layouts, plain_layouts
    )


def state_of(part: Any) -> Any:
    """What an object with `state_dict()` says, or the value itself."""
    return part.state_dict() if hasattr(part, "state_dict") else part


def flatten(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Leaves and their paths by dotted name. Lists are opened where they hold mappings or tensors, as DCP does."""
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
                raise CheckpointError(f"two entries are named {name}: by {paths[name]} and by {path}")
            flat[name] = value
            paths[name] = path

    visit((), tree)
    return flat, paths


def _opens(value: Any) -> bool:
    is_opened = isinstance(value, Mapping | torch.Tensor | Source | Shard)
    return is_opened or (isinstance(value, list) and any(map(_opens, value)))


def nest(paths: Mapping[str, KeyPath], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The tree again; what was a list becomes one. Raises `CorruptFile` for paths that no tree has together."""
    tree = _Node()
    for name, value in leaves.items():
        *outer, last = paths[name]
        node: Any = tree
        for key in outer:
            node = node.setdefault(key, _Node())
            if type(node) is not _Node:
                raise CorruptFile(f"the path of {name} leads through another entry")
        if last in node:
            raise CorruptFile(f"the path of {name} is that of another entry, too")
        node[last] = value
    return _with_lists(tree, "")


class _Node(dict):
    """Of the tree, and not of a leaf that happens to be a mapping."""


def _with_lists(node: Any, where: str) -> Any:
    if type(node) is not _Node:
        return node
    inner = {key: _with_lists(value, f"{where}.{key}") for key, value in node.items()}
    if not any(isinstance(key, int) for key in inner):
        return inner
    if not all(isinstance(key, int) for key in inner) or sorted(inner) != list(range(len(inner))):
        raise CorruptFile(f"the list {where[1:]} has the places {sorted(map(str, inner))[:20]}")
    return [inner[index] for index in range(len(inner))]
