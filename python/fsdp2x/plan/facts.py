"""Facts of a model's units for a memory plan, counted by the engine's ``Layout`` without allocating memory.

``sources.py`` collects them from a running model or from a planned one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.base.native import _C
from fsdp2x.lifecycle.comms import GRADIENTS, WEIGHTS
from fsdp2x.sharding import transport
from fsdp2x.sharding.offload import Offload
from fsdp2x.sharding.shapes import REDUCIBLE, ParamFacts, kept_shapes, layout_shapes
from fsdp2x.sharding.transport import TransportKind


@dataclass(frozen=True)
class PlannedMesh:
    """The ranks that share a group. Groups with equal ``key`` share a transport."""

    key: Hashable
    world: int
    rank: int
    transport: TransportKind
    replicas: int = 1
    replicas_share: bool = False  # whether they all-reduce through the memory of one host
    gathers: str = "unknown"  # how a device runs many gathers: see torch_private.gathers_of
    registers_memory: bool = False  # whether buffers on a device are registered with the backend
    max_reduce_buffers: int | None = None  # packed units that wait for their reduction on a device; None: by bytes

    @property
    def has_streams(self) -> bool:
        """Whether collectives run on separate streams of a device, overlapped with compute."""
        return self.transport is TransportKind.DEVICE


class GroupFacts(_C.GroupBytes):
    """One group of a unit on one rank: what the engine's memory rules read, and the following. Sizes are in bytes."""

    ranks: PlannedMesh
    shard_pad_bytes: int  # bytes of the pool that are not this rank's rows
    replica_segment_bytes: int  # bytes that wait for the all-reduce over the replicas
    row_bytes: int  # this rank's rows in the compute dtype, which it writes at a gather
    packed_bytes: int  # full gradients as they are packed for other ranks
    trained: tuple[tuple[int, torch.dtype], ...]  # elements of this rank's rows of each parameter, and its dtype
    keeps_host_state: bool  # whether only the optimizer's state is in CPU memory, not the gradients
    small: GroupFacts | None  # the smaller world that keeps the rows after forward
    params: tuple[ParamFacts, ...]
    trains: tuple[bool, ...]
    wire_bytes: int  # kept between steps: this rank's encoded rows and rounding errors of gradients

    def __init__(self, **facts: Any) -> None:
        super().__init__()
        for name, fact in facts.items():
            setattr(self, name, fact)


@dataclass(frozen=True)
class ParamUses:
    """Ids of the modules that use a trainable parameter, and bytes of its unsharded gradient."""

    owners: tuple[int, ...]
    gradient_bytes: int

    @classmethod
    def of(cls, param: ParamFacts, owners: Sequence[tuple[nn.Module, str]], policy: MixedPrecisionPolicy) -> ParamUses:
        bytes_ = math.prod(param.size) * param.computes_in(policy.param_dtype).itemsize
        return cls(tuple(id(module) for module, _ in owners), bytes_)


@dataclass(frozen=True, eq=False)
class PlannedUnit:
    """One unit: groups that are gathered together, and the module whose forward gathers them. Compared by identity."""

    name: str
    modules: tuple[nn.Module, ...]
    uses: tuple[tuple[ParamUses, ...], ...]  # for each group, of its trainable parameters
    groups: tuple[GroupFacts, ...]
    num_params: int
    num_elements: int
    reshards_after_forward: bool
    reshards_after_backward: bool = True
    unshards_in_backward: bool = True
    expert_parallel: int = 1  # ranks over which its parameters are spread before they are sharded


@dataclass(frozen=True)
class ModelFacts:
    """A model's units in the order of ``named_modules``, and the bytes that every rank holds in full."""

    model: nn.Module
    units: tuple[PlannedUnit, ...]
    unsharded_bytes: int  # buffers and parameters outside of any unit


@dataclass(frozen=True)
class GroupSettings:
    """Settings that decide where the bytes of a group are."""

    offload: Offload = Offload()
    gathers_packed: bool = False  # by a custom function, or with the inputs of extensions
    reduces_aside: bool = False  # into memory that is not the gradients'
    reduces_unused: bool = False
    averages: bool = True  # divides while it sums
    may_rest: bool = True  # none of its shards is in the pool of another group
    keeps_shards_apart: bool = False  # see ShardedParamGroup
    wire_weights: str | None = None  # by the names of ``set_wire_dtype``; None: no format
    wire_gradients: str | None = None


def _count(
    params: Sequence[ParamFacts],
    shapes: list[_C.ParamShape],
    trains: Sequence[bool],
    ranks: PlannedMesh,
    settings: GroupSettings,
    small: GroupFacts | None = None,
) -> GroupFacts:
    offload = settings.offload
    layout = _C.Layout(shapes, ranks.world, ranks.rank, ranks.has_streams)
    training = layout.training(trains)
    trained = [shape for shape, is_trained in zip(shapes, trains, strict=True) if is_trained]
    gradients = [shape.numel * shape.compute.itemsize for shape in trained]  # autograd's, in bytes
    offloads = offload.of_shards and ranks.has_streams
    averages = settings.averages and all(shape.reduce != torch.float16 for shape in trained)
    below = transport.pack_below_bytes(ranks.gathers, ranks.world)
    packs_all = settings.gathers_packed or (settings.reduces_aside and not ranks.has_streams)
    pack_below = _C.PACK_EVERYTHING if below is None or packs_all else below
    exchanges = ranks.gathers == "messages" and not settings.reduces_aside
    plan = _C.ReductionPlan(layout, trains, transport.pieces())
    is_whole = not ranks.has_streams or settings.reduces_aside or settings.wire_gradients is not None
    reduced_bytes = training.reduce_segment_bytes
    rows_are_pool = ranks.has_streams and training.can_reduce_in_place
    segment_bytes, coded_bytes, wire_bytes = _wire_bytes(layout, training, ranks, settings)
    gathers_coded = settings.wire_weights is not None and ranks.world > 1
    if settings.wire_weights is not None and ranks.has_streams:  # without codes, a device may gather in place
        gathers_coded = gathers_coded and _C.gathers_codes(layout, WEIGHTS[settings.wire_weights])
    packed_segment = _C.packed_segment_bytes(layout, pack_below, on_cpu=not ranks.has_streams)
    rests = ranks.transport.shares_memory and ranks.world > 1 and layout.can_rest_in_slot and settings.may_rest
    if ranks.has_streams:
        rests = layout.pool_is_slot and not settings.keeps_shards_apart and not offloads
    return GroupFacts(
        ranks=ranks,
        shard_pool_bytes=layout.shard_pool_bytes,
        shard_pad_bytes=layout.shard_pool_bytes - layout.shard_bytes,
        slot_bytes=layout.slot_bytes,
        scratch_bytes=layout.scratch_bytes,
        gather_segment_bytes=segment_bytes,
        coded_reduce_bytes=coded_bytes,
        received_bytes=plan.segment_bytes * (ranks.world if exchanges else 1),
        wire_bytes=wire_bytes,
        reduce_segment_bytes=plan.segment_bytes,
        reduce_buffer_bytes=plan.buffer_bytes(in_pieces=not is_whole),
        replica_segment_bytes=training.flagged_segment_bytes,
        row_bytes=layout.row_bytes,
        packed_bytes=sum(shape.packed_bytes for shape in trained),
        gradient_bytes=(sum if ranks.has_streams else max)([0, *gradients]),
        wide_scratch_bytes=layout.wide_scratch_bytes,
        is_trainable=bool(trained),
        trained=tuple(
            (numel, shape.original)
            for numel, shape, is_trained in zip(layout.shard_numels, shapes, trains, strict=True)
            if is_trained
        ),
        # On a device a reduction may end in it, flags included.
        gradient_pool_bytes=max(
            training.gradient_pool_bytes, training.flagged_segment_bytes if rows_are_pool and not offloads else 0
        ),
        staging_bytes=(segment_bytes if gathers_coded else packed_segment) * ranks.world,
        reduces_in_place=rows_are_pool and not offloads and not settings.reduces_aside,
        offloads=offloads,
        reduced_bytes=reduced_bytes,
        keeps_shards=offloads and offload.mode == "gradients",
        landing_bytes=0 if not offloads or not trained or rows_are_pool and averages else max(reduced_bytes, 1),
        rests=rests,
        keeps_host_state=offload.mode == "optimizer" and ranks.has_streams,
        reduces_unused=settings.reduces_unused,
        small=small,
        params=tuple(params),
        trains=tuple(trains),
    )


def _wire_bytes(layout: Any, training: Any, ranks: PlannedMesh, settings: GroupSettings) -> tuple[int, int, int]:
    """Returns a rank's gathered and reduced segment in their formats, and the bytes that both keep."""
    segment, coded, kept = layout.gather_segment_bytes, 0, 0
    weights, gradients = settings.wire_weights, settings.wire_gradients
    if ranks.world > 1 and segment and weights is not None:
        segment = _C.wire_gather_bytes(layout, WEIGHTS[weights])
        kept = 0 if ranks.has_streams else segment  # a device encodes for each gather
    if ranks.world > 1 and training.reduce_segment_bytes and gradients is not None:
        coded = _C.wire_reduce_bytes(training, GRADIENTS[gradients])
        kept += coded * ranks.world if gradients == "int8" else 0
    return segment, coded, kept


def group_facts(
    params: Sequence[ParamFacts],
    requires_grad: Sequence[bool],
    policy: MixedPrecisionPolicy,
    ranks: PlannedMesh,
    settings: GroupSettings,
    small_ranks: PlannedMesh | None = None,
) -> GroupFacts:
    """Counts one group. ``small_ranks``: the smaller world that keeps the rows after forward."""
    shapes = layout_shapes(params, policy.param_dtype, policy.reduce_dtype)
    trains = [wanted and shape.original in REDUCIBLE for shape, wanted in zip(shapes, requires_grad, strict=True)]
    small = None
    if small_ranks is not None:
        small = _count(params, kept_shapes(shapes), [False] * len(shapes), small_ranks, GroupSettings(may_rest=False))
    return _count(params, shapes, trains, ranks, settings, small)
