"""The process group of ``Peer("tcp://...", group=...)``: broadcasts buckets from a trainer's rank to engines.

Needs torch and ``engine.py`` in the same folder. The group is independent: neither side needs a default group, and an
existing one is not touched. Rank 0 is the trainer's and keeps the store where all connect. Engines get ranks in the
order in which they connect. If a member is lost, all leave, and the next push makes a new group. Like torch's groups it
needs no secret and encrypts nothing, so use it inside the network of a cluster. With NCCL, both sides need compatible
releases.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

if __package__:
    from .engine import WireError
else:
    from engine import WireError

_GLANCE_S, _LOOK_S = 5e-5, 0.05  # intervals between checks of a broadcast and of its members


class BroadcastGroup:
    """A member's view of the group: it first knows the store, then all join at the same time."""

    def __init__(
        self, invitation: Mapping[str, Any], store: dist.TCPStore, host: str, device_index: int | None = None
    ) -> None:
        """Prepares a member.

        Args:
            invitation: ``backend``, "gloo" for CPU memory or "nccl" for a GPU's; ``size``, the number of members; and
                ``name`` of the group.
            store: the store of the group.
            host: address of this host that the others reach; gloo listens there.
            device_index: the GPU. None: the current one.

        Raises:
            WireError: this process cannot be a member.
        """
        self._backend, self._size, self._host = invitation["backend"], invitation["size"], host
        self._name = invitation["name"]
        self._store: Any = store  # None after leaving the group
        self._group: Any = None
        self._has_met = False
        if self._backend == "gloo" and dist.is_gloo_available():
            self.device = torch.device("cpu")
        elif self._backend == "nccl" and dist.is_nccl_available() and torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device() if device_index is None else device_index)
        else:
            raise WireError(f"no process group of {self._backend!r} is possible here: its library or a GPU is missing")

    @classmethod
    def opened(cls, backend: str, num_engines: int, host: str, timeout_s: float) -> tuple[BroadcastGroup, dict]:
        """Makes the trainer's member and the invitation for engines. ``timeout_s`` limits operations of the store.

        Args:
            backend: "gloo" or "nccl".
            num_engines: number of engines.
            host: address where the store and gloo listen. "" lets the store listen at all addresses of this host.
            timeout_s: limit of the store's operations in seconds.

        Raises:
            WireError: this process cannot be a member, or there is no store at ``host``.
        """
        try:
            door = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            port, limit = door.getsockname()[1], datetime.timedelta(seconds=timeout_s)
            options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": door.detach()}
            store = dist.TCPStore(host or "localhost", port, timeout=limit, **options)
        except (OSError, RuntimeError) as error:
            raise WireError(f"no store of torch.distributed at {host or 'this host'}: {error}") from error
        name = f"fsdp2x-{secrets.token_hex(8)}"
        invitation = {"backend": backend, "size": num_engines + 1, "name": name, "port": port}
        return cls(invitation, store, host), invitation

    @classmethod
    def invited(
        cls, invitation: Mapping[str, Any], trainer: str, host: str, timeout_s: float, device_index: int | None
    ) -> BroadcastGroup:
        """Makes an engine's member. ``trainer`` is the address of the trainer's host.

        Raises:
            WireError: this process cannot be a member, or the trainer's store is out of reach.
        """
        try:
            limit = datetime.timedelta(seconds=timeout_s)
            store = dist.TCPStore(trainer, invitation["port"], is_master=False, timeout=limit)
        except RuntimeError as error:
            raise WireError(f"cannot reach the trainer's store, {trainer}:{invitation['port']}: {error}") from error
        return cls(invitation, store, host, device_index)

    def join(self, is_trainer: bool, deadline: float, is_lost: Callable[[], bool]) -> None:
        """Becomes a member. NCCL's members only connect in their first broadcast.

        Raises:
            WireError: they did not come by ``deadline``, in seconds of ``time.monotonic``, or ``is_lost`` reports that
                one will not. This process has then left the group.
        """
        self._group, reason = self._within(lambda: self._made(self._store, is_trainer, deadline), deadline, is_lost)
        if reason:
            self.close()
            raise WireError(f"no group of {self._size} members by {self._backend}: {reason}")

    def _made(self, store: dist.TCPStore, is_trainer: bool, deadline: float) -> Any:
        limit, places = _until(deadline), store
        # The prefix of torch's own functions for a group of this name, so that engines that use them can join.
        for prefix in (self._name, f"{self._name}/", f"{self.device.type}/"):
            places = dist.PrefixStore(prefix, places)
        store.set_timeout(limit)
        rank = 0 if is_trainer else store.add(f"engines of {self._name}", 1)
        if self._backend == "gloo":
            gloo: Any = dist.ProcessGroupGloo  # whose options torch's stubs lack
            options, device = gloo._Options(), gloo.create_device
            options._devices = [device(hostname=self._host) if self._host else device()]
            options._timeout, options._threads = limit, 1
            return gloo(places, rank, self._size, options)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        with _without_watchdog():
            return dist.ProcessGroupNCCL(places, rank, self._size, options)

    def meet(self, deadline: float, is_lost: Callable[[], bool]) -> None:
        """Broadcasts nothing, so that a group that cannot work is known before weights are at stake.

        Raises:
            WireError: see ``broadcast``.
        """
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device), deadline, is_lost)

    def broadcast(self, data: torch.Tensor, deadline: float, is_lost: Callable[[], bool]) -> None:
        """Broadcasts the trainer's ``data``, contiguous bytes on ``device``, to all others. The current stream waits.

        Raises:
            WireError: it failed, was too late, or ``is_lost`` reports a lost member. This process has then left the
                group.
        """
        work, reason = self._launched(data, deadline, is_lost)
        if not reason:
            reason = _wait_until(work.is_completed, deadline, is_lost) or _said(work.wait)[1]
        if reason:
            del work  # the error keeps this frame, and the group ends with its last reference
            self.close()
            raise WireError(f"a broadcast of {len(data)} bytes failed: {reason}")

    def _launched(self, data: torch.Tensor, deadline: float, is_lost: Callable[[], bool]) -> tuple[Any, str]:
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, _until(deadline)
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def launch() -> Any:
            with torch.cuda.stream(stream):  # None changes nothing
                return self._group.broadcast([data], options)

        if self._has_met:
            return _said(launch)
        self._has_met = True
        return self._within(launch, deadline, is_lost)  # in the first one NCCL waits until all have come

    def end(self, deadline: float) -> None:
        """Leaves the group after everything sent has arrived. All members do so at the same time."""
        if self._group is not None:
            self._within(self._group.shutdown, deadline, lambda: False)
        self.close()

    def close(self) -> None:
        """Leaves the group without waiting. A pending operation of gloo lasts until its own limit."""
        held = [self._group]
        self._group = self._store = None
        if held[0] is not None:
            _said(held[0].abort)  # gloo's does nothing: its group ends with its object, which waits
            threading.Thread(target=held.clear, name="fsdp2x-group", daemon=True).start()

    def _within(self, act: Callable[[], Any], deadline: float, is_lost: Callable[[], bool]) -> tuple[Any, str]:
        """Returns the result of a call that may wait for members without a limit, or why it failed.

        A thread makes the call, and is abandoned if the call is too late.
        """
        done, found = threading.Event(), []

        def run() -> None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            found.append(_said(act))
            done.set()

        threading.Thread(target=run, name="fsdp2x-group", daemon=True).start()
        reason = _wait_until(lambda: done.wait(_GLANCE_S), deadline, is_lost)
        return (None, reason) if reason else found[0]


def common_host(hosts: Sequence[str]) -> str:
    """Returns where the trainer of a group listens, whom engines know by ``hosts``. "" for several addresses.

    Raises:
        WireError: one address is local to this host and another is not, so engines could not reach each other.
    """
    names = sorted(set(hosts))
    if len(names) > 1 and any(ipaddress.ip_address(name).is_loopback for name in names):
        raise WireError(
            f"engines that know this host as {names} cannot reach each other in a group. Use addresses of the network "
            "for all of them."
        )
    return names[0] if len(names) == 1 else ""


def _said(act: Callable[[], Any]) -> tuple[Any, str]:
    """Returns the result of a call, or why it failed. Keeps no frame of it."""
    try:
        return act(), ""
    except Exception as error:
        return None, str(error) or type(error).__name__


def _wait_until(is_done: Callable[[], bool], deadline: float, is_lost: Callable[[], bool]) -> str:
    """Waits, and returns why it gave up, or an empty string."""
    look = time.monotonic() + _LOOK_S
    while not is_done():
        now = time.monotonic()
        if now > deadline:
            return "not in time: a member hangs or is busy"
        if now > look:
            look = now + _LOOK_S
            if is_lost():
                return "a member has left or failed"
        time.sleep(_GLANCE_S)
    return ""


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Turns off NCCL's watchdog, which would end this process if a member is lost. Groups that block have none."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _until(deadline: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(deadline - time.monotonic(), 1e-3))
