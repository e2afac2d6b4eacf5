"""Adopts parameters that modules register after ``fully_shard``: adapters, new heads. Finds them, and owns nothing.

They are replicated instead of sharded, so that the ``nn.Parameter`` objects stay what they were: an optimizer that was
built from them before the adoption steps the right tensors.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp2x.runtime import collect, torch_private
from fsdp2x.runtime.agreement import agreement_of
from fsdp2x.runtime.collect import OwnedParam
from fsdp2x.runtime.hooks import watch_loading
from fsdp2x.runtime.mesh import ShardGroup
from fsdp2x.runtime.params import Placed
from fsdp2x.runtime.replicated import ReplicatedParams, replicated_ranks
from fsdp2x.runtime.tree import get_state

if TYPE_CHECKING:
    from fsdp2x.runtime.state import UnitState


def snapshot(root: nn.Module) -> tuple:
    """Returns the modules of ``root`` and the number of parameters of each, for ``_C.is_same_tree``."""
    entries: list = []
    for module in root.modules():
        num_params = sum(param is not None for param in module._parameters.values())
        entries += [module._modules, tuple(module._modules.values()), module._parameters, num_params]
    return tuple(entries)


def adopt_late(root: UnitState, tree: list[UnitState]) -> bool:
    """Gives each unit in ``tree`` a group of the parameters that its modules register since the last call.

    Dissolves groups of earlier calls if parameters have left the model, and adopts the remaining ones again. All units
    must be sharded. Local: ``_make_root`` and ``share_late`` tell the engine and the other ranks.

    Returns:
        Whether the engine and the other ranks must be told.

    Raises:
        ValueError: a trainable parameter is a scalar.
        NotImplementedError: a parameter is not contiguous, or trainable and of a dtype or class that cannot be reduced.
    """
    present = set(map(id, root.modules[0].modules()))
    dissolved = [_dissolve(state, present) for state in tree]
    changed = [_adopt_in(state, entries) for state, entries in _find(root, tree)]
    return any(dissolved) or bool(changed) or any(not group.is_shared for group in late_groups(tree))


def meet(ranks: ShardGroup) -> None:
    """Waits until all ranks have seen a change. Raises Diverged if one of them goes on without it."""
    for group in (ranks.group, ranks.replicate_group):
        if (agreement := agreement_of(group)) is not None:
            agreement.meet("adoption of parameters that were added after fully_shard")


def share_late(tree: list[UnitState]) -> None:
    """Gives late parameters the values of the first rank. Collective, once for each group of them."""
    for group in late_groups(tree):
        group.share()


def late_groups(tree: list[UnitState]) -> list[ReplicatedParams]:
    """The groups of adopted parameters of all units."""
    return [group for state in tree for group in state.groups if isinstance(group, ReplicatedParams)]


def _dissolve(state: UnitState, present: set[int]) -> bool:
    """Drops late groups with a parameter whose module or name is gone, and forgets deleted names."""
    places = [(ref, names, ref()) for ref, names in state.places]
    state.places = [(ref, names & module._parameters.keys()) for ref, names, module in places if module is not None]
    before = len(state.groups)
    state.groups = [
        group
        for group in state.groups
        if not group.is_replicated
        or all(
            module is not None and id(module) in present and name in module._parameters
            for sharded in group.params
            for module, name in map(sharded.owners.__getitem__, range(len(sharded.owners)))
        )
    ]
    return len(state.groups) < before


def _find(root: UnitState, tree: list[UnitState]) -> list[tuple[UnitState, list[OwnedParam]]]:
    """Returns units and their late parameters, and registers new ties to parameters of the units."""
    groups = [group for state in tree for group in state.groups]
    records = {id(sharded.param): (group, i) for group in groups for i, sharded in enumerate(group.params)}
    places = [(ref(), names) for state in tree for ref, names in state.places]
    known = {(id(module), name) for module, names in places if module is not None for name in names}
    known |= {(id(module), name) for s in tree for sharded in s.params for module, name in sharded.owners}
    homes: dict[int, tuple[OwnedParam, set[int]]] = {}
    for state in tree:
        for module in collect.managed_modules(state.modules, _is_managed_elsewhere):
            for name, param in module._parameters.items():
                if param is None or (id(module), name) in known:
                    continue
                if id(param) in records:
                    _tie(*records[id(param)], state, module, name)
                elif type(param) is nn.Parameter and param.dim() > 0:
                    entry, states = homes.setdefault(id(param), (OwnedParam(param), set()))
                    entry.owners.append((module, name))
                    states.add(id(state))
                elif param.requires_grad:
                    _refuse(param, f"parameter {name!r} of {type(module).__name__}")
    found: dict[int, list[OwnedParam]] = {}
    for entry, states in homes.values():
        # What several units share is gathered with the root, which contains them.
        found.setdefault(states.pop() if len(states) == 1 else id(root), []).append(entry)
    return [(state, found[id(state)]) for state in tree if id(state) in found]


def _refuse(param: nn.Parameter, what: str) -> None:
    what = f"fsdp2x: {what} was added after fully_shard and is a"
    if type(param) is nn.Parameter:
        raise ValueError(
            f"{what} scalar. Change it to a 1D tensor with one element, or add it before fully_shard and pass it in "
            "ignored_params."
        )
    raise NotImplementedError(
        f"{what} {type(param).__name__}, whose gradients would not be reduced. Add it before fully_shard, or make it "
        "an nn.Parameter over a plain tensor."
    )


def _is_managed_elsewhere(module: nn.Module) -> bool:
    return get_state(module) is not None or isinstance(module, DistributedDataParallel)


def _tie(group, index: int, state: UnitState, module: nn.Module, name: str) -> None:
    """Registers a parameter of a unit in one more place, if that unit is gathered there."""
    home = group.unit_state()
    inside = {id(inner) for outer in home.modules for inner in outer.modules()}
    if all(id(one) in inside for one in state.modules):
        group.add_owner(index, module, name)
        watch_loading(state, [module])


def _adopt_in(state: UnitState, entries: list[OwnedParam]) -> None:
    if not state.offload.of_shards:
        collect.move_to_device([entry.param for entry in entries], state.ranks.device)
    ranks = replicated_ranks(state.ranks)
    with torch.inference_mode(False):
        group = ReplicatedParams([Placed(entry, ranks, 0) for entry in entries], state.mp_policy, state.offload)
    group.unit_state = weakref.ref(state)
    state.groups.append(group)
    modules = list({id(module): module for entry in entries for module, _ in entry.owners}.values())
    watch_loading(state, modules)
    state.hooks.add_backward_hooks([weakref.ref(hooks) for hooks in torch_private.backward_hooks(modules)])
    for module in modules:
        module._is_fsdp_managed_module = module._fsdp_use_orig_params = True
