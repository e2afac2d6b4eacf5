"""What a memory plan knows of a model's units: from the units that run, or from a model that is only planned.

Everything here is counted by the engine's own ``Layout``; nothing is allocated and nobody is asked.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.runtime import collect, transport
from fsdp2x.runtime.mesh import ShardGroup, post_forward_group
from fsdp2x.runtime.native import _C
from fsdp2x.runtime.offload import Offload
from fsdp2x.runtime.params import GroupParams, keeps_dtype
from fsdp2x.runtime.shapes import REDUCIBLE, ParamFacts, layout_shapes
from fsdp2x.runtime.state import UnitState, unit_states
from fsdp2x.wrap import AutoWrap, plan_units, should_auto_wrap

# Every parameter starts at a multiple of it, in pools, slots and segments.
ALIGN_BYTES = 64
# What the engine reserves for the flag of a parameter behind the rows of a reduce segment.
_FLAG_BYTES = 8
# A limit below which every parameter is gathered packed.
_EVERYTHING = 2**63


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
    groups_gathers: bool = True  # many gathers are one operation, on a device; otherwise one gathers all, packed
    max_reduce_buffers: int = 2  # packed units that may be on their way to their reduction, on a device


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
    keeps_shards: bool = False  # and the device has a copy of the shards
    landing_bytes: int = 0  # where reduced rows lie on the host until it has cast them; 0: they are the gradients
    keeps_host_state: bool = False  # the optimizer's state is in host memory, while the gradients are not
    state_block_bytes: int = 0  # of it, one moment of all parameters
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


@dataclass(frozen=True)
class Collectives:
    """What of a unit's settings decides where a device's collectives read and write."""

    gathers_packed: bool = False  # by a function of the user's, or with the inputs of extensions
    reduces_aside: bool = False  # into memory that is not the gradients'
    averages: bool = True  # divides while it sums


def _count(
    shapes: list[tuple],
    trains: Sequence[bool],
    ranks: Ranks,
    reduces_unused: bool = False,
    small: GroupFacts | None = None,
    offload: Offload = Offload(),  # noqa: B008 (a tuple)
    collectives: Collectives = Collectives(),
) -> GroupFacts:
    layout = _C.Layout(shapes, ranks.world, ranks.rank, ranks.has_streams)
    flag_bytes = align_up(len(shapes) * _FLAG_BYTES)
    trained = [shape for shape, is_trained in zip(shapes, trains, strict=True) if is_trained]
    reducible = [shape for shape in shapes if shape[3] in REDUCIBLE]
    # Over shared memory a frozen parameter keeps its place in the scratch: who trains may differ between ranks.
    staged = trained if ranks.transport == "process_group" else reducible
    segment_bytes = _pool_bytes([_moved(shape, 5) for shape in reducible], ranks) + flag_bytes
    rows = sum(_row_numel(shape, ranks) * shape[3].itemsize for shape in shapes)
    offloads = offload.of_shards and ranks.has_streams
    # A rank's reduced rows lie as the gradient pool does.
    rows_are_pool = len(trained) == len(shapes) and all(shape[3] == shape[5] for shape in shapes)
    reduced_bytes = _pool_bytes([_moved(shape, 5) for shape in trained], ranks)
    averages = collectives.averages and all(shape[5] != torch.float16 for shape in trained)
    packs_all = collectives.gathers_packed or not ranks.groups_gathers
    return GroupFacts(
        ranks=ranks,
        shard_pool_bytes=layout.shard_pool_bytes,
        shard_pad_bytes=layout.shard_pool_bytes - rows,
        slot_bytes=layout.slot_bytes,
        scratch_bytes=layout.scratch_bytes,
        gather_segment_bytes=_pool_bytes([_moved(shape, 4) for shape in shapes if shape[6]], ranks),
        reduce_segment_bytes=reduced_bytes + flag_bytes,
        replica_segment_bytes=_pool_bytes([_moved(shape, 5) for shape in staged], ranks) + flag_bytes,
        row_bytes=sum(_row_numel(shape, ranks) * shape[4].itemsize for shape in shapes if shape[6]),
        packed_bytes=sum(shape[0] * shape[1] * shape[2] * _C.packed_itemsize(shape) for shape in trained),
        gradient_bytes=(sum if ranks.has_streams else max)([0, *map(_gradient_bytes, trained)]),
        num_trained=len(trained),
        trained_bytes=sum(_row_numel(shape, ranks) * shape[3].itemsize for shape in trained),
        # On a device a reduction may end in it, flags included.
        gradient_pool_bytes=max(layout.shard_pool_bytes, segment_bytes if ranks.has_streams else 0),
        staging_bytes=_C.packed_segment_bytes(layout, _EVERYTHING if packs_all else transport.PACK_BELOW_BYTES)
        * ranks.world,
        reduces_in_place=rows_are_pool and not offloads and not collectives.reduces_aside,
        offloads=offloads,
        keeps_shards=offloads and offload.mode == "gradients",
        landing_bytes=0 if not offloads or not trained or rows_are_pool and averages else max(reduced_bytes, 1),
        keeps_host_state=offload.mode == "optimizer" and ranks.has_streams,
        state_block_bytes=sum(align_up(_row_numel(shape, ranks) * shape[3].itemsize) for shape in trained),
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
    offload: Offload = Offload(),  # noqa: B008 (a tuple)
    collectives: Collectives = Collectives(),
) -> GroupFacts:
    """Counts one group. ``small_ranks``: the smaller world that keeps the rows after forward."""
    shapes = layout_shapes(params, policy.param_dtype, policy.reduce_dtype)
    trains = [wanted and shape[3] in REDUCIBLE for shape, wanted in zip(shapes, requires_grad, strict=True)]
    small = None
    if small_ranks is not None:
        kept = [(*shape[:3], shape[4], shape[4], shape[4], shape[6]) for shape in shapes]
        small = _count(kept, [False] * len(kept), small_ranks)
    return _count(shapes, trains, ranks, reduces_unused, small, offload, collectives)


# ---- from the units of a sharded model


def facts_of_model(model: nn.Module) -> ModelFacts:
    """A sharded model, before or after its first forward."""
    names = {id(module): name for name, module in model.named_modules()}
    states = unit_states(model)
    below = {id(inner) for state in states for inner in _below(state, states)}
    common = _Common(
        any(state.comm_memory is not None for state in states),
        max((state.max_reduce_buffers for state in states if state.max_reduce_buffers is not None), default=None),
    )
    units = tuple(_unit_of_state(state, names, common, is_root=id(state) not in below) for state in states)
    sharded = {(id(owner), name) for state in states for param in state.params for owner, name in param.owners}
    return ModelFacts(model, units, _unsharded_bytes(model, sharded))


@dataclass(frozen=True)
class _Common:
    """Settings that one unit makes for all of its root."""

    registers_memory: bool
    max_reduce_buffers: int | None


def _below(outer: UnitState, states: list[UnitState]) -> list[UnitState]:
    inside = {id(module) for top in outer.modules for module in top.modules()}
    return [state for state in states if state is not outer and id(state.modules[0]) in inside]


def _unit_of_state(state: UnitState, names: dict[int, str], common: _Common, *, is_root: bool) -> UnitFacts:
    options = state.live_options()
    reshards = options.reshard_after_forward and not (is_root and state.auto_reshard)
    return UnitFacts(
        name=", ".join(names.get(id(module), "?") or "<root>" for module in state.modules),
        modules=state.modules,
        owners=tuple(
            frozenset(id(module) for param in group.params if param.param.requires_grad for module, _ in param.owners)
            for group in state.groups
        ),
        groups=tuple(_group_of_state(state, group, common) for group in state.groups),
        num_params=len(state.params),
        num_elements=sum(param.local_size.numel() for param in state.params),
        reshards_after_forward=reshards,
        reshards_after_backward=options.reshard_after_backward,
    )


def _group_of_state(state: UnitState, group: GroupParams, common: _Common) -> GroupFacts:
    ranks, small_ranks = group.ranks, None
    comms, options = state.comms, state.live_options()
    if state.post_forward_world is not None:
        small = post_forward_group(ranks, state.post_forward_world)
        small_ranks = _ranks(small, state, group, common, replicas=1)
    return group_facts(
        [param.facts for param in group.params],
        [param.param.requires_grad for param in group.params],
        state.mp_policy,
        _ranks(ranks, state, group, common, ranks.replicas, _replicas_share(state, group)),
        small_ranks=small_ranks,
        reduces_unused=options.reduce_unused_params,
        offload=group.offload,
        collectives=Collectives(
            gathers_packed=comms.all_gather is not None or any(param.extension is not None for param in group.params),
            reduces_aside=comms.reduce_scatter is not None
            or comms.all_reduce_hook is not None
            or common.registers_memory,
            averages=options.divide_factor is None and not options.force_sum_reduction,
        ),
    )


def _ranks(
    ranks: ShardGroup,
    state: UnitState,
    group: GroupParams,
    common: _Common,
    replicas: int,
    replicas_share: bool = False,
) -> Ranks:
    name, has_streams = _transport_of(state, group), _has_streams(group)
    backend = "" if ranks.group is None else dist.get_backend_config(ranks.group)
    return Ranks(
        ranks.group,
        ranks.world,
        ranks.rank,
        name,
        replicas,
        has_streams,
        replicas_share,
        groups_gathers=transport.groups_gathers(backend),
        max_reduce_buffers=common.max_reduce_buffers or Ranks.max_reduce_buffers,
    )


def _has_streams(group: GroupParams) -> bool:
    return group.engine.has_streams if group.engine is not None else transport.has_streams(group.ranks.device)


def _transport_of(state: UnitState, group: GroupParams) -> str:
    """The one that runs; before the first forward the one that ``"auto"`` chooses for the ranks of one host."""
    if group.engine is not None:
        return group.engine.transport_name
    if _has_streams(group):
        return "process_group"
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
    offload: Offload = Offload(),  # noqa: B008 (a tuple)
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
                groups=(_group_of_plan(owned, policy, ranks, small, offload),) if owned else (),
                num_params=len(owned),
                num_elements=sum(one.param.numel() for one in owned),
                reshards_after_forward=modules != (model,) if wanted is None else wanted is True or wanted > 1,
            )
        )
    position = {module: index for index, module in enumerate(model.modules())}
    found.sort(key=lambda unit: min(position[module] for module in unit.modules))
    return ModelFacts(model, tuple(found), _unsharded_bytes(model, sharded))


def _group_of_plan(
    owned: list[collect.OwnedParam],
    policy: MixedPrecisionPolicy,
    ranks: Ranks,
    small: Ranks | None,
    offload: Offload,
) -> GroupFacts:
    params = [
        ParamFacts(one.owners[0][1], one.param.shape, 0, one.param.dtype, keeps_dtype(one.param, policy))
        for one in owned
    ]
    trains = [one.param.requires_grad for one in owned]
    return group_facts(params, trains, policy, ranks, small_ranks=small, offload=offload)


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
    return replace(ranks, key=("after forward", ranks.key), world=reshard, rank=rank, replicas=1)


def _unsharded_bytes(model: nn.Module, sharded: set[tuple[int, str]]) -> int:
    """Bytes of buffers, and of parameters other than the (id of module, name) in ``sharded``."""
    tensors: dict[int, torch.Tensor] = {}
    for module in model.modules():
        tensors.update((id(buffer), buffer) for buffer in module.buffers(recurse=False))
        for name, param in module.named_parameters(recurse=False):
            if (id(module), name) not in sharded:
                tensors[id(param)] = param
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
