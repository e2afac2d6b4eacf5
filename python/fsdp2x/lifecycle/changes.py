"""Follows changes of a sharded model: parameters that get new memory, are loaded, or are registered later.

Operations that give parameters new memory without the engine raise at a wrong moment, or are undone or followed.

Parameters that modules register after ``fully_shard`` (adapters, new heads) are replicated instead of sharded. Their
``nn.Parameter`` objects stay the same, so an optimizer that was built from them steps the right tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from fsdp2x.base import optimizer_hooks, torch_private
from fsdp2x.base.agreement import agreement_of
from fsdp2x.base.collectives import explained
from fsdp2x.base.failures import all_units, exchange
from fsdp2x.lifecycle import replicas
from fsdp2x.lifecycle.tree import depth_of, get_state
from fsdp2x.lifecycle.unit import ShardedUnit, mark_managed, refuse_unreduced
from fsdp2x.sharding import collect
from fsdp2x.sharding import spec as specs
from fsdp2x.sharding.collect import OwnedParam, Owners, Placed
from fsdp2x.sharding.mesh import ShardGroup, covering_group
from fsdp2x.sharding.param_group import ShardedParamGroup
from fsdp2x.sharding.shapes import keeps_dtype
from fsdp2x.sharding.sharded_param import ShardedParam, user_attributes
from fsdp2x.sharding.wrap import unsharded_class

Convert = Callable[[torch.Tensor], torch.Tensor]


class _RefuseSharing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.share_memory_ and isinstance(args[0], DTensor):  # torch would read a null pointer
            raise NotImplementedError(
                "fsdp2x: share_memory() cannot share sharded parameters with other processes. Share copies from "
                "fsdp2x.full_tensors(model), or call share_memory_() on each param.to_local()."
            )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def moving(state: ShardedUnit, fn: Convert) -> Iterator[None]:
    """Wraps a block in which the unit's modules apply ``fn`` to parameters: keeps attributes, then moves the shards.

    Raises:
        RuntimeError: the unit cannot change now. Nothing has changed.
        NotImplementedError: ``fn`` shares the memory of parameters with other processes.
    """
    _refuse_moment(state, fn)
    for group in state.groups:
        group.take_grad_dtypes()
    state.reshard()
    # First, because a gradient that other code also holds cannot be exchanged.
    for group in state.groups:
        if group.engine is not None:
            group.engine.forget_gradients()
    kept = [user_attributes(sharded.param) for sharded in state.params]
    # Gradients of parameters with their own grad_dtype keep their dtype.
    grads = [(sharded, sharded.param.grad) for sharded in state.params if sharded.spec.grad_dtype]
    for sharded, _ in grads:
        sharded.param.grad = None
    try:
        with _RefuseSharing():
            yield
    finally:  # also for what fn changed before it raised
        try:
            adopt_all(state.groups)
        finally:
            for sharded, attributes in zip(state.params, kept, strict=True):
                sharded.param.__dict__.update({**attributes, **user_attributes(sharded.param)})
            for sharded, grad in grads:
                sharded.param.grad = None if grad is None else grad.to(sharded.param.device)
    if getattr(fn, "__qualname__", "").startswith("Module.to_empty."):
        buffers = (buffer for module in state.modules for buffer in module.buffers())
        state.raw_buffers = [(weakref.ref(buffer), buffer._version) for buffer in buffers]


def _refuse_moment(state: ShardedUnit, fn: Convert) -> None:
    units, root = state.units_of_root, state.root
    is_running = root is not None and root.in_backward
    if root is not None and root.in_forward:  # an interrupted forward has no call on the stack
        is_running = any(depth_of(module) for one in units for module in one.modules)
    if is_running:
        if state.made_unit.param_state != "SHARDED" or _changes(state, fn):
            raise RuntimeError(
                f"fsdp2x: unit '{state.name}' cannot be moved or converted during forward or backward. Do it between "
                "two steps."
            )
    elif any(group.holds_unreduced for one in units for group in one.groups) and _changes(state, fn):
        refuse_unreduced(units)


def _changes(state: ShardedUnit, fn: Convert) -> bool:
    """Returns whether ``fn`` changes dtype or device of parameters, tried on empty tensors."""
    for dtype, device in {(sharded.param.dtype, sharded.param.device) for sharded in state.params}:
        changed = fn(torch.empty(0, dtype=dtype, device=device))
        if (changed.dtype, changed.device) != (dtype, device):
            return True
    return False


def adopt_all(groups: Iterable[ShardedParamGroup]) -> None:
    """Makes each of ``groups`` adopt its parameters, even if others raise. Then raises the first error."""
    errors = []
    for group in groups:
        try:
            _vacate(group.params)
            group.adopt()
        except (ValueError, RuntimeError) as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _vacate(places: Iterable[ShardedParam]) -> None:
    """Moves parameters that occupy the places of others, as after ``swap_tensors``, into separate memory.

    Otherwise a shard that returns to its place would overwrite them.
    """
    owners = {one.storage._cdata: one for one in places if one.storage is not None and not one.was_moved(one.local)}
    for state in all_units if owners else ():
        for guest in state.params:
            local = guest.local
            if not guest.is_pooled or local.is_meta:
                continue
            if owners.get(local.untyped_storage()._cdata, guest) is not guest:
                torch_private.set_local_tensor(guest.param, local.clone())


def warn_of_raw_buffers(root: ShardedUnit) -> None:
    """Warns once about buffers that were not written since ``to_empty``. Writes through ``.data`` are not noticed."""
    raw = [entry for state in root.shared.tree for entry in state.raw_buffers]
    if not raw:
        return
    for state in root.shared.tree:
        state.raw_buffers = []
    untouched = {id(buffer) for ref, version in raw if (buffer := ref()) is not None and buffer._version == version}
    names = [name for name, buffer in root.modules[0].named_buffers() if id(buffer) in untouched and buffer.numel()]
    if names:
        warnings.warn(
            f"fsdp2x: nothing has written the buffers {', '.join(map(repr, names))} since to_empty(), so they hold "
            "undefined values. Checkpoints do not contain non-persistent buffers. Compute them again before the first "
            "forward, or load the model with fsdp2x.from_pretrained.",
            stacklevel=2,
        )


def watch_loading(state: ShardedUnit, modules: Iterable[nn.Module]) -> None:
    """Makes state dicts of ``modules`` read from, and load into, the sharded parameters of ``state``."""
    weak: Any = weakref.ref(state)  # the modules keep the unit alive while hooks run

    def before_load(*args: Any) -> None:
        optimizer_hooks.refuse_swapped("load_state_dict", (param.param for param in weak().params))
        for group in weak().groups:
            group.take_grad_dtypes()
        weak().reshard()

    def after_load(*args: Any) -> None:
        adopt_all(weak().groups)
        replicas.check_again(weak())

    for module in modules:
        module.register_state_dict_pre_hook(lambda *args: weak().reshard())
        module._register_load_state_dict_pre_hook(before_load)
        module.register_load_state_dict_post_hook(after_load)


# --- parameters that are registered after fully_shard ---


def replicated_ranks(ranks: ShardGroup) -> ShardGroup:
    """Returns the ranks of a unit as mutual replicas. Collective at the first call for a mesh of several axes."""
    if ranks.group is None and not ranks.has_replicate_axis:
        return ranks
    group = ranks.group if ranks.mesh.ndim == 1 and ranks.group is not None else covering_group(ranks.mesh)
    return dataclasses.replace(
        ranks, group=None, rank=0, world=1, replicate_group=group, replicas=dist.get_world_size(group)
    )


class ReplicatedParamGroup(ShardedParamGroup):
    """A group with one shard and as many replicas as ranks.

    The ``nn.Parameter`` objects stay plain tensors and move into the group's pool. While the unit is gathered, modules
    register other parameters in the compute dtype.
    """

    is_replicated = True
    is_shared = False  # whether every rank has the first rank's values

    def _shard(self, placed: Placed) -> None:
        param, owners = placed.owned.param, placed.owned.owners
        spec = specs.replicated_spec(param, self.ranks)
        keeps = keeps_dtype(param, self.policy)
        self.params.append(ShardedParam(param, Owners(owners), spec, param.shape, user_attributes(param), keeps, False))

    def _take_places(self, placed: list[Placed]) -> None:
        for sharded in self.params:
            sharded.original = optimizer_hooks.new_number()

    def _is_replacement(self, current: nn.Parameter, sharded: ShardedParam) -> bool:
        return type(current) is nn.Parameter and current is not sharded.param

    @torch.no_grad()
    def share(self) -> None:
        """Gives every rank the first rank's values. Collective, once."""
        if self.is_shared or self.pool is None:
            return
        group = self.ranks.replicate_group
        if group is not None and self.ranks.replicas > 1:
            values = self.pool.to(self.ranks.device)
            with torch_private.unobserved(), explained(group, "broadcast of parameters added after fully_shard"):
                dist.broadcast(values, src=dist.get_global_rank(group, 0), group=group)
            if values is not self.pool:
                self.pool.copy_(values)
        self.is_shared = True


def snapshot(root: nn.Module) -> tuple:
    """Returns the modules of ``root`` and the number of parameters of each, for ``_C.is_same_tree``."""
    entries: list = []
    for module in root.modules():
        num_params = sum(param is not None for param in module._parameters.values())
        entries += [module._modules, tuple(module._modules.values()), module._parameters, num_params]
    return tuple(entries)


def adopt_late(root: ShardedUnit, tree: Sequence[ShardedUnit]) -> bool:
    """Gives each unit in ``tree`` a group of the parameters that its modules registered since the last call.

    If parameters have left the model, it dissolves groups of earlier calls and adopts the remaining parameters again.
    All units must be sharded. Not collective: ``_make_root`` and ``share_late`` inform the engine and other ranks.

    Returns:
        Whether the engine and the other ranks must be informed.

    Raises:
        ValueError: a trainable parameter is a scalar.
        NotImplementedError: a parameter is not contiguous, or is trainable but its dtype or class cannot be reduced.
    """
    present = set(map(id, root.modules[0].modules()))
    dissolved = [_dissolve(state, present) for state in tree]
    changed = [_adopt_in(state, entries) for state, entries in _find(root, tree)]
    return any(dissolved) or bool(changed) or any(not group.is_shared for group in late_groups(tree))


def meet(ranks: ShardGroup) -> None:
    """Waits until all ranks have seen a change. Raises Diverged if a rank continues without it."""
    for group in (ranks.group, ranks.replicate_group):
        if agreement_of(group) is not None:
            exchange(None, group, "adoption of parameters that were added after fully_shard")


def share_late(tree: Sequence[ShardedUnit]) -> None:
    """Gives late parameters the first rank's values. Collective, once for each group."""
    for group in late_groups(tree):
        group.share()


def late_groups(tree: Sequence[ShardedUnit]) -> list[ReplicatedParamGroup]:
    """Returns the groups of adopted parameters of all units."""
    return [group for state in tree for group in state.groups if isinstance(group, ReplicatedParamGroup)]


def _dissolve(state: ShardedUnit, present: set[int]) -> bool:
    """Drops late groups that lost a parameter's module or name, and forgets deleted names."""
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


def _find(root: ShardedUnit, tree: Sequence[ShardedUnit]) -> list[tuple[ShardedUnit, list[OwnedParam]]]:
    """Returns units with their late parameters, and registers new ties to parameters of the units."""
    groups = [group for state in tree for group in state.groups]
    records = {id(sharded.param): (group, i) for group in groups for i, sharded in enumerate(group.params)}
    homes: dict[int, tuple[OwnedParam, set[int]]] = {}
    for state, module, name, param in _unknown(tree):
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
        # The root contains all units, so it gathers what several of them share.
        found.setdefault(states.pop() if len(states) == 1 else id(root), []).append(entry)
    return [(state, found[id(state)]) for state in tree if id(state) in found]


def _unknown(tree: Sequence[ShardedUnit]) -> Iterator[tuple[ShardedUnit, nn.Module, str, nn.Parameter]]:
    """Yields the parameters that modules have registered under names that no unit knows."""
    places = [(ref(), names) for state in tree for ref, names in state.places]
    known = {(id(module), name) for module, names in places if module is not None for name in names}
    known |= {(id(module), name) for s in tree for sharded in s.params for module, name in sharded.owners}

    def has_manager(module: nn.Module) -> bool:
        return get_state(module) is not None or isinstance(module, DistributedDataParallel)

    for state in tree:
        for module in collect.managed_modules(state.modules, has_manager):
            for name, param in module._parameters.items():
                if param is not None and (id(module), name) not in known:
                    yield state, module, name, param


def refuse_made_in_forward(tree: Sequence[ShardedUnit]) -> None:
    """Raises RuntimeError if modules have registered trainable parameters since the forward began."""
    sharded = {id(sharded.param) for state in tree for sharded in state.params}
    for _, module, name, param in _unknown(tree):
        if param.requires_grad and id(param) not in sharded:
            raise RuntimeError(
                f"fsdp2x: {unsharded_class(module).__name__} registered the parameter {name!r} in a forward. The "
                "gradient of this step would differ by rank, because only the next forward adopts the parameter. Call "
                "the model once under torch.no_grad() before the first step."
            )


def _refuse(param: nn.Parameter, what: str) -> None:
    what = f"fsdp2x: {what} was added after fully_shard and is a"
    if type(param) is nn.Parameter:
        raise ValueError(
            f"{what} scalar. Change it to a 1D tensor with one element, or add it before fully_shard and pass it in "
            "ignored_params."
        )
    raise NotImplementedError(
        f"{what} {type(param).__name__}. Its gradients would not be reduced. Add it before fully_shard, or make it an "
        "nn.Parameter over a plain tensor."
    )


def _tie(group, index: int, state: ShardedUnit, module: nn.Module, name: str) -> None:
    """Registers a parameter of a unit in one more place, if that unit is gathered there."""
    home = group.unit_state()
    inside = {id(inner) for outer in home.modules for inner in outer.modules()}
    if all(id(one) in inside for one in state.modules):
        group.add_owner(index, module, name)
        watch_loading(state, [module])


def _adopt_in(state: ShardedUnit, entries: list[OwnedParam]) -> None:
    settings = state.settings
    if not settings.offload.of_shards:
        collect.move_to_device([entry.param for entry in entries], state.ranks.device)
    ranks = replicated_ranks(state.ranks)
    with torch.inference_mode(False):
        placed = [Placed(entry, ranks, 0, settings.offload) for entry in entries]
        group = ReplicatedParamGroup(placed, settings.mp_policy)
    group.unit_state = weakref.ref(state)
    state.groups.append(group)
    modules = list({id(module): module for entry in entries for module, _ in entry.owners}.values())
    watch_loading(state, modules)
    state.hooks.add_backward_hooks([weakref.ref(hooks) for hooks in torch_private.backward_hooks(modules)])
    for module in modules:
        mark_managed(module)
