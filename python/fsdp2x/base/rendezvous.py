"""Introduces the ranks of a group to each other, and shares memory between them if possible.

    rendezvous     every rank sends its identity and location              one exchange
    why_not_shared the conclusion: several hosts, users, threads           the same on every rank
    shm_group      the engine's group, or why a rank could not enter it    the same on every rank
    memory_file    a file of the same memory for every rank, or why not    the same on every rank

Nothing here waits for a rank that failed: after each step that can fail the ranks exchange its result.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from fsdp2x.base import torch_private
from fsdp2x.base.failures import digest, exchange
from fsdp2x.base.native import _C
from fsdp2x.base.processes import Process, boot_id, introduced, remember, require_own_process

Facts = tuple[Any, ...]


@dataclass(frozen=True)
class UnitParams:
    """Properties of one unit, or of its part over one mesh, that decide the sizes of collectives."""

    name: str
    params: tuple[tuple[str, Facts], ...]  # (name, facts) in order


def disagreement(of_rank: Mapping[int, Sequence[UnitParams]]) -> str:
    """Returns the first difference between the units of the first rank and another one, or ""."""
    first = next(iter(of_rank))
    for rank, units in of_rank.items():
        for is_unit in (True, False):  # a different unit says more than the number of the model
            sides = ([one for one in side if bool(one.params) is is_unit] for side in (of_rank[first], units))
            for here, there in zip_longest(*sides):
                if here != there:
                    return f"rank {first} has {_text(here, there)}, rank {rank} {_text(there, here)}"
    return ""


def _text(unit: UnitParams | None, beside: UnitParams | None) -> str:
    if unit is None:
        return "no more units"
    text = f"unit {unit.name!r}" if unit.params else unit.name
    for param, other in zip_longest(unit.params, beside.params if beside is not None else unit.params):
        if param is None:
            return f"{text} with {len(unit.params)} parameters"
        if param != other:
            return f"{text} with {param[0]!r} ({', '.join(str(fact) for fact in param[1])})"
    return text


@dataclass(frozen=True)
class PeerInfo:
    """The data that a rank reports about itself."""

    process: Process
    uid: int
    host: str  # equal for processes that can send each other file descriptors; empty if unknown
    fault: str  # why it is unknown
    socket: str  # from rank 0, like its token
    token: bytes
    group_name: str  # the name that torch would give its next group over these ranks
    checks_ranks: bool  # whether its collectives are compared with the others'
    is_observed: bool  # whether a dispatch mode watches this rank's collectives
    shapes: bytes  # digest of the units' parameters
    training: bytes  # digest of which of them are trained
    others: dict[int, Process]  # processes that it knows outside of this group


@dataclass(frozen=True)
class GroupInfo:
    """The ranks of a group, in rank order, and what they are about to shard."""

    group: dist.ProcessGroup
    peers: list[PeerInfo]
    units: Sequence[UnitParams]
    trained: Sequence[UnitParams]

    @property
    def ranks(self) -> list[int]:
        """The ranks' numbers in the whole job, as messages use them."""
        return dist.get_process_group_ranks(self.group)

    @property
    def is_observed(self) -> bool:
        return any(peer.is_observed for peer in self.peers)

    @property
    def checks_ranks(self) -> bool:
        return all(peer.checks_ranks for peer in self.peers)

    @property
    def fault(self) -> str | None:
        """Why a rank does not know where it runs, or None."""
        for rank, peer in zip(self.ranks, self.peers, strict=True):
            if peer.fault:
                return f"rank {rank} cannot tell which host it runs on ({peer.fault})"
        return None

    @property
    def why_not_shared(self) -> str | None:
        """Why the ranks cannot share memory, or None if they can."""
        if len({peer.host for peer in self.peers if not peer.fault}) > 1:
            return "the ranks run on several hosts"
        if self.fault is not None:
            return self.fault
        if len({peer.uid for peer in self.peers}) > 1:
            return "the ranks belong to several users"
        if len({peer.process.pid for peer in self.peers}) < len(self.peers):
            return "several ranks are threads of one process"
        return None

    def _exchange(self, mine: str) -> list[str]:
        return exchange(mine, self.group)

    def shm_group(self, timeout: timedelta):
        """Returns (the engine's group, "") or (None, why a rank could not enter it). Collective."""
        return _C.shm_group(*self._place, timeout.total_seconds(), self._exchange)

    def memory_file(self, num_bytes: int, use: Callable[[int], None]) -> str:
        """Calls ``use`` with the descriptor of a file of the same anonymous memory on every rank. Collective.

        Returns "", or why a rank could not get the file or use it. The descriptor is closed afterwards.
        """
        return _C.share_memory_file(*self._place, self._exchange, num_bytes, use)

    def twin_of_group(self) -> dist.ProcessGroup:
        """Makes another gloo group of the same ranks. Returns the group itself if that is impossible. Collective.

        Messages that a failed step leaves in the new group do not disturb the user's collectives. It ends with the
        user's group, because torch keeps the sockets and threads of every group that is not destroyed.
        """
        # torch would wait for the ranks under different names.
        if not torch_private.is_gloo(self.group) or len({peer.group_name for peer in self.peers}) > 1:
            return self.group
        timeout = torch_private.group_timeout(self.group, torch.device("cpu"))
        made = dist.new_group(self.ranks, timeout, "gloo", use_local_synchronization=True, group_desc="fsdp2x")
        assert isinstance(made, dist.ProcessGroup), "every caller is a member"
        weakref.finalize(self.group, _destroy, made, os.getpid()).atexit = False  # type: ignore[missing-attribute]
        return made

    def require_same_units(self, caller: str = "fully_shard", *, trained: bool = False) -> None:
        """Raises ValueError, the same on every rank, if the ranks do not have the same parameters.

        ``trained``: they also train the same ones. Over a process group, gradients would have different sizes.
        """
        digests = {peer.training if trained else peer.shapes for peer in self.peers}
        if len(digests) > 1:
            everywhere = exchange(self.trained if trained else self.units, self.group)
            difference = disagreement(dict(zip(self.ranks, everywhere, strict=True)))
            demand = "over a process group every rank must train the same parameters"
            demand = demand if trained else "every rank must have the same modules, shapes and dtypes"
            raise ValueError(f"{caller}: the ranks have different models: {difference}; {demand}")

    @property
    def _place(self) -> tuple[int, list[int], str, bytes]:
        first = self.peers[0]
        return dist.get_rank(self.group), self.ranks, first.socket, first.token


def _destroy(group: dist.ProcessGroup, pid: int) -> None:
    """Destroys ``group`` in the process ``pid`` that made it, since a fork shares its sockets."""
    if os.getpid() == pid:
        with contextlib.suppress(ValueError):  # all groups were destroyed together
            dist.destroy_process_group(group)


def rendezvous(
    group: dist.ProcessGroup,
    units: Sequence[UnitParams] = (),
    trained: Sequence[UnitParams] = (),
    checks_ranks: bool = False,
) -> GroupInfo | None:
    """Exchanges identities. Collective over ``group``. Returns None if the process group is fake and cannot answer.

    ``units`` and ``trained`` are what the ranks are about to shard, and to train of it. ``checks_ranks``: whether this
    rank compares each collective with its peers'.
    """
    require_own_process("talk to the other ranks")
    if dist.get_backend(group) == "fake":
        return None
    host, fault = "", ""
    try:
        host = _host_identity()
    except OSError as error:
        fault = str(error)
    mine = PeerInfo(
        Process.own(),
        os.getuid(),
        host,
        fault,
        f"fsdp2x-{secrets.token_hex(16)}",
        secrets.token_bytes(32),
        torch_private.next_group_name(dist.get_process_group_ranks(group)),
        checks_ranks,
        torch_private.is_observed(),
        digest(units),
        digest(trained),
        {} if dist.get_world_size(group) == dist.get_world_size() else introduced(),
    )
    peers = exchange(mine, group)
    for peer in peers:
        remember(peer.others)
    remember(dict(zip(dist.get_process_group_ranks(group), (g.process for g in peers), strict=True)))
    return GroupInfo(group, peers, units, trained)


def _host_identity() -> str:
    """Returns a string that is equal for processes that can send file descriptors: same boot and network namespace."""
    return f"{boot_id()}/{os.stat('/proc/self/ns/net').st_ino}"
