"""Chooses how the ranks of a shard group communicate: shared memory, the process group, or nothing at world size 1.

Collective over the shard group, once for each root at lazy initialization. The engine's groups own their transports.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fsdp2x.base import torch_private
from fsdp2x.base.agreement import agreement_of, make_agreement
from fsdp2x.base.annotations import skips_checks
from fsdp2x.base.collectives import (
    MESSAGE_BYTES,
    all_gather,
    all_to_all,
    explain_collective,
    gather_in_place,
    may_replace,
    reduce_scatter,
    wait,
)
from fsdp2x.base.native import _C
from fsdp2x.base.rendezvous import GroupInfo, UnitParams, rendezvous
from fsdp2x.lifecycle.comms import describe_wire_formats
from fsdp2x.lifecycle.unit import ShardedUnit
from fsdp2x.sharding import transport
from fsdp2x.sharding.mesh import ShardGroup, post_forward_group
from fsdp2x.sharding.param_group import ShardedParamGroup
from fsdp2x.sharding.transport import TransportKind, has_streams


class TransportChoice:
    """Makes the transports of one root, one for each shard group, by one rule."""

    def __init__(self, root: ShardedUnit) -> None:
        """``root`` has the same tree on every rank, in the same order."""
        tree = root.shared.tree
        needs_group = next((needed for state in tree if (needed := state.needs_group)), "")
        settings = root.settings
        if needs_group and settings.transport == TransportKind.SHM:
            raise ValueError(
                f'fully_shard: {needs_group} need a process group, but got transport="shm". Use '
                'transport="process_group" or "auto".'
            )
        self._name = TransportKind.PROCESS_GROUP if needs_group else settings.transport
        self._timeout = settings.timeout
        self._comm_memory = next((one.comms.memory for one in tree if one.comms.memory is not None), None)
        # Streams. Roots that were given the same dict share them.
        self._layers: dict[torch.device, Any] = next(
            (one.comms.layers for one in tree if one.comms.layers is not None), {}
        )
        self._model = f"{root.number.kind} {root.number.number}"
        self._checks_ranks = all(state.settings.checks_ranks for state in tree)
        self._units = [(state.name, group) for state in tree for group in state.groups]
        self._on_device = any(has_streams(group.ranks.device) for _, group in self._units)
        self._known: dict[Any, GroupInfo | None] = {}
        self._made: dict[Any, Any] = {}
        self._all_reduces: dict[Any, Any] = {}

    def transport_of(self, ranks: ShardGroup):
        """Returns the engine's transport of one shard group, one object per group. Collective at the first call.

        Raises:
            ValueError: the ranks have different models, or ``transport="shm"`` but they cannot share memory. The
                message is the same on every rank.
        """
        if ranks.group not in self._made:
            self._made[ranks.group] = self._make(ranks)
        return self._made[ranks.group]

    def all_reduce_of(self, ranks: ShardGroup):
        """Returns the all-reduce over the replicas, one object per group. Collective over it at the first call.

        Replicas on several hosts, or watched by a dispatch mode, use the process group whatever the shards use.

        Raises:
            ValueError: the replicas have, or train, different parameters. Raised on every replica.
        """
        group = ranks.replicate_group
        if group not in self._all_reduces:
            known = self._group_info(group)
            shared, _ = self._shared(group, ranks.device)
            if known is not None:
                known.require_same_units(trained=True)  # so that gradients have the same size on each replica
            if shared is None:
                self._all_reduces[group] = skips_checks(_all_reduce, group, self._timeout)
            else:
                self._all_reduces[group] = _C.HostAllReduce(shared)
        return self._all_reduces[group]

    def _make(self, ranks: ShardGroup):
        is_alone = ranks.world == 1 and not has_streams(ranks.device)
        if is_alone and (self._name != TransportKind.PROCESS_GROUP or ranks.group is None):
            return _C.local_transport()
        shared, reason = self._shared(ranks.group, ranks.device)
        if shared is not None:
            return _C.shm_transport(shared)
        if self._name == TransportKind.SHM:
            raise ValueError(f'fully_shard: transport="shm" is not possible: {reason}. Use transport="process_group".')
        known = self._group_info(ranks.group)
        if known is not None:
            known.require_same_units(trained=True)
        return self._over_process_group(ranks)

    def agreement_of(self, group: dist.ProcessGroup | None) -> _C.Agreement | None:
        """Returns the agreement of the ranks of ``group``, after its first collective call. None: no comparison."""
        known = self._known.get(group)
        agreement = agreement_of(group) if known is not None and known.checks_ranks else None
        return None if agreement is None else agreement.engine

    def agree(self, root, group: ShardedParamGroup, post_forward_world: int | None) -> None:
        """Compares each collective of ``group`` with the other ranks from now on, and notifies them if a pass raises.

        ``root`` is the engine's, of the group's unit. ``post_forward_world`` is how many ranks keep it after forward.
        """
        engine = group.engine
        assert engine is not None, "the group is made before it is connected"
        replicas = group.ranks.replicate_group if engine.all_reduce is not None else None
        kept = None
        if post_forward_world and group.ranks.group is not None:  # a replicated group has no shards
            kept = post_forward_group(group.ranks, post_forward_world).group
        agreements: list[Any] = [self.agreement_of(one) for one in (group.ranks.group, replicas, kept)]
        if group.transport.shares_memory:
            agreements[0] = None  # ranks read each other's memory
        if isinstance(engine.all_reduce, _C.HostAllReduce):
            agreements[1] = None
        for agreement in agreements:
            if agreement is not None:
                root.add_agreement(agreement)
        shards, replicated, kept_after = agreements
        engine.take_seats(shards, replicated, kept_after, self._model)

    def explain_of(self, group: dist.ProcessGroup | None) -> Callable[[BaseException, str], BaseException] | None:
        """Returns the function that explains a failed collective of ``group``. See ``explain_collective``."""
        return None if self._known.get(group) is None else functools.partial(explain_collective, group)

    def _group_info(self, group: dist.ProcessGroup | None) -> GroupInfo | None:
        """Returns the ranks of ``group``. Collective at the first call. None: there are no other ranks.

        Raises:
            ValueError: they have different models.
        """
        if group not in self._known:
            members = [unit for unit in self._units if group in (unit[1].ranks.group, unit[1].ranks.replicate_group)]
            units = [facts_of(*unit) for unit in members]
            units.append(UnitParams(f"model {self._model}", ()))
            trained = [facts_of(*unit, with_training=True) for unit in members]
            known = None if group is None else rendezvous(group, units, trained, self._checks_ranks)
            if known is not None:
                known.require_same_units()
                if known.checks_ranks:
                    self._agree(known)
            self._known[group] = known
        return self._known[group]

    def _agree(self, known: GroupInfo) -> None:
        agreement = make_agreement(known.group, known.peers[0].token.hex())
        if agreement is None:
            return
        if self._timeout is not None:
            agreement.timeout = self._timeout.total_seconds()
        if self._on_device:
            agreement.watch()
        elif agreement.group is None:
            agreement.group = known.twin_of_group()

    def _over_process_group(self, ranks: ShardGroup):
        if ranks.device not in self._layers:
            make = transport.layer_maker(ranks.device)
            self._layers[ranks.device] = make and make()
        layer = self._layers[ranks.device]
        if layer is not None:
            return transport.device_transport(layer, ranks.group, self._comm_memory)
        agreement = agreement_of(ranks.group)
        group: Any = ranks.group if agreement is None else agreement.group
        how = torch_private.gathers_of(group, ranks.device)
        below = transport.pack_below_bytes(how, ranks.world)
        count = None if agreement is None else agreement.engine.count
        return _C.group_transport(
            skips_checks(all_gather, group, count=count),
            skips_checks(gather_in_place, group, count=count),
            skips_checks(reduce_scatter, group, count=count),
            skips_checks(all_to_all, group, count=count),
            skips_checks(wait if agreement is None else agreement.wait, timeout=self._timeout),
            may_replace if how == "messages" else None,
            MESSAGE_BYTES,
            _C.PACK_EVERYTHING if below is None else below,
        )

    def _shared(self, group: dist.ProcessGroup | None, device: torch.device) -> tuple[Any, str]:
        """Returns the memory that the ranks of a group share, or None and the reason. Collective.

        With "auto", warns once if only a limit or a fault of the system prevents sharing.
        """
        if device.type != "cpu":
            return None, "the mesh is not on the CPU"
        if self._name == TransportKind.PROCESS_GROUP:
            return None, "a process group was asked for"
        known = self._group_info(group)
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
                f"fsdp2x: the ranks do not share memory: {fault}. Gathers and reductions use the process group, "
                'which is slower. Pass transport="process_group" to choose that without this warning.',
                stacklevel=2,
            )
        return shared, reason


def _all_reduce(group: dist.ProcessGroup | None, timeout: timedelta | None, rows: torch.Tensor, average: bool) -> bool:
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    agreement = agreement_of(group)
    if agreement is not None:
        agreement.all_reduce(rows, op, timeout)
        return True
    return wait(dist.all_reduce(rows, op=op, group=group, async_op=True), timeout)


def facts_of(name: str, group: ShardedParamGroup, *, with_training: bool = False) -> UnitParams:
    """Returns the facts of one group of the unit ``name``, and its trained parameters if ``with_training``."""
    params = []
    for sharded, shape in zip(group.params, group.shapes(), strict=True):
        facts = [tuple(sharded.local_size), f"cut along {sharded.spec.shard_dim}", str(shape.original)]
        facts += [f"gathered as {shape.compute}", f"reduced as {shape.reduce}"]
        if with_training:
            facts.append("trained" if sharded.param.requires_grad else "frozen")
        if (state := group.unit_state()) is not None:
            facts += describe_wire_formats(state.options)
        params.append((sharded.label, tuple(facts)))
    return UnitParams(name, tuple(params))
