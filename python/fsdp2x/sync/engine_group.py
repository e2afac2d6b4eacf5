"""The process group of ``Peer("tcp://...", group=...)``: a trainer's rank and engines, in which buckets are broadcast.

Needs torch and ``engine.py`` beside it. The group stands by itself: neither side needs a default group, and one that it
has is not touched. Rank 0 is the trainer's and keeps the store where all meet; engines take ranks as they come. A
member that is lost ends the group for all: they leave, and the next push makes another one. Like torch's own groups it
asks nobody for a secret: it is for the network of a cluster.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

if __package__:
    from .engine import WireError
else:
    from engine import WireError

_GLANCE_S, _LOOK_S = 5e-5, 0.05  # between two looks at a broadcast; at the connections of those who take part
# NCCL's watchdog ends the process of a broadcast that takes longer than the group's own limit: ours comes first.
_NEVER = datetime.timedelta(days=30)


class BroadcastGroup:
    """The group as a member sees it: first it knows the store, then all join at the same time."""

    def __init__(self, invitation: Mapping[str, Any], store: dist.TCPStore, host: str) -> None:
        """
        Args:
            invitation: ``backend``, "gloo" for memory of the CPU or "nccl" for that of this process's current GPU;
                ``size``, how many members there are; ``name`` of the group.
            host: an address of this host that the others reach; gloo listens there.

        Raises:
            WireError: this process cannot be a member.
        """
        self._backend, self._size, self._host = invitation["backend"], invitation["size"], host
        self._store: Any = store  # None when the group was left
        self._name = invitation["name"]
        self._group: Any = None
        if self._backend == "gloo" and dist.is_gloo_available():
            self.device = torch.device("cpu")
        elif self._backend == "nccl" and dist.is_nccl_available() and torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        else:
            raise WireError(f"no process group of {self._backend!r} is possible here, for want of its library or a GPU")

    @classmethod
    def opened(cls, backend: str, num_engines: int, host: str, timeout_s: float) -> tuple[BroadcastGroup, dict]:
        """The trainer's, with the invitation for engines. ``timeout_s``: of the store's operations.

        Raises:
            WireError: as above, or no store at ``host``.
        """
        try:
            limit = datetime.timedelta(seconds=timeout_s)
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        except RuntimeError as error:
            raise WireError(f"no store of torch.distributed at {host}: {error}") from error
        name = f"fsdp2x-{secrets.token_hex(8)}"
        invitation = {"backend": backend, "size": num_engines + 1, "name": name, "port": store.port}
        return cls(invitation, store, host), invitation

    @classmethod
    def invited(cls, invitation: Mapping[str, Any], trainer: str, host: str, timeout_s: float) -> BroadcastGroup:
        """An engine's; ``trainer`` is the address of the trainer's host.

        Raises:
            WireError: as above, or the trainer's store is out of reach.
        """
        try:
            limit = datetime.timedelta(seconds=timeout_s)
            store = dist.TCPStore(trainer, invitation["port"], is_master=False, timeout=limit)
        except RuntimeError as error:
            raise WireError(f"no way to the trainer's store, {trainer}:{invitation['port']}: {error}") from error
        return cls(invitation, store, host)

    def join(self, is_trainer: bool, deadline: float) -> None:
        """Becomes a member; NCCL's meet in their first broadcast alone.

        Raises:
            WireError: they did not come by ``deadline``, in seconds of ``time.monotonic``.
        """
        limit, places = _until(deadline), self._store
        # Where torch's own functions put a group of this name: engines that make theirs so meet this one.
        for prefix in (self._name, f"{self._name}/", f"{self.device.type}/"):
            places = dist.PrefixStore(prefix, places)
        try:
            self._store.set_timeout(limit)
            rank = 0 if is_trainer else self._store.add(f"engines of {self._name}", 1)
            if self._backend == "gloo":
                options = dist.ProcessGroupGloo._Options()
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
                options._timeout, options._threads = limit, 1
                self._group = dist.ProcessGroupGloo(places, rank, self._size, options)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = _NEVER
                self._group = dist.ProcessGroupNCCL(places, rank, self._size, options)
        except RuntimeError as error:
            places = None  # the error keeps this frame, and the store must end for those who wait at it
            raise WireError(f"no group of {self._size} members by {self._backend}: {error}") from error

    def meet(self, deadline: float, is_lost: Callable[[], bool]) -> None:
        """A broadcast of nothing, so that a group that cannot work is known before weights are at stake.

        Raises:
            WireError: as ``broadcast``.
        """
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device), deadline, is_lost)

    def broadcast(self, data: torch.Tensor, deadline: float, is_lost: Callable[[], bool]) -> None:
        """The trainer's ``data``, contiguous bytes on ``device``, into that of all others; the current stream waits.

        Raises:
            WireError: it failed, came too late, or ``is_lost`` says that a member is gone. The group was left then.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, _until(deadline)
        look = time.monotonic() + _LOOK_S
        try:
            work = self._group.broadcast([data], options)
            while not work.is_completed():
                now = time.monotonic()
                if now > deadline:
                    raise TimeoutError("not in time: a member hangs or is busy")
                if now > look:
                    look = now + _LOOK_S
                    if is_lost():
                        raise ConnectionError("a member of the group is gone")
                time.sleep(_GLANCE_S)
            work.wait()
        except (RuntimeError, OSError) as error:
            self.close()
            raise WireError(f"a broadcast of {len(data)} bytes failed: {error}") from error

    def close(self) -> None:
        """Leaves the group; those who wait for this member hear of it."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # gloo of older releases cannot, and leaves with its object
                group.abort()


def _until(deadline: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(deadline - time.monotonic(), 1e-3))
