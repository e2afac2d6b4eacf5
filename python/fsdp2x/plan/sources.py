"""Collects the facts of a memory plan from running units or from a planned model. Not collective."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fsdp2x.base import torch_private
from fsdp2x.base.collectives import may_replace
from fsdp2x.base.native import _C
from fsdp2x.lifecycle.comms import wire_names_of
from fsdp2x.lifecycle.tree import unit_states
from fsdp2x.lifecycle.unit import ShardedUnit
from fsdp2x.models.moe.parallel import cuts_columns, spreadable
from fsdp2x.plan.facts import GroupFacts, GroupSettings, ModelFacts, ParamUses, PlannedMesh, PlannedUnit, group_facts
from fsdp2x.plan.request import PlanRequest
from fsdp2x.sharding import collect
from fsdp2x.sharding.mesh import Keep, ShardGroup, post_forward_group
from fsdp2x.sharding.offload import HostOffloadPolicy, Offload, mode_of, named_offloads
from fsdp2x.sharding.param_group import ShardedParamGroup
from fsdp2x.sharding.shapes import ParamFacts, even_placement, keeps_dtype
from fsdp2x.sharding.transport import TransportKind, has_streams
from fsdp2x.sharding.wrap import UnitPlan, float32_ids, plan_units, should_auto_wrap, writes_in_forward

# ---- from the units of a sharded model


def facts_of_model(model: nn.Module) -> ModelFacts:
    """Returns the facts of a sharded model, before or after its first forward."""
    names = {id(module): name for name, module in model.named_modules()}
    states = unit_states(model)
    below = {id(inner) for state in states for inner in _below(state, states)}
    buffers = (one.comms.max_reduce_buffers for one in states if one.comms.max_reduce_buffers is not None)
    common = {  # settings of one unit that apply to its whole root
        "registers_memory": any(state.comms.memory is not None for state in states),
        "max_reduce_buffers": max(buffers, default=None),
    }
    units = tuple(_unit_of_state(state, names, common, is_root=id(state) not in below) for state in states)
    sharded = {(id(owner), name) for state in states for param in state.params for owner, name in param.owners}
    return ModelFacts(model, units, _unsharded_bytes(model, sharded))


def _below(outer: ShardedUnit, states: list[ShardedUnit]) -> list[ShardedUnit]:
    inside = {id(module) for top in outer.modules for module in top.modules()}
    return [state for state in states if state is not outer and id(state.modules[0]) in inside]


def _unit_of_state(state: ShardedUnit, names: dict[int, str], common: dict[str, Any], *, is_root: bool) -> PlannedUnit:
    options = state.options
    reshards = options.reshard_after_forward and not (is_root and state.auto_reshard)
    return PlannedUnit(
        name=", ".join(names.get(id(module), "?") or "<root>" for module in state.modules),
        modules=state.modules,
        uses=tuple(
            tuple(
                ParamUses.of(param.facts, param.owners, state.settings.mp_policy)
                for param in group.params
                if param.param.requires_grad
            )
            for group in state.groups
        ),
        groups=tuple(_group_of_state(state, group, common) for group in state.groups),
        num_params=len(state.params),
        num_elements=sum(param.local_size.numel() for param in state.params),
        reshards_after_forward=reshards,
        reshards_after_backward=options.reshard_after_backward,
        unshards_in_backward=options.unshard_in_backward,
    )


def _group_of_state(state: ShardedUnit, group: ShardedParamGroup, common: dict[str, Any]) -> GroupFacts:
    ranks, small_ranks = group.ranks, None
    comms, options = state.comms, state.options
    if state.post_forward_world is not None and not group.is_replicated:
        small = post_forward_group(ranks, state.post_forward_world)
        small_ranks = _ranks(small, state, group, common, replicas=1)
    wire_weights, wire_gradients = wire_names_of(options)
    settings = GroupSettings(
        offload=group.offload,
        gathers_packed=comms.all_gather is not None
        or (not has_streams(ranks.device) and any(param.extension is not None for param in group.params)),
        reduces_aside=comms.reduce_scatter is not None
        or has_streams(group.ranks.device)
        and (comms.all_reduce_hook is not None or common["registers_memory"]),
        reduces_unused=options.reduce_unused_params,
        averages=not options.force_sum_reduction and options.divide_factor in (None, ranks.world * ranks.replicas),
        may_rest=not any(param.is_alias for param in group.params),
        keeps_shards_apart=group.keeps_shards_apart,
        wire_weights=wire_weights,
        wire_gradients=wire_gradients,
    )
    return group_facts(
        [param.facts for param in group.params],
        [param.param.requires_grad for param in group.params],
        state.settings.mp_policy,
        _ranks(ranks, state, group, common, ranks.replicas, _replicas_share(state, group)),
        settings,
        small_ranks,
    )


def _ranks(
    ranks: ShardGroup,
    state: ShardedUnit,
    group: ShardedParamGroup,
    common: dict[str, Any],
    replicas: int,
    replicas_share: bool = False,
) -> PlannedMesh:
    return PlannedMesh(
        ranks.group,
        ranks.world,
        ranks.rank,
        _transport_of(state, group),
        replicas,
        replicas_share,
        gathers=_gathers_of(ranks),
        **common,
    )


def _gathers_of(ranks: ShardGroup) -> str:
    """Returns how the engine's next gathers run. Over gloo, a dispatch mode or a patch sees those of FSDP2."""
    how = torch_private.gathers_of(ranks.group, ranks.device)
    return "unknown" if how == "messages" and not may_replace() else how


def _transport_of(state: ShardedUnit, group: ShardedParamGroup) -> TransportKind:
    """Returns the transport in use, or before the first forward the choice of ``"auto"`` on one host."""
    if group.engine is not None:
        return group.transport
    if has_streams(group.ranks.device):
        return TransportKind.DEVICE
    if not _may_share(state, group):
        return TransportKind.PROCESS_GROUP if group.ranks.group is not None else TransportKind.LOCAL
    return TransportKind.LOCAL if group.ranks.world == 1 else TransportKind.SHM


def _may_share(state: ShardedUnit, group: ShardedParamGroup) -> bool:
    on_cpu = group.ranks.device.type == "cpu"
    return on_cpu and state.settings.transport != TransportKind.PROCESS_GROUP and not state.needs_group


def _replicas_share(state: ShardedUnit, group: ShardedParamGroup) -> bool:
    """Returns whether replicas share memory, or before the first forward whether ``"auto"`` would on one host."""
    if group.ranks.replicas == 1:
        return False
    if group.engine is not None:
        return isinstance(group.engine.all_reduce, _C.HostAllReduce)
    return _may_share(state, group)


# ---- from a model that is only planned


def facts_of_plan(
    model: nn.Module, request: PlanRequest, ranks: PlannedMesh, experts: ExpertRanks | None
) -> ModelFacts:
    """Returns the facts of what ``fully_shard`` over ``ranks`` would make of ``model``. Changes nothing.

    ``experts``: how ``expert_parallel`` spreads those of the model.

    Raises:
        ValueError: ``auto_wrap`` names no module, an int ``reshard_after_forward`` does not divide the world, or there
            are no experts to spread.
    """
    policy, keep, auto_wrap = request.mp_policy, Keep.of(request.reshard_after_forward), request.auto_wrap
    ignored = set(request.ignored_params)
    planned: set[nn.Module] = set()
    names = {module: name for name, module in model.named_modules()}
    param_names = {param: name for name, param in model.named_parameters()}
    found: list[PlannedUnit] = []
    sharded: set[tuple[int, str]] = set()
    ep = 1 if experts is None else experts.ep
    spread = {} if experts is None else {group.experts: group for group in spreadable(model, experts.ep)}
    splits = should_auto_wrap(model, auto_wrap)
    taken = {param for module in spread for param in module.parameters()}
    asked = HostOffloadPolicy(request.offload) if isinstance(request.offload, str) else request.offload
    managed = set(model.parameters()) - ignored - taken
    # The machine that plans need not pin anything.
    usual, named = named_offloads(asked, [model], managed, lambda policy: Offload(mode_of(policy)))
    inner = plan_units(model, auto_wrap, ignored_params=ignored | taken) if splits else []
    outside = [UnitPlan((module,), (names[module],), None, "") for module in (*spread, model)]
    kept = float32_ids(model, policy)
    for plan in [*outside[:-1], *inner, outside[-1]]:
        modules, wanted = plan.modules, keep.in_unit(plan.reshard_after_forward)
        managed = collect.managed_modules(modules, planned.__contains__)
        owned = collect.collect_params(managed, ignored)
        planned.update(modules)
        sharded.update((id(module), name) for one in owned for module, name in one.owners)
        group = spread.get(modules[0])
        ours = ranks if group is None or experts is None else experts.ranks
        world = ours.world if splits else None
        params: dict[nn.Parameter, ParamFacts] = {}
        for param in (one.param for one in owned):
            keeps = id(param) in kept or keeps_dtype(param, policy)
            params[param] = _param_of_plan(param, param_names[param], keeps, world)
        if group is not None:
            dim = 1 if cuts_columns(group, ep, ours.world) else 0
            params = {
                param: replace(one, size=(one.size[0] // ep, *one.size[1:]), shard_dim=dim)
                for param, one in params.items()
            }
        small = wanted.smaller_world(ours.world) if owned else None
        small_ranks = None
        if small is not None:
            key = ("after forward", ours.key)
            small_ranks = replace(ours, key=key, world=small, rank=ours.rank % small, replicas=1)
        counted, uses = [], []
        pools: dict[Any, tuple[Offload, list[collect.OwnedParam]]] = {}
        for one in owned:
            offload = named.get(one.param, usual) if group is None else Offload()
            pools.setdefault(offload.pool_key(ours.has_streams), (offload, []))[1].append(one)
        for offload, pool in pools.values():
            settings = GroupSettings(
                offload=offload,
                # The gradients of spread experts are divided by another number than that of their ranks.
                averages=group is None,
                keeps_shards_apart=any(writes_in_forward(module) for one in pool for module, _ in one.owners),
                wire_weights=request.wire_weights,
                wire_gradients=request.wire_gradients,
            )
            trains = [one.param.requires_grad for one in pool]
            facts = [params[one.param] for one in pool]
            counted.append(group_facts(facts, trains, policy, ours, settings, small_ranks))
            trained = [one for one in pool if one.param.requires_grad]
            uses.append(tuple(ParamUses.of(params[one.param], one.owners, policy) for one in trained))
        found.append(
            PlannedUnit(
                name=", ".join(names[module] or "<root>" for module in modules),
                modules=modules,
                uses=tuple(uses),
                groups=tuple(counted),
                num_params=len(owned),
                num_elements=sum(math.prod(one.size) for one in params.values()),
                reshards_after_forward=wanted.ranks != 1 and not (wanted.fully_in_root and modules == (model,)),
                unshards_in_backward=plan.unshard_in_backward,
                expert_parallel=1 if group is None else ep,
            )
        )
    position = {module: index for index, module in enumerate(model.modules())}
    found.sort(key=lambda unit: min(position[module] for module in unit.modules))
    return ModelFacts(model, tuple(found), _unsharded_bytes(model, sharded))


@dataclass(frozen=True)
class ExpertRanks:
    """Spreads the experts of each block over ``ep`` ranks. ``ranks`` share those of one part."""

    ep: int
    ranks: PlannedMesh


def _param_of_plan(param: nn.Parameter, name: str, keeps: bool, world: int | None) -> ParamFacts:
    """``world``: ranks of a model that is split into units."""
    placement = None if world is None else even_placement(param, world)
    dim, grad_dtype = 0 if placement is None else placement.dim, torch_private.grad_dtype_of(param)
    return ParamFacts(name, param.shape, dim, param.dtype, keeps, grad_dtype=grad_dtype)


def _unsharded_bytes(model: nn.Module, sharded: set[tuple[int, str]]) -> int:
    """Returns bytes of buffers, and of parameters other than the (id of module, name) in ``sharded``."""
    tensors: dict[int, torch.Tensor] = {}
    for module in model.modules():
        tensors.update((id(buffer), buffer) for buffer in module.buffers(recurse=False))
        for name, param in module.named_parameters(recurse=False):
            if (id(module), name) not in sharded:
                tensors[id(param)] = param
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
