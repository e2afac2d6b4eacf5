"""Chooses how the ranks of a shard group talk: shared memory, the process group, or nothing at world size 1.

Collective over the shard group; runs once per root at lazy initialization. The engine's groups own their transports.
"""

from __future__ import annotations

import enum
import functools
import os
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.runtime import torch_private
from fsdp2x.runtime.agreement import Agreement, agreement_of, make_agreement
from fsdp2x.runtime.annotations import skips_checks
from fsdp2x.runtime.collectives import all_gather, all_to_all, reduce_scatter, wait
from fsdp2x.runtime.explain import explain_collective
from fsdp2x.runtime.mesh import ShardGroup, post_forward_group
from fsdp2x.runtime.native import _C
from fsdp2x.runtime.same_units import facts_of, facts_of_model
from fsdp2x.runtime.sharing import Introductions, introduce

if TYPE_CHECKING:
    from fsdp2x.runtime.params import GroupParams


class Transport(enum.StrEnum):
    """How the ranks of a group hand each other bytes, as the engine names it, and what follows from that."""

    LOCAL = "local"  # a rank alone on a CPU
    SHM = "shm"  # ranks of one host, which read each other's memory
    PROCESS_GROUP = "process_group"

    @property
    def is_collective(self) -> bool:
        """All ranks come to everything in one order, train the same parameters, and send what others are to have."""
        return self is Transport.PROCESS_GROUP

    @property
    def shares_memory(self) -> bool:
        """Slots are one copy for all ranks, in which shards may rest, and units are reduced in any order."""
        return self is Transport.SHM


# What may be asked for.
TRANSPORTS = ("auto", Transport.SHM, Transport.PROCESS_GROUP)


def check_transport(name: str) -> str:
    """``name``, or what FSDP2X_TRANSPORT says in place of "auto", for scripts that cannot pass the argument."""
    if name == "auto":
        name = os.environ.get("FSDP2X_TRANSPORT", "auto")
    if name not in TRANSPORTS:
        raise ValueError(f"fully_shard: transport must be one of {', '.join(TRANSPORTS)}, got {name!r}")
    return name


class TransportChoice:
    """Makes the transports of one root, one per shard group, all by the same rule."""

    def __init__(
        self,
        name: str,
        timeout: timedelta | None,
        *,
        needs_group: str = "",
        comm_memory: str | None = None,
        layers: dict[torch.device, Any] | None = None,
        checks_ranks: bool = True,
        model: str = "",
        units: Iterable[tuple[str, MixedPrecisionPolicy, GroupParams]] = (),
    ) -> None:
        """``units``: what the transports are for, in an order that is the same on every rank.

        ``needs_group``: what of the user's settings runs over a process group alone. ``model``: class, and number in
        the order of ``fully_shard`` calls.
        """

        if needs_group and name == Transport.SHM:
            raise ValueError(
                f'fully_shard: {needs_group} need a process group, but transport="shm" was asked for; use '
                'transport="process_group" or "auto"'
            )
        self._name = Transport.PROCESS_GROUP if needs_group else name
        self._timeout = timeout
        self._comm_memory = comm_memory
        self._layers = {} if layers is None else layers  # streams; shared with whoever has the same dict
        self.model = model
        self._checks_ranks = checks_ranks
        self._units = list(units)
        self._on_device = any(has_streams(group.ranks.device) for _, _, group in self._units)
        self._known: dict[Any, Introductions | None] = {}
        self._made: dict[Any, Any] = {}
        self._all_reduces: dict[Any, Any] = {}

    def transport_of(self, ranks: ShardGroup):
        """The engine's transport of one shard group; the same object for the same group. Collective at the first call.

        Raises:
            ValueError: ``transport="shm"`` where the ranks cannot share memory, or they have different models; the
                message says why, and is the same on every rank.
        """
        if ranks.group not in self._made:
            self._made[ranks.group] = self._make(ranks)
        return self._made[ranks.group]

    def all_reduce_of(self, ranks: ShardGroup):
        """What sums over the replicas; the same object for the same group. Collective over it at the first call.

        Raises ValueError, the same on every replica, when they have, or train, different parameters.

        Replicas on several hosts, or watched by a dispatch mode, use the process group whatever the shards use.
        """
        group = ranks.replicate_group
        if group not in self._all_reduces:
            known = self._introductions(group)
            shared, _ = self._shared(group, ranks.device)
            if known is not None:
                known.require_same_training()  # each replica's gradients are as many bytes
            if shared is None:
                self._use_twin(group)
                self._all_reduces[group] = functools.partial(_all_reduce, group, self._timeout)
            else:
                self._all_reduces[group] = _C.HostAllReduce(shared)
        return self._all_reduces[group]

    def _make(self, ranks: ShardGroup):
        is_alone = ranks.world == 1 and not has_streams(ranks.device)
        if is_alone and (self._name != Transport.PROCESS_GROUP or ranks.group is None):
            return _C.local_transport()
        shared, reason = self._shared(ranks.group, ranks.device)
        if shared is not None:
            return _C.shm_transport(shared)
        if self._name == Transport.SHM:
            raise ValueError(f'fully_shard: transport="shm" is not possible: {reason}; use transport="process_group"')
        known = self._introductions(ranks.group)
        if known is not None:
            known.require_same_training()
        return self._over_process_group(ranks)

    def agreement_of(self, group: dist.ProcessGroup | None):
        """The engine's agreement of the ranks of ``group``, which must have met; None: nothing is compared."""
        known = self._known.get(group)
        agreement = agreement_of(group) if known is not None and known.checks_ranks else None
        return agreement and agreement.engine

    def agree(self, root, group: GroupParams, post_forward_world: int | None) -> None:
        """Has each collective of ``group`` compared with the peers' from now on; they are told when a pass raises.

        ``root``: the engine's, of the group's unit. ``post_forward_world``: how many ranks keep it after forward.
        """
        replicas = group.ranks.replicate_group if group.engine.all_reduce is not None else None
        keeps = bool(post_forward_world) and group.ranks.group is not None  # a replicated group has no shards
        kept = post_forward_group(group.ranks, post_forward_world).group if keeps else None
        agreements = [self.agreement_of(one) for one in (group.ranks.group, replicas, kept)]
        if group.transport.shares_memory:
            agreements[0] = None  # peers look at each other's memory
        if isinstance(group.engine.all_reduce, _C.HostAllReduce):
            agreements[1] = None
        for agreement in agreements:
            if agreement is not None:
                root.add_agreement(agreement)
        group.engine.take_seats(*agreements, self.model)

    def explain_of(self, group: dist.ProcessGroup | None) -> Callable[[BaseException, str], BaseException] | None:
        """What a failed collective of ``group`` is told with: see ``explain_collective``."""
        return None if self._known.get(group) is None else functools.partial(explain_collective, group)

    def _introductions(self, group: dist.ProcessGroup | None) -> Introductions | None:
        """The ranks of ``group``; collective at the first call. None: there is nobody else.

        Raises:
            ValueError: they have different models.
        """
        if group not in self._known:
            members = [unit for unit in self._units if group in (unit[2].ranks.group, unit[2].ranks.replicate_group)]
            units = [facts_of(*unit) for unit in members]
            units.append(facts_of_model(self.model))
            trained = [facts_of(*unit, with_training=True) for unit in members]
            known = None if group is None else introduce(group, units, trained, self._checks_ranks)
            if known is not None:
                known.require_same_units()
                if known.checks_ranks:
                    self._agree(known)
            self._known[group] = known
        return self._known[group]

    def _agree(self, known: Introductions) -> None:
        agreement = make_agreement(known.group, known.greetings[0].token.hex())
        if agreement is not None and self._timeout is not None:
            agreement.timeout = self._timeout.total_seconds()
        if agreement is not None and self._on_device:
            agreement.watch()

    def _use_twin(self, group: dist.ProcessGroup) -> Agreement | None:
        """The agreement over ``group``, whose collectives run over another group from now on. Collective at first."""
        agreement, known = agreement_of(group), self._introductions(group)
        if agreement is not None and agreement.group is None and not self._on_device:
            agreement.group = known.twin_of_group()
        return agreement

    def _over_process_group(self, ranks: ShardGroup):
        if ranks.device not in self._layers:
            make = layer_maker(ranks.device)
            self._layers[ranks.device] = make and make()
        layer = self._layers[ranks.device]
        if layer is not None:
            return _device_transport(layer, ranks.group, self._comm_memory)
        agreement = self._use_twin(ranks.group)
        group = ranks.group if agreement is None else agreement.group
        return _C.group_transport(
            functools.partial(all_gather, group),
            functools.partial(reduce_scatter, group),
            functools.partial(all_to_all, group),
            functools.partial(wait if agreement is None else agreement.wait, timeout=self._timeout),
        )

    def _shared(self, group: dist.ProcessGroup, device: torch.device) -> tuple[Any, str]:
        """The engine's memory that the ranks of a group share, or None and why they do not. Collective.

        With "auto" a rank that could share memory but for a limit or a fault of its system is warned of, once.
        """
        if device.type != "cpu":
            return None, "the mesh is not on the CPU"
        if self._name == Transport.PROCESS_GROUP:
            return None, "a process group was asked for"
        known = self._introductions(group)
        if known is None:
            return None, "the process group is fake"
        if self._name == "auto" and known.is_observed:
            return None, "a dispatch mode watches the collectives"
        shared, fault = None, known.fault
        reason = known.why_not_shared
        if reason is None:
            shared, fault = known.shm_group(self._timeout or torch_private.group_timeout(group, device))
            reason = fault
        if fault and reason == fault and self._name == "auto" and dist.get_rank(group) == 0:
            warnings.warn(
                f"fsdp2x: the ranks do not share memory: {fault}. Gathers and reductions go through the process group, "
                'which is slower; transport="process_group" chooses that without this warning.',
                stacklevel=2,
            )
        return shared, reason


def layer_maker(device: torch.device) -> Callable[[], Any] | None:
    """Makes the streams and events of ``device`` as the engine wants them; None on the CPU, which has none."""
    if device.type == "cpu":
        return None
    if device.type == "cuda" and torch.version.hip is None:
        _warn_without_kernels()
    return functools.partial(_C.TorchLayer, device)


@functools.cache
def _warn_without_kernels() -> None:
    """Once, at the first CUDA device: a build that found no nvcc works, so nobody would look for the reason."""
    if not _C.has_device_kernels():
        warnings.warn(
            "fsdp2x was built without nvcc: on a GPU torch's operations run in place of its kernels, which costs a "
            "launch or more for each parameter, and wire formats are refused. Build it again where nvcc is, or with "
            "`make build CUDA=wheels`, which takes nvcc from packages. `fsdp2x doctor` says what would be used.",
            stacklevel=2,
        )


def has_streams(device: torch.device) -> bool:
    """Whether collectives run beside the compute on streams, and gather in place."""
    return layer_maker(device) is not None


def _device_transport(layer, group: dist.ProcessGroup | None, comm_memory: str | None):
    _warn_of_one_queue(layer.device)
    world = 1 if group is None else dist.get_world_size(group)
    pack_below = pack_below_bytes(torch_private.gathers_of(group, layer.device), world)
    return _C.DeviceTransport(
        all_gather=functools.partial(_all_gather_now, group),
        all_gather_group=None if pack_below is None else functools.partial(_all_gather_group, group),
        reduce_scatter=device_reduction(group),
        all_to_all=functools.partial(_all_to_all_now, group),
        allocate=None if group is None else torch_private.comm_allocator(comm_memory, group, layer.device),
        layer=layer,
        pack_below_bytes=pack_below or 0,
    )


def _warn_of_one_queue(device: torch.device) -> None:
    if device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warnings.warn(
            "fsdp2x: CUDA_DEVICE_MAX_CONNECTIONS=1 gives all streams one queue of the device, in which gathers and "
            "reductions wait for the compute that was enqueued before them: nothing overlaps. Tensor parallelism of "
            "Megatron asks for it, fully sharded training does not: unset it.",
            stacklevel=2,
        )


def device_reduction(group: dist.ProcessGroup | None) -> Callable[..., bool]:
    """A reduce-scatter in stream order, of (output, source, average).

    What is divided by another number than the ranks' is summed first: NCCL's premultiplied sum costs no pass, but takes
    the factor of bf16 for zero before torch 2.15, and a pass over reduced rows is short.
    """
    return functools.partial(_reduce_scatter_now, group)


# Where every gather is a launch of its own, each pays the latency of all steps around a ring, about 4 us a rank. Device
# memory copies 7 MiB in that time: what is smaller is not worth a gather of its own. Estimated from NCCL's published
# latencies, not measured on several GPUs.
_ALONE_BYTES = 64 * 2**20
_ALONE_BYTES_OF_A_RANK = 8 * 2**20


def pack_below_bytes(gathers: str, world: int) -> int | None:
    """Parameters of fewer bytes are gathered together, in one packed collective; None: all are.

    ``gathers``: how the backend runs many gathers, as ``torch_private.gathers_of`` says. Of parameters that are large
    enough the engine gathers few alone, and none where they are many (csrc/core/gather_plan.hpp).
    """
    if gathers == "grouped":
        return _C.PACK_BELOW_BYTES
    return max(_ALONE_BYTES, world * _ALONE_BYTES_OF_A_RANK) if gathers == "in turn" else None


# The following are ordered by the current stream and return when they are enqueued: a synchronous collective of NCCL
# runs on the current stream and blocks no host; gloo's blocks it, and is for tests there.


def _all_gather_now(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor) -> bool:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, source, group=group)
    return True


def _all_gather_group(group: dist.ProcessGroup, outputs: list[torch.Tensor], sources: list[torch.Tensor]) -> bool:
    torch_private.all_gather_group(group, outputs, sources)
    return True


def _reduce_scatter_now(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor, average: bool) -> bool:
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, source, op=op, group=group)
    return True


def _all_to_all_now(group: dist.ProcessGroup, output: torch.Tensor, source: torch.Tensor) -> bool:
    dist.all_to_all_single(output, source, group=group)
    return True


@skips_checks
def _all_reduce(group: dist.ProcessGroup, timeout: timedelta | None, rows: torch.Tensor, average: bool) -> bool:
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    agreement = agreement_of(group)
    if agreement is not None and agreement.group is not None:
        return agreement.wait(dist.all_reduce(rows, op=op, group=agreement.group, async_op=True), timeout)
    if timeout is None or agreement is not None:  # in the order of the current stream on a device
        dist.all_reduce(rows, op=op, group=group)
        return True
    return wait(dist.all_reduce(rows, op=op, group=group, async_op=True), timeout)
