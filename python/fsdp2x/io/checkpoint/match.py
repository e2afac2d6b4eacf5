"""Finds model and optimizer in the tree of a checkpoint, and matches them with those of this process.

Other programs name the top of their trees as they like ("model", "model_state.model", "optim", nothing at all). So the
model is the node with the names of its tensors, and the optimizer the one with `state` and `param_groups`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp2x.base.failures import CheckpointError, CorruptFile
from fsdp2x.io.checkpoint.optimizer import Restore, own_form
from fsdp2x.io.checkpoint.sources import Leaf
from fsdp2x.io.checkpoint.trees import mismatch

Node = Mapping[str, Any]
_DEPTH = 4


@dataclass
class Found:
    """Tensors to read and their targets, values that are not tensors, and mismatches."""

    targets: dict[Leaf, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


@dataclass
class FoundState(Found):
    """The same for an optimizer: `state` and `groups` by parameter name, with a `Leaf` where `targets` has a tensor."""

    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    layouts: Mapping[str, str] = field(default_factory=dict)

    def saved(self) -> dict[str, Any]:
        """Returns the state in the form of `optimizer.named_state`, after the targets were read."""

        def value(item: Any) -> Any:
            return own_form(self.targets[item], self.layouts.get(item.name)) if isinstance(item, Leaf) else item

        return {
            "state": {name: {key: value(item) for key, item in one.items()} for name, one in self.state.items()},
            "param_groups": [{key: value(item) for key, item in group.items()} for group in self.groups],
        }


def find_parts(tree: Mapping[str, Any], names: Collection[str]) -> tuple[Node | None, Node | None]:
    """Returns the node of the model, whose tensors have these names, and that of the optimizer."""
    best: tuple[int, Node | None] = (0, None)
    optimizer = None

    def visit(node: Any, depth: int) -> None:
        nonlocal best, optimizer
        if not isinstance(node, Mapping) or depth > _DEPTH:
            return
        if "param_groups" in node and isinstance(node.get("state", {}), Mapping):
            optimizer = optimizer or node
            return
        if any(key.startswith("param_groups.") for key in node if isinstance(key, str)):
            optimizer = optimizer or node
            return
        hits = sum(name in node for name in names)
        if hits > best[0]:
            best = (hits, node)
        for child in node.values():
            visit(child, depth + 1)

    visit(tree, 0)
    model = best[1]
    if model is None:
        empty = tree.get("model")
        model = empty if isinstance(empty, Mapping) else None
    return model, optimizer


def match_model(node: Node | None, tensors: Mapping[str, Any], aliases: Mapping[str, str], strict: bool) -> Found:
    """Returns what to read for the model. Another shape raises even without `strict`."""
    found = Found()
    saved = {name: value for name, value in (node or {}).items() if not isinstance(value, Mapping)}
    other_names: dict[str, list[str]] = {}
    for alias, kept in aliases.items():
        other_names.setdefault(kept, []).append(alias)
    for name, mine in tensors.items():
        known = next((one for one in (name, *other_names.get(name, [])) if one in saved), None)
        if known is None:
            found.missing.append(name)
            continue
        leaf = saved[known]
        if not isinstance(mine, torch.Tensor):
            if isinstance(leaf, Leaf):
                found.objects[name] = found.targets[leaf] = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
            elif wrong := mismatch(leaf, mine, name):
                raise CheckpointError(f"checkpoint of another model: {wrong}")
            else:
                found.objects[name] = leaf
            continue
        if not isinstance(leaf, Leaf) or leaf.shape != tuple(mine.shape):
            got = list(leaf.shape) if isinstance(leaf, Leaf) else type(leaf).__name__
            raise CheckpointError(
                f"checkpoint of another model: {name} has shape {got} there, but {list(mine.shape)} in this model"
            )
        if leaf.dtype != mine.dtype and strict:
            there, here = (str(dtype).removeprefix("torch.") for dtype in (leaf.dtype, mine.dtype))
            raise CheckpointError(
                f"checkpoint of another model: {name} has dtype {there} there, but {here} in this model. "
                "strict=False converts it."
            )
        found.targets[leaf] = mine
    found.unexpected = [name for name in saved if name not in tensors and name not in aliases]
    return found


def match_optimizer(node: Node | None, restore: Restore, layouts: Mapping[str, str]) -> FoundState:
    """Returns what to read for the optimizers."""
    found = FoundState(layouts=layouts)
    if node is None:
        found.missing = ["optimizer"]
        return found
    saved = _by_group(node, restore)
    _check_form(saved)
    described = {
        name: {key: (item.shape, item.dtype) if isinstance(item, Leaf) else item for key, item in one.items()}
        for name, one in saved["state"].items()
    }
    groups = [{key: 0.0 if isinstance(item, Leaf) else item for key, item in g.items()} for g in saved["param_groups"]]
    restore.check({"state": described, "param_groups": groups})
    lacking, foreign = restore.differences(saved)
    found.missing = [f"optimizer state of {name}" for name in lacking]
    found.unexpected = [f"optimizer state of {name}" for name in foreign]
    found.groups = saved["param_groups"]
    for name, one in saved["state"].items():
        if name not in restore.params:
            continue
        found.state[name] = one
        for item in one.values():
            if isinstance(item, Leaf):
                layout = layouts.get(item.name)
                found.targets[item] = restore.target(name, item.shape, item.dtype, layout)
    for group in found.groups:
        for item in group.values():
            if isinstance(item, Leaf):
                found.targets[item] = torch.empty(item.shape, dtype=item.dtype, device="cpu")
    return found


def _check_form(saved: Mapping[str, Any]) -> None:
    """Raises `CorruptFile` unless it is an optimizer's state: states by key, and groups of settings with names."""
    state, groups = saved["state"], saved["param_groups"]
    if not all(isinstance(name, str) and isinstance(one, Mapping) for name, one in state.items()):
        raise CorruptFile("the optimizer's state does not have parameter names as keys")
    members: set[str] = set()
    for index, group in enumerate(groups):
        names = group.get("params")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CorruptFile(f"group {index} of the optimizer does not name its parameters: {str(names)[:100]}")
        twice = sorted(members.intersection(names)) or [name for name in names if names.count(name) > 1][:1]
        if twice:
            raise CorruptFile(f"{twice[0]} is in the optimizer's groups twice")
        members.update(names)


def _by_group(node: Node, restore: Restore) -> dict[str, Any]:
    """Returns the saved state in the form of `optimizer.named_state`. Also reads `flatten_optimizer_state_dict`'s."""
    if "param_groups" in node:
        groups = node["param_groups"]
        if not isinstance(groups, list | tuple) or not all(isinstance(group, Mapping) for group in groups):
            raise CorruptFile(f"the optimizer's groups are {str(groups)[:100]}")
        return {"state": dict(node.get("state", {})), "param_groups": [dict(group) for group in groups]}
    names = sorted(restore.params, key=len, reverse=True)
    state: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in node.items():
        section, _, rest = key.partition(".")
        name = next((one for one in names if rest.startswith(one + ".")), None)
        if name is None:
            name = rest.rpartition(".")[0]
        target = state if section == "state" else settings
        target.setdefault(name, {})[rest[len(name) + 1 :]] = value
    return {"state": state, "param_groups": [{**values, "params": [name]} for name, values in settings.items()]}
