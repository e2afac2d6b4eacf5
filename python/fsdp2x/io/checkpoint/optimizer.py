"""Extracts optimizer state under parameter names and restores it, without stepping the optimizer.

The form is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, so checkpoints look like
FSDP2's: `{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}`. Unlike there, nothing is
invented: an optimizer that has not stepped has no state and gets none, and its step counts stay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, empty

from fsdp2x.base import torch_private
from fsdp2x.base.failures import CheckpointError
from fsdp2x.io.checkpoint.trees import mismatch, same
from fsdp2x.io.formats.dcp import KeyPath
from fsdp2x.lifecycle.tree import named_params
from fsdp2x.sharding.offload import host_state
from fsdp2x.sharding.wrap import clean_name

Optimizers = Sequence[torch.optim.Optimizer]


def as_optimizers(optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None) -> Optimizers:
    """Returns the argument as a list. Raises `TypeError`."""
    if optimizer is None:
        return []
    found = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(f"checkpoint: expected a torch.optim.Optimizer or a list of them, got {type(one).__name__}")
    return found


# In a layout: the optimizer keeps a plain tensor with the shape of its shard or of the parameter.
_PLAIN = "plain"


def named_state(model: torch.nn.Module, optimizers: Optimizers) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Returns state and groups of all optimizers, and the layouts of plain tensors they keep for DTensors."""
    names = _names(model)
    layouts: dict[KeyPath, str] = {}
    state: dict[str, Any] = {}
    groups = []
    for optimizer in optimizers:
        widened = getattr(optimizer, "_widened_state", lambda param, state=optimizer.state: dict(state[param]))
        for index, group in enumerate(optimizer.param_groups):
            members = [_name(names, param, index, position) for position, param in enumerate(group["params"])]
            for name, param in zip(members, group["params"], strict=True):
                if optimizer.state.get(param):
                    state[name] = widened(param)
                    if isinstance(param, DTensor):
                        plain = {key: value for key, value in state[name].items() if _is_plain(value)}
                        state[name] = {**state[name], **{key: _cut(param, v, name, key) for key, v in plain.items()}}
                        for key in plain:
                            layout = f"{_PLAIN} {layout_of(state[name][key]) or ''}".strip()
                            layouts["state", name, str(key)] = layout
            groups.append({**_settings(group), "params": members})
    return {"state": state, "param_groups": groups}, layouts


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.ndim > 0


def _cut(param: DTensor, value: torch.Tensor, name: str, key: Any) -> torch.Tensor:
    """Returns ``value``, which an optimizer keeps for ``param``: as a DTensor if it has the shape of the shard."""
    local = torch_private.local_tensor(param)
    if value.shape == local.shape and key != "step":
        return torch_private.dtensor_like(param, value)
    if value.shape == param.shape or value.numel() == 1:
        return value
    raise CheckpointError(
        f"the optimizer's {key} of {name} is a plain tensor of shape {list(value.shape)}, neither that of the "
        f"parameter, {list(param.shape)}, nor that of its shard here, {list(local.shape)}. Keep it as a DTensor, or "
        "save without the optimizer."
    )


@dataclass(frozen=True)
class Group:
    """A parameter group of an optimizer in this process, with the names of its parameters."""

    optimizer: torch.optim.Optimizer
    settings: dict[str, Any]
    members: list[str]


# Group settings that distinguish the rules of torch.optim and fsdp2x. Schedulers and users add others.
_RULE_SETTINGS = frozenset(
    "alpha amsgrad beta2_decay betas centered d dampening eps etas lambd lr_decay momentum momentum_decay nesterov rho "
    "step_sizes t0".split()
)


class Restore:
    """Optimizers that take over a saved state: what they expect, and the memory to read it into."""

    def __init__(self, model: torch.nn.Module, optimizers: Optimizers):
        names = _names(model)
        self.optimizers = optimizers
        self.groups = [
            Group(optimizer, group, [_name(names, p, index, position) for position, p in enumerate(group["params"])])
            for optimizer in optimizers
            for index, group in enumerate(optimizer.param_groups)
        ]
        self.params: dict[str, torch.Tensor] = {}
        self._owners: dict[str, torch.optim.Optimizer] = {}
        for group in self.groups:
            self.params.update(zip(group.members, group.settings["params"], strict=True))
            self._owners.update(dict.fromkeys(group.members, group.optimizer))

    def differences(self, saved: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Returns parameters that only this optimizer has, and parameters that only the saved one has."""
        known = {name for group in saved["param_groups"] for name in group["params"]}
        return [name for name in self.params if name not in known], sorted(known - set(self.params))

    def target(self, name: str, shape: Sequence[int], dtype: torch.dtype, layout: str | None) -> torch.Tensor:
        """Returns memory for one saved tensor, cut like its parameter if it has the same shape."""
        param = self.params[name].detach()
        if layout == _PLAIN:
            return torch.empty(tuple(shape), dtype=dtype, device=param.device)
        if tuple(shape) == tuple(param.shape) and len(shape) > 0:
            if isinstance(param, DTensor) and host_state(self.params[name]) is not None:
                return torch_private.dtensor_like(param, torch.empty(param.to_local().shape, dtype=dtype, device="cpu"))
            return torch.empty_like(param, dtype=dtype)
        if isinstance(param, DTensor) and layout:
            placements = [_placement(text, name, len(shape)) for text in layout.split()]
            if len(placements) == param.device_mesh.ndim:
                return empty(*shape, dtype=dtype, device_mesh=param.device_mesh, placements=placements)
        return torch.empty(tuple(shape), dtype=dtype, device=param.device if len(shape) else "cpu")

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` for a state that the optimizers cannot have. Changes nothing.

        `saved` has (shape, dtype) in place of tensors. Settings must be of the same kind as here. Optimizers of torch
        and fsdp2x keep tensors of their parameter's shape and single numbers, under the same keys for all parameters
        of a group. Nothing is known of other optimizers.
        """
        for group in self.groups:
            for home in _homes(group.members, saved["param_groups"]):
                _require_same_rule(home, group.settings)
                for key in home.keys() & group.settings.keys():
                    if wrong := mismatch(home[key], group.settings[key], f"{key} of the optimizer's groups"):
                        raise CheckpointError(wrong)
            if not _keeps_shapes(group.optimizer):
                continue
            kinds: dict[str, Any] = {}
            for name in group.members:
                if saved["state"].get(name):
                    kinds[name] = self._kinds(name, saved["state"][name])
            odd = [name for name in kinds if kinds[name] != kinds[next(iter(kinds))]]
            if odd and len(_homes(group.members, saved["param_groups"])) == 1:
                raise CheckpointError(
                    f"the optimizer's saved state of {odd[0]} has {dict(kinds[odd[0]])}, but that of "
                    f"{next(iter(kinds))} has {dict(kinds[next(iter(kinds))])}"
                )

    def _kinds(self, name: str, state: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
        """Returns the kind of each key's value. Raises `CheckpointError` for an impossible one."""
        param = self.params[name]
        kinds = []
        for key, value in sorted(state.items()):
            where = f"the optimizer's {key} of {name}"
            if not isinstance(value, tuple):
                if value is not None and not isinstance(value, int | float):
                    raise CheckpointError(f"{where}: expected a tensor or a number, got {str(value)[:80]!r}")
                kinds.append((str(key), "a number"))
                continue
            shape, dtype = value
            if math.prod(shape) != 1 and shape != tuple(param.shape):
                raise CheckpointError(f"{where} has shape {list(shape)} there, but the parameter {list(param.shape)}")
            if not dtype.is_floating_point and not param.is_complex():
                raise CheckpointError(f"{where}: expected a floating-point dtype, got {dtype}")
            kinds.append((str(key), "a tensor" if shape and param.ndim else "a number"))
        return tuple(kinds)

    def mixed_groups(self, saved_groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns a sentence for each parameter group whose members had different settings."""
        return [
            f"the parameter group of {group.members[0]} mixes {len(homes)} saved groups with different settings"
            for group in self.groups
            if len(homes := _homes(group.members, saved_groups)) > 1
        ]

    def apply(self, saved: Mapping[str, Any]) -> list[str]:
        """Gives the state to the optimizers. A group takes the settings of the saved group of its parameters, or keeps
        its own if there are several. Returns a sentence for each of the latter.
        """
        for optimizer in self.optimizers:
            groups: list[dict[str, Any]] = []
            state: dict[int, Any] = {}
            count = 0
            for group in self.groups:
                if group.optimizer is not optimizer:
                    continue
                homes = _homes(group.members, saved["param_groups"])
                indices = range(count, count + len(group.members))
                count += len(group.members)
                settings = homes[0] if len(homes) == 1 else {}
                groups.append({**_settings(group.settings), **settings, "params": list(indices)})
                found = {index: saved["state"].get(name) for index, name in zip(indices, group.members, strict=True)}
                state.update({index: one for index, one in found.items() if one is not None})
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        return self.mixed_groups(saved["param_groups"])


def _keeps_shapes(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether all its state is known to be single numbers and tensors of the parameter's shape."""
    theirs = next(cls for cls in type(optimizer).__mro__ if not cls.__module__.startswith("fsdp2x."))
    return theirs.__module__.startswith("torch.optim.") and theirs.__name__ not in ("Adafactor", "LBFGS", "Optimizer")


def _require_same_rule(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` if a saved group has the settings of another rule, which it would take over."""
    theirs, ours = (settings.keys() & _RULE_SETTINGS for settings in (saved, here))
    decoupled = {settings.get("decoupled_weight_decay") for settings in (saved, here)} - {None}
    if theirs != ours or len(decoupled) > 1:
        raise CheckpointError(
            f"another optimizer was saved: its groups have {', '.join(sorted(theirs)) or 'none of these'}"
            f"{' and decoupled weight decay' if saved.get('decoupled_weight_decay') else ''}, but this one's have "
            f"{', '.join(sorted(ours)) or 'none'}. Build the optimizer that was saved, or load without an optimizer."
        )


def _homes(members: Sequence[str], saved_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the different settings of the saved groups that the members were in."""
    wanted = set(members)
    found: list[dict[str, Any]] = []
    for group in saved_groups:
        settings = _settings(group)
        if not wanted.isdisjoint(group["params"]) and not any(same(settings, other) for other in found):
            found.append(settings)
    return found


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def require_same_cut(layouts: Sequence[Mapping[str, str]], what: str) -> None:
    """Compares the layouts of plain tensors, by rank. One rank may hold all rows of a small parameter."""
    seen: dict[str, tuple[int, str]] = {}
    for rank, of_rank in enumerate(layouts):
        for name, layout in of_rank.items():
            first, known = seen.setdefault(name, (rank, layout))
            if known != layout:
                shard, other = (first, rank) if " " in known else (rank, first)
                raise CheckpointError(
                    f"{what}: {name} is a plain tensor with the shape of the shard on rank {shard}, but with that of "
                    f"the parameter on rank {other}. Keep it as a DTensor, or save without the optimizer."
                )


def own_form(tensor: torch.Tensor, layout: str | None) -> torch.Tensor:
    """Returns a tensor that was saved in ``layout`` in the form that the optimizer keeps."""
    if isinstance(tensor, DTensor) and layout is not None and layout.startswith(f"{_PLAIN} "):
        return torch_private.local_tensor(tensor)
    return tensor


def layout_of(tensor: torch.Tensor) -> str | None:
    """Returns how a tensor is cut, an entry per mesh axis, such as "S(0)" or "R S(1)". None for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return None
    return " ".join(_text(placement) for placement in tensor.placements)


def _text(placement: Any) -> str:
    if type(placement) is Shard:
        return f"S({placement.dim})"
    return "R" if placement == Replicate() else str(placement).replace(" ", "")


def _placement(text: str, name: str, num_dims: int) -> Any:
    if text == "R":
        return Replicate()
    if (found := re.fullmatch(r"S\((\d{1,2})\)", text)) and int(found[1]) < num_dims:
        return Shard(int(found[1]))
    raise CheckpointError(f"the optimizer state of {name} was cut as {text}, which this run cannot reproduce")


def _names(model: torch.nn.Module) -> dict[int, str]:
    return {id(param): clean_name(name) for name, param, _ in named_params(model)}


def _name(names: Mapping[int, str], param: torch.Tensor, group: int, position: int) -> str:
    if id(param) not in names:
        raise CheckpointError(
            f"the optimizer steps a parameter of shape {tuple(param.shape)} (number {position} of group {group}) that "
            "the model does not have. Build it over model.parameters() after sharding, or call "
            "fsdp2x.rebind_optimizer."
        )
    return names[id(param)]
