"""What a memory plan knows of a model's units: from the units that run, or from a model that is only planned.

Everything here is counted by the engine's own ``Layout``; nothing is allocated and nobody is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.runtime import collect, transport
from fsdp2x.runtime.mesh import ShardGroup, post_forward_group
from fsdp2x.runtime.native import _C
from fsdp2x.runtime.params import GroupParams, keeps_dtype
from fsdp2x.runtime.shapes import REDUCIBLE, ParamFacts, layout_shapes
from fsdp2x.runtime.state import UnitState, unit_states
from fsdp2x.wrap import AutoWrap, plan_units, should_auto_wrap

# Every parameter starts at a multiple of it, in pools, slots and segments.
ALIGN_BYTES = 64
# What the engine reserves for the flag of a parameter behind the rows of a reduce segment.
_FLAG_BYTES = 8


def align_up(num_bytes: int, unit: int = ALIGN_BYTES) -> int:
    """``num_bytes`` rounded up to a multiple of ``unit``."""
    return -(-num_bytes // unit) * unit


@dataclass(frozen=True)
class Ranks:
    """Who shares a group. Groups with equal ``key`` share a transport, named as the engine names it."""

    key: Hashable
    world: int
    rank: int
    transport: str  # "local", "shm" or "process_group"
    replicas: int = 1
    has_streams: bool = False  # collectives run beside the compute, on a device
    replicas_share: bool = False  # memory of one host: they all-reduce through it


@dataclass(frozen=True, eq=False)
class GroupFacts:
    """One group of a unit on one rank, in bytes. Compared by identity."""

    ranks: Ranks
    shard_pool_bytes: int
    shard_pad_bytes: int  # of the pool: not this rank's rows
    slot_bytes: int
    scratch_bytes: int
    gather_segment_bytes: int  # of a rank, in what a process group gathers
    reduce_segment_bytes: int  # of a rank, in what a process group reduces, flags included
    replica_segment_bytes: int  # what waits for the all-reduce over the replicas
    row_bytes: int  # this rank's rows in the dtype of compute: what it writes at a gather
    packed_bytes: int  # the whole gradients as they are packed for peers that read them
    gradient_bytes: int  # unsharded gradients at once, as autograd makes them: the largest, on a device all of them
    num_trained: int  # parameters
    trained_bytes: int  # their rows of this rank in their own dtype: what an optimizer keeps per moment
    gradient_pool_bytes: int = 0
    staging_bytes: int = 0  # of all ranks, in what a device gathers packed
    reduces_in_place: bool = False  # the reduced rows are the gradients, on a device
    offloads: bool = False  # shards and gradients are in host memory
    reduces_unused: bool = False
    small: GroupFacts | None = None  # the smaller world that keeps the rows after forward

    @property
    def is_trainable(self) -> bool:
        return self.num_trained > 0


@dataclass(frozen=True, eq=False)
class UnitFacts:
    """One unit: what is gathered together, and by whose forward. Compared by identity."""

    name: str
    modules: tuple[nn.Module, ...]
    owners: tuple[frozenset[int], ...]  # of each group: ids of the modules that use its trainable parameters
    groups: tuple[GroupFacts, ...]
    num_params: int
    num_elements: int
    reshards_after_forward: bool
    reshards_after_backward: bool = True


@dataclass(frozen=True)
class ModelFacts:
    """A model's units in the order of ``named_modules``, and the bytes that every rank holds whole."""

    model: nn.Module
    units: tuple[UnitFacts, ...]
    unsharded_bytes: int  # buffers and parameters outside of any unit


def _pool_bytes(shapes: list[tuple], ranks: Ranks) -> int:
    return _C.Layout(shapes, ranks.world, ranks.rank).shard_pool_bytes


def _moved(shape: tuple, position: int) -> tuple:
    """The shape with one of its dtypes in place of all three: its "shard pool" is a rank's segment in that dtype."""
    return (*shape[:3], shape[position], shape[position], shape[position], True)


def _gradient_bytes(shape: tuple) -> int:
    return shape[0] * shape[1] * shape[2] * shape[4].itemsize


def _row_numel(shape: tuple, ranks: Ranks) -> int:
    begin, end = _C.shard_rows(shape[1], ranks.world, ranks.rank)
    return shape[0] * (end - begin) * shape[2]


def _packed_itemsize(shape: tuple) -> int:
    """The engine's ``ParamShape::packed``: half-precision gradients that are summed in fp32 stay as they are."""
    compute, reduce = shape[4:6]
    return compute.itemsize if compute.itemsize == 2 and reduce == torch.float32 else reduce.itemsize


def _count(
    shapes: list[tuple],
    trains: Sequence[bool],
    ranks: Ranks,
    reduces_unused: bool = False,
    small: GroupFacts | None = None,
    offloads: bool = False,
) -> GroupFacts:
    layout = _C.Layout(shapes, ranks.world, ranks.rank, ranks.has_streams)
    flag_bytes = align_up(len(shapes) * _FLAG_BYTES)
    trained = [shape for shape, is_trained in zip(shapes, trains, strict=True) if is_trained]
    reducible = [shape for shape in shapes if shape[3] in REDUCIBLE]
    # Over shared memory a frozen parameter keeps its place in the scratch: who trains may differ between ranks.
    staged = trained if ranks.transport == "process_group" else reducible
    segment_bytes = _pool_bytes([_moved(shape, 5) for shape in reducible], ranks) + flag_bytes
    rows = sum(_row_numel(shape, ranks) * shape[3].itemsize for shape in shapes)
    return GroupFacts(
        ranks=ranks,
        shard_pool_bytes=layout.shard_pool_bytes,
        shard_pad_bytes=layout.shard_pool_bytes - rows,
        slot_bytes=layout.slot_bytes,
        scratch_bytes=layout.scratch_bytes,
        gather_segment_bytes=_pool_bytes([_moved(shape, 4) for shape in shapes if shape[6]], ranks),
        reduce_segment_bytes=_pool_bytes([_moved(shape, 5) for shape in trained], ranks) + flag_bytes,
        replica_segment_bytes=_pool_bytes([_moved(shape, 5) for shape in staged], ranks) + flag_bytes,
        row_bytes=sum(_row_numel(shape, ranks) * shape[4].itemsize for shape in shapes if shape[6]),
        packed_bytes=sum(shape[0] * shape[1] * shape[2] * _packed_itemsize(shape) for shape in trained),
        gradient_bytes=(sum if ranks.has_streams else max)([0, *map(_gradient_bytes, trained)]),
        num_trained=len(trained),
        trained_bytes=sum(_row_numel(shape, ranks) * shape[3].itemsize for shape in trained),
        # On a device a reduction may end in it, flags included.
        gradient_pool_bytes=max(layout.shard_pool_bytes, segment_bytes if ranks.has_streams else 0),
        staging_bytes=_C.packed_segment_bytes(layout, transport.PACK_BELOW_BYTES) * ranks.world,
        reduces_in_place=len(trained) == len(shapes) and all(shape[3] == shape[5] for shape in shapes) and not offloads,
        offloads=offloads,
        reduces_unused=reduces_unused,
        small=small,
    )


def group_facts(
    params: Sequence[ParamFacts],
    requires_grad: Sequence[bool],
    policy: MixedPrecisionPolicy,
    ranks: Ranks,
    *,
    small_ranks: Ranks | None = None,
    reduces_unused: bool = False,
    offloads: bool = False,
) -> GroupFacts:
    """Counts one group. ``small_ranks``: the smaller world that keeps the rows after forward."""
    shapes = layout_shapes(params, policy.param_dtype, policy.reduce_dtype)
    trains = [wanted and shape[3] in REDUCIBLE for shape, wanted in zip(shapes, requires_grad, strict=True)]
    small = None
    if small_ranks is not None:
        kept = [(*shape[:3], shape[4], shape[4], shape[4], shape[6]) for shape in shapes]
        small = _count(kept, [False] * len(kept), small_ranks)
    return _count(shapes, trains, ranks, reduces_unused, small, offloads)


# ---- from the units of a sharded model


def facts_of_model(model: nn.Module) -> ModelFacts:
    """A sharded model, before or after its first forward."""
    names = {id(module): name for name, module in model.named_modules()}
    states = unit_states(model)
    below = {id(inner) for state in states for inner in _below(state, states)}
    units = tuple(_unit_of_state(state, names, is_root=id(state) not in below) for state in states)
    sharded = {(id(owner), name) for state in states for param in state.params for owner, name in param.owners}
    return ModelFacts(model, units, _unsharded_bytes(model, sharded))


def _below(outer: UnitState, states: list[UnitState]) -> list[UnitState]:
    inside = {id(module) for top in outer.modules for module in top.modules()}
    return [state for state in states if state is not outer and id(state.modules[0]) in inside]


def _unit_of_state(state: UnitState, names: dict[int, str], *, is_root: bool) -> UnitFacts:
    options = state.live_options()
    reshards = options.reshard_after_forward and not (is_root and state.auto_reshard)
    return UnitFacts(
        name=", ".join(names.get(id(module), "?") or "<root>" for module in state.modules),
        modules=state.modules,
        owners=tuple(
            frozenset(id(module) for param in group.params if param.param.requires_grad for module, _ in param.owners)
            for group in state.groups
        ),
        groups=tuple(_group_of_state(state, group) for group in state.groups),
        num_params=len(state.params),
        num_elements=sum(param.local_size.numel() for param in state.params),
        reshards_after_forward=reshards,
        reshards_after_backward=options.reshard_after_backward,
    )


def _group_of_state(state: UnitState, group: GroupParams) -> GroupFacts:
    ranks, small_ranks = group.ranks, None
    if state.post_forward_world is not None:
        small = post_forward_group(ranks, state.post_forward_world)
        small_ranks = _ranks(small, state, group, replicas=1)
    return group_facts(
        [param.facts for param in group.params],
        [param.param.requires_grad for param in group.params],
        state.mp_policy,
        _ranks(ranks, state, group, ranks.replicas, _replicas_share(state, group)),
        small_ranks=small_ranks,
        reduces_unused=state.live_options().reduce_unused_params,
        offloads=group.offloads and _has_streams(group),
    )


def _ranks(
    ranks: ShardGroup, state: UnitState, group: GroupParams, replicas: int, replicas_share: bool = False
) -> Ranks:
    name = _transport_of(state, group)
    return Ranks(ranks.group, ranks.world, ranks.rank, name, replicas, _has_streams(group), replicas_share)


def _has_streams(group: GroupParams) -> bool:
    return group.engine.has_streams if group.engine is not None else transport.has_streams(group.ranks.device)


def _transport_of(state: UnitState, group: GroupParams) -> str:
    """The one that runs; before the first forward the one that ``"auto"`` chooses for the ranks of one host."""
    if group.engine is not None:
        return group.engine.transport_name
    if state.transport == "process_group" or group.ranks.device.type != "cpu":
        return "process_group" if group.ranks.group is not None else "local"
    return "local" if group.ranks.world == 1 else "shm"


def _replicas_share(state: UnitState, group: GroupParams) -> bool:
    """Whether they do; before the first forward whether ``"auto"`` lets the replicas of one host."""
    if group.ranks.replicas == 1:
        return False
    if group.engine is not None:
        return isinstance(group.engine.all_reduce, _C.HostAllReduce)
    return state.transport != "process_group" and group.ranks.device.type == "cpu"


# ---- from a model that is only planned


def facts_of_plan(
    model: nn.Module,
    ranks: Ranks,
    *,
    auto_wrap: AutoWrap = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Collection[nn.Parameter] = (),
) -> ModelFacts:
    """What ``fully_shard`` with these arguments would make of ``model``, which it leaves alone.

    Raises:
        ValueError: ``auto_wrap`` names no module; an int ``reshard_after_forward`` that does not divide the world.
    """
    policy = mp_policy or MixedPrecisionPolicy()
    ignored = set(ignored_params)
    planned: set[nn.Module] = set()
    names = {module: name for name, module in model.named_modules()}
    found: list[UnitFacts] = []
    sharded: set[tuple[int, str]] = set()
    inner = plan_units(model, auto_wrap, ignored_params=ignored) if should_auto_wrap(model, auto_wrap) else []
    plans = [(plan.modules, plan.reshard_after_forward) for plan in inner]
    for modules, own in [*plans, ((model,), None)]:
        wanted = reshard_after_forward if own is None else own
        managed = collect.managed_modules(modules, planned.__contains__)
        owned = collect.collect_params(managed, ignored)
        planned.update(modules)
        sharded.update((id(module), name) for one in owned for module, name in one.owners)
        small = _small_ranks(wanted, ranks) if owned else None
        found.append(
            UnitFacts(
                name=", ".join(names[module] or "<root>" for module in modules),
                modules=modules,
                owners=(frozenset(id(m) for one in owned if one.param.requires_grad for m, _ in one.owners),),
                groups=(_group_of_plan(owned, policy, ranks, small),) if owned else (),
                num_params=len(owned),
                num_elements=sum(one.param.numel() for one in owned),
                reshards_after_forward=modules != (model,) if wanted is None else wanted is True or wanted > 1,
            )
        )
    position = {module: index for index, module in enumerate(model.modules())}
    found.sort(key=lambda unit: min(position[module] for module in unit.modules))
    return ModelFacts(model, tuple(found), _unsharded_bytes(model, sharded))


def _group_of_plan(
    owned: list[collect.OwnedParam], policy: MixedPrecisionPolicy, ranks: Ranks, small: Ranks | None
) -> GroupFacts:
    params = [
        ParamFacts(one.owners[0][1], one.param.shape, 0, one.param.dtype, keeps_dtype(one.param, policy))
        for one in owned
    ]
    return group_facts(params, [one.param.requires_grad for one in owned], policy, ranks, small_ranks=small)


def _small_ranks(reshard: bool | int | None, ranks: Ranks) -> Ranks | None:
    if reshard is None or isinstance(reshard, bool):
        return None
    if not 1 <= reshard <= ranks.world or ranks.world % reshard:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {ranks.world}, not {reshard}"
        )
    if reshard in (1, ranks.world):
        return None
    rank = ranks.rank % reshard
    return Ranks(("after forward", ranks.key), reshard, rank, ranks.transport, has_streams=ranks.has_streams)


def _unsharded_bytes(model: nn.Module, sharded: set[tuple[int, str]]) -> int:
    """Bytes of buffers, and of parameters other than the (id of module, name) in ``sharded``."""
    tensors: dict[int, torch.Tensor] = {}
    for module in model.modules():
        tensors.update((id(buffer), buffer) for buffer in module.buffers(recurse=False))
        for name, param in module.named_parameters(recurse=False):
            if (id(module), name) not in sharded:
                tensors[id(param)] = param
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
