"""Optimizer state under parameter names, out of optimizers and back into them, without stepping either.

The form is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, so that stock checkpoints look
alike: `{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}`. Unlike there, nothing is made up
on the way: an optimizer that has not stepped has no state and gets none, and its step counts stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, empty

from fsdp2x.lookup import named_params
from fsdp2x.runtime import torch_private
from fsdp2x.runtime.offload import host_state

from .agree import CheckpointError
from .manifest import plain_name
from .values import same

Optimizers = Sequence[torch.optim.Optimizer]


def as_optimizers(optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None) -> Optimizers:
    """The argument as a list; raises `TypeError`."""
    if optimizer is None:
        return []
    found = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(f"checkpoint: expected a torch.optim.Optimizer or a list of them, got {type(one).__name__}")
    return found


def named_state(model: torch.nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """State and parameter groups of all optimizers together; raises `CheckpointError` for a foreign parameter."""
    names = _names(model)
    state: dict[str, Any] = {}
    groups = []
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            members = [_name(names, param, index, position) for position, param in enumerate(group["params"])]
            for name, param in zip(members, group["params"], strict=True):
                if optimizer.state.get(param):
                    state[name] = dict(optimizer.state[param])
            groups.append({**_settings(group), "params": members})
    return {"state": state, "param_groups": groups}


class Restore:
    """Optimizers that are to take over a saved state: what they expect, and the memory it is read into."""

    def __init__(self, model: torch.nn.Module, optimizers: Optimizers):
        names = _names(model)
        self.optimizers = optimizers
        self.groups = [
            (optimizer, [_name(names, param, index, position) for position, param in enumerate(group["params"])])
            for optimizer in optimizers
            for index, group in enumerate(optimizer.param_groups)
        ]
        self.params = {
            name: param
            for optimizer in optimizers
            for group in optimizer.param_groups
            for param in group["params"]
            for name in [names[id(param)]]
        }

    def differences(self, saved: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Parameters that the saved optimizer does not know, and those that only it knows."""
        known = {name for group in saved["param_groups"] for name in group["params"]}
        return [name for name in self.params if name not in known], sorted(known - set(self.params))

    def target(self, name: str, shape: Sequence[int], dtype: torch.dtype, layout: str | None) -> torch.Tensor:
        """Memory for one saved tensor: cut like its parameter where it has its shape."""
        param = self.params[name].detach()
        if tuple(shape) == tuple(param.shape) and len(shape) > 0:
            if host_state(self.params[name]) is not None:
                spec = torch_private.spec_with_dtype(torch_private.spec_of(param), dtype)
                return torch_private.dtensor(torch.empty(param.to_local().shape, dtype=dtype), spec)
            return torch.empty_like(param, dtype=dtype)
        if isinstance(param, DTensor) and layout:
            placements = [_placement(text, name) for text in layout.split()]
            if len(placements) == param.device_mesh.ndim:
                return empty(*shape, dtype=dtype, device_mesh=param.device_mesh, placements=placements)
        return torch.empty(tuple(shape), dtype=dtype, device=param.device if len(shape) else "cpu")

    def mixed_groups(self, saved_groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Parameter groups whose members had different settings, as sentences."""
        return [
            f"the parameter group of {members[0]} mixes {len(homes)} saved groups of different settings"
            for _, members in self.groups
            if len(homes := _homes(members, saved_groups)) > 1
        ]

    def apply(self, saved: Mapping[str, Any]) -> list[str]:
        """Hands the state to the optimizers. A group takes the settings of the saved group that its parameters were
        in, and keeps its own where there are several; those come back as sentences.
        """
        for optimizer in self.optimizers:
            groups: list[dict[str, Any]] = []
            state: dict[int, Any] = {}
            count = 0
            mine = (members for owner, members in self.groups if owner is optimizer)
            for group, members in zip(optimizer.param_groups, mine, strict=True):
                homes = _homes(members, saved["param_groups"])
                indices = range(count, count + len(members))
                count += len(members)
                settings = homes[0] if len(homes) == 1 else {}
                groups.append({**_settings(group), **settings, "params": list(indices)})
                found = {index: saved["state"].get(name) for index, name in zip(indices, members, strict=True)}
                state.update({index: one for index, one in found.items() if one is not None})
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        return self.mixed_groups(saved["param_groups"])


def _homes(members: Sequence[str], saved_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The different settings of the saved groups that the members were in."""
    wanted = set(members)
    return _distinct([group for group in saved_groups if not wanted.isdisjoint(group["params"])])


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _distinct(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The different settings among groups."""
    found: list[dict[str, Any]] = []
    for settings in map(_settings, groups):
        if not any(same(settings, other) for other in found):
            found.append(settings)
    return found


def layout_of(tensor: torch.Tensor) -> str | None:
    """How a tensor is cut, an entry per mesh axis, such as "S(0)" or "R S(1)"; None when it is not."""
    if not isinstance(tensor, DTensor):
        return None
    return " ".join(_text(placement) for placement in tensor.placements)


def _text(placement: Any) -> str:
    if type(placement) is Shard:
        return f"S({placement.dim})"
    return "R" if placement == Replicate() else str(placement).replace(" ", "")


def _placement(text: str, name: str) -> Any:
    if text == "R":
        return Replicate()
    if text.startswith("S(") and text[2:-1].isdigit():
        return Shard(int(text[2:-1]))
    raise CheckpointError(f"the optimizer state of {name} was cut as {text}, which cannot be made again here")


def _names(model: torch.nn.Module) -> dict[int, str]:
    return {id(param): plain_name(name) for name, param, _ in named_params(model)}


def _name(names: Mapping[int, str], param: torch.Tensor, group: int, position: int) -> str:
    if id(param) not in names:
        raise CheckpointError(
            f"the optimizer steps a parameter of shape {tuple(param.shape)} (number {position} of group {group}) that "
            "the model does not have; build it over model.parameters() after sharding, or call "
            "fsdp2x.rebind_optimizer"
        )
    return names[id(param)]
