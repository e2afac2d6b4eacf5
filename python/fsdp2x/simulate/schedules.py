"""What each implementation does in a step: tasks for the lanes, from the operations that the replay of a plan plays.

Ours are the replay's own, with the engine's counts of collectives and copies. The others have the same units, and
differ by what their sources say; what no source says is taken as ours, and is named in ``PEERS``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torch import nn

from fsdp2x.memory.facts import GroupFacts, Ranks
from fsdp2x.memory.steps import Operation
from fsdp2x.simulate.lanes import Collective, Task
from fsdp2x.simulate.machines import Axis, Machine
from fsdp2x.simulate.work import Work

# torch's foreach copies: tensors of one launch with two lists.
_FOREACH_TENSORS = 64


@dataclass(frozen=True)
class OtherSchedule:
    """Another implementation. ``unit_s`` and ``param_s``: its host's time for a unit and a parameter in a step."""

    title: str
    unit_s: float
    param_s: float
    copies_out: bool = False  # out of what is gathered, on the compute's stream
    prefetches: bool = True  # forward gathers the next unit while one computes
    is_flat: bool = True  # parameters lie behind each other, without padding each of them
    splits_dtypes: bool = False  # collectives for each dtype, and for trained and frozen parameters
    packs: bool = True  # gradients are copied to where they are reduced from
    keeps_vectors: bool = False  # parameters of one dim are gathered once, first, and reduced once, last
    sources: str = ""


# Host times of fsdp2x and of stock are those of benchmarks/README.md ("Host time of a unit": 11 and 1,000 parameters,
# forward and backward, collectives that do nothing); the other two are not measured here: stock's, without its part for
# each parameter of a DTensor.
_OURS_UNIT_S, _OURS_PARAM_S = 47e-6, 2.2e-6
_STOCK_UNIT_S, _STOCK_PARAM_S = 443e-6, 42e-6
PEERS = {
    "fsdp2": OtherSchedule(
        "stock FSDP2", _STOCK_UNIT_S, _STOCK_PARAM_S, copies_out=True, prefetches=False, is_flat=False,
        sources="torch 2.15's _fully_shard: one gather and one reduction a unit, copies in, and out on the compute's "
        "stream; forward gathers ahead as far as the host is ahead",
    ),
    "megatron_fsdp": OtherSchedule(
        "Megatron-FSDP v2", _STOCK_UNIT_S, 8e-6, splits_dtypes=True,
        sources="NVIDIA/Megatron-LM, megatron_fsdp: v2/README.md (flat buffers by dtype and requires_grad), "
        "runtime_schedule.md (prefetch of the next unit, two buffers, one communicator), "
        "mfsdp_v2_backward_cpu_overhead_design.md (one fused copy of gradients). Its host time is assumed",
    ),
    "yafsdp": OtherSchedule(
        "YaFSDP", _STOCK_UNIT_S, 0.0, packs=False, keeps_vectors=True,
        sources="yandex/YaFSDP and its authors' summary: two buffers of gathered weights, no copies, norms gathered "
        "at the beginning and reduced at the end. Its host time is assumed",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Pacing:
    """A machine and how well its compute does: ``mfu`` of the peak, with a second forward if it ``recomputes``."""

    machine: Machine
    mfu: float
    recomputes: bool = False

    def module_task(self, operation: Operation, work: dict[nn.Module, Work]) -> Task | None:
        """A module's own work, in forward or backward; None: none."""
        own = work.get(operation.module)
        if own is None:
            return None
        again = operation.kind == "backward" and self.recomputes
        flops = own.flops if operation.kind == "forward" else own.backward_flops + again * own.flops
        flops_s = flops / (self.machine.flops_per_s * self.mfu)
        read_s = (1 + again) * own.weight_bytes / self.machine.memory_bytes_per_s if self.machine.is_device else 0.0
        return Task("run", host_s=self.machine.module_s, compute_s=max(flops_s, read_s))

    def axis(self, ranks: Ranks) -> Axis:
        return self.machine.axis(ranks.world)

    def replicas(self, ranks: Ranks) -> Axis:
        """Ranks with the same rows: each in another shard group."""
        return self.machine.axis(ranks.replicas, stride=ranks.world)


# ---- ours


def ours(operations: Iterable[Operation], work: dict[nn.Module, Work], pacing: Pacing) -> list[Task]:
    """The engine's schedule."""
    tasks = []
    for operation in operations:
        if operation.module is not None:
            task = pacing.module_task(operation, work)
        elif operation.kind == "gather":
            task = _our_gather(operation.group, pacing)
        elif operation.kind == "reduce":
            task = _our_reduction(operation.group, pacing)
        else:
            task = Task(operation.kind, _key(operation))
        if task is not None:
            tasks.append(task)
    return tasks


def _key(operation: Operation) -> tuple:
    return (operation.kind in ("gather", "use"), id(operation.group))


def gathered_bytes(group: GroupFacts) -> tuple[int, ...]:
    """A rank's bytes in each collective of one gather; what travels packed is the last."""
    ranks = group.ranks
    if ranks.world == 1 or group.gather_segment_bytes == 0:
        return ()
    if not ranks.has_streams:
        return (group.gather_segment_bytes,) if ranks.transport.is_collective else (group.row_bytes,)
    packed = (group.staging_bytes // ranks.world,) if group.staging_bytes else ()
    return (*group.direct_chunk_bytes, *packed)


def _our_gather(group: GroupFacts, pacing: Pacing) -> Task:
    ranks, copy_s = group.ranks, pacing.machine.copy_s
    axis = pacing.axis(ranks)
    chunks = gathered_bytes(group)
    packed_bytes = 0
    if not ranks.has_streams:
        num_launches, packed_bytes = 0, group.slot_bytes
    elif not chunks:
        num_launches = 1
    else:
        num_launches = (len(group.direct_chunk_bytes) > 0) + 2 * (group.staging_bytes > 0)
        packed_bytes = group.staging_bytes
    return Task(
        "gather",
        (True, id(group)),
        tuple(Collective("all_gather", chunk * ranks.world, axis) for chunk in chunks),
        num_launches,
        (_OURS_UNIT_S + _OURS_PARAM_S * len(group.params)) / 3,
        before_s=copy_s(group.row_bytes),
        after_s=copy_s(packed_bytes) if chunks else 0.0,
        is_one_launch=ranks.gathers == "grouped",
    )


def _our_reduction(group: GroupFacts, pacing: Pacing) -> Task:
    ranks, copy_s = group.ranks, pacing.machine.copy_s
    calls = []
    if ranks.world > 1:
        chunks = (group.packed_reduce_bytes, *group.direct_reduce_bytes)
        calls += [Collective("reduce_scatter", chunk * ranks.world, pacing.axis(ranks)) for chunk in chunks]
    if ranks.replicas > 1:
        over_replicas = group.reduce_segment_bytes if ranks.has_streams else group.replica_segment_bytes
        calls.append(Collective("all_reduce", over_replicas, pacing.replicas(ranks)))
    written_bytes = group.packed_reduce_bytes * ranks.world
    read_bytes = group.packed_bytes - sum(group.direct_reduce_bytes) * ranks.world
    in_place = group.reduces_in_place and (ranks.world > 1 or ranks.replicas == 1)
    return Task(
        "reduce",
        (False, id(group)),
        tuple(calls),
        # Packing, which writes the flags of who has gradients; rows from where they were reduced to the gradients.
        (1 + (not in_place)) * ranks.has_streams,
        (_OURS_UNIT_S + _OURS_PARAM_S * len(group.params)) / 3,
        compute_s=copy_s((written_bytes + read_bytes) / 2),
        after_s=0.0 if in_place else copy_s(group.reduce_segment_bytes),
        is_one_launch=ranks.gathers == "grouped",
    )


# ---- others


def theirs(
    peer: OtherSchedule, operations: Iterable[Operation], work: dict[nn.Module, Work], pacing: Pacing
) -> list[Task]:
    """The schedule of another implementation over the same units."""
    tasks: list[Task] = []
    vectors = _Vectors(peer, pacing)
    last_reduction: tuple | None = None
    for operation in _order(peer, operations):
        group = operation.group
        if operation.module is not None:
            task = pacing.module_task(operation, work)
            if task is not None:
                tasks.append(task)
        elif operation.kind == "gather":
            tasks.append(_their_gather(peer, group, pacing))
            vectors.add(group)
        elif operation.kind == "use":
            whole = sum(bytes_of(peer, group)) * group.ranks.world if peer.copies_out else 0
            copies = 0 if group.ranks.world == 1 else int(peer.copies_out)
            tasks.append(Task("use", _key(operation), num_launches=copies, compute_s=pacing.machine.copy_s(whole)))
        elif operation.kind == "reduce":
            if last_reduction is not None:
                tasks.append(Task("reduced", last_reduction))
            tasks.append(_their_reduction(peer, group, pacing))
            last_reduction = (False, id(group))
    return [*vectors.gather(), *tasks, *vectors.reduce()]


def _order(peer: OtherSchedule, operations: Iterable[Operation]) -> Iterator[Operation]:
    """Ours, with each gather of forward in front of its use where nothing is prefetched; waits are the caller's."""
    late: dict[int, Operation] = {}
    is_forward = True
    for operation in operations:
        is_forward = is_forward and operation.kind != "backward"
        if operation.kind == "reduced":
            continue
        if operation.kind == "gather" and is_forward and not peer.prefetches:
            late[id(operation.group)] = operation
            continue
        if operation.kind == "use" and id(operation.group) in late:
            yield late.pop(id(operation.group))
        yield operation


def _parts(peer: OtherSchedule, group: GroupFacts, chosen: list[bool], element: int) -> tuple[int, ...]:
    """A rank's bytes of each collective for the chosen parameters: ``element`` is the place of the dtype in a shape."""
    world = group.ranks.world
    parts: dict[tuple, int] = {}
    for param, shape, trains, is_chosen in zip(group.params, group.shapes, group.trains, chosen, strict=True):
        if not is_chosen or (peer.keeps_vectors and len(param.size) < 2):
            continue
        numel = math.prod(param.size)
        if not peer.is_flat:
            numel = -(-param.size[0] // world) * math.prod(param.size[1:]) * world if param.size else world
        key = (shape[3], shape[element], trains) if peer.splits_dtypes else ()
        parts[key] = parts.get(key, 0) + numel * shape[element].itemsize
    return tuple(-(-num_bytes // world) for num_bytes in parts.values())


def bytes_of(peer: OtherSchedule, group: GroupFacts) -> tuple[int, ...]:
    """A rank's bytes in each collective of one gather."""
    return _parts(peer, group, [True] * len(group.params), 4) if group.ranks.world > 1 else ()


def reduced_bytes_of(peer: OtherSchedule, group: GroupFacts) -> tuple[int, ...]:
    """A rank's bytes in each reduce-scatter."""
    return _parts(peer, group, list(group.trains), 5)


def _their_gather(peer: OtherSchedule, group: GroupFacts, pacing: Pacing) -> Task:
    ranks = group.ranks
    chunks = bytes_of(peer, group)
    casts = any(shape[3] != shape[4] for shape in group.shapes)
    copies_in = -(-len(group.params) // _FOREACH_TENSORS) if peer.copies_out else 0
    return Task(
        "gather",
        (True, id(group)),
        tuple(Collective("all_gather", chunk * ranks.world, pacing.axis(ranks)) for chunk in chunks),
        # Copies in, and casts before them or in their place.
        copies_in + casts * (copies_in or 1),
        (peer.unit_s + peer.param_s * len(group.params)) / 3,
        before_s=pacing.machine.copy_s(sum(chunks)) * bool(copies_in + casts),
        follows="compute" if peer.prefetches else "use",
    )


def _their_reduction(peer: OtherSchedule, group: GroupFacts, pacing: Pacing) -> Task:
    ranks = group.ranks
    chunks = reduced_bytes_of(peer, group)
    whole = sum(chunks) * ranks.world
    calls = [Collective("reduce_scatter", chunk * ranks.world, pacing.axis(ranks)) for chunk in chunks]
    if ranks.replicas > 1:
        calls += [Collective("all_reduce", chunk, pacing.replicas(ranks)) for chunk in chunks]
    casts = any(shape[3] != shape[5] for shape, trains in zip(group.shapes, group.trains, strict=True) if trains)
    return Task(
        "reduce",
        (False, id(group)),
        tuple(calls if ranks.world > 1 else calls[len(chunks) :]),
        int(peer.packs) + casts,
        (peer.unit_s + peer.param_s * len(group.params)) / 3,
        compute_s=pacing.machine.copy_s((whole + group.packed_bytes) / 2) if peer.packs else 0.0,
        after_s=pacing.machine.copy_s(sum(chunks)) * casts,
    )


class _Vectors:
    """Parameters of one dim, which YaFSDP gathers before all others and reduces after them."""

    def __init__(self, peer: OtherSchedule, pacing: Pacing) -> None:
        self._peer, self._pacing = peer, pacing
        self._groups: dict[int, GroupFacts] = {}

    def add(self, group: GroupFacts) -> None:
        if self._peer.keeps_vectors:
            self._groups[id(group)] = group

    def _task(self, kind: str, call: str, element: int) -> list[Task]:
        whole = {}
        for group in self._groups.values():
            plain = replace(self._peer, keeps_vectors=False)
            chosen = [
                len(param.size) < 2 and (kind == "gather" or trains)
                for param, trains in zip(group.params, group.trains, strict=True)
            ]
            if group.ranks.world > 1:
                axis = self._pacing.axis(group.ranks)
                parts = sum(_parts(plain, group, chosen, element)) * group.ranks.world
                whole[axis] = whole.get(axis, 0) + parts
        calls = tuple(Collective(call, num_bytes, axis) for axis, num_bytes in whole.items() if num_bytes)
        return [Task(kind, (kind, "vectors"), calls)] if calls else []

    def gather(self) -> list[Task]:
        tasks = self._task("gather", "all_gather", 4)
        return [*tasks, *(Task("use", task.key) for task in tasks)]

    def reduce(self) -> list[Task]:
        return self._task("reduce", "reduce_scatter", 5)
