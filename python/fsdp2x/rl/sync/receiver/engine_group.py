"""The process group of ``Peer("tcp://...", group=...)``: a trainer's rank and engines, in which buckets are broadcast.

Needs torch and ``engine.py`` beside it. The group stands by itself: neither side needs a default group, and one that it
has is not touched. Rank 0 is the trainer's and keeps the store where all meet; engines take ranks as they come. A
member that is lost ends the group for all: they leave, and the next push makes another one. Like torch's own groups it
asks nobody for a secret, and what goes through it is not encrypted: it is for the network of a cluster. Both sides of
NCCL need releases of it that speak to each other.
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

_GLANCE_S, _LOOK_S = 5e-5, 0.05  # between two looks at a broadcast; at those who take part


class BroadcastGroup:
    """The group as a member sees it: first it knows the store, then all join at the same time."""

    def __init__(
        self, invitation: Mapping[str, Any], store: dist.TCPStore, host: str, device_index: int | None = None
    ) -> None:
        """
        Args:
            invitation: ``backend``, "gloo" for memory of the CPU or "nccl" for that of a GPU; ``size``, how many
                members there are; ``name`` of the group.
            host: an address of this host that the others reach; gloo listens there.
            device_index: the GPU. None: the current one.

        Raises:
            WireError: this process cannot be a member.
        """
        self._backend, self._size, self._host = invitation["backend"], invitation["size"], host
        self._name = invitation["name"]
        self._store: Any = store  # None when the group was left
        self._group: Any = None
        self._has_met = False
        if self._backend == "gloo" and dist.is_gloo_available():
            self.device = torch.device("cpu")
        elif self._backend == "nccl" and dist.is_nccl_available() and torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device() if device_index is None else device_index)
        else:
            raise WireError(f"no process group of {self._backend!r} is possible here, for want of its library or a GPU")

    @classmethod
    def opened(cls, backend: str, num_engines: int, host: str, timeout_s: float) -> tuple[BroadcastGroup, dict]:
        """The trainer's, with the invitation for engines. ``timeout_s``: of the store's operations.

        Args:
            host: where the store listens, and gloo; "" for the store: at all addresses of this host.

        Raises:
            WireError: as above, or no store at ``host``.
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
        """An engine's; ``trainer`` is the address of the trainer's host.

        Raises:
            WireError: as above, or the trainer's store is out of reach.
        """
        try:
            limit = datetime.timedelta(seconds=timeout_s)
            store = dist.TCPStore(trainer, invitation["port"], is_master=False, timeout=limit)
        except RuntimeError as error:
            raise WireError(f"no way to the trainer's store, {trainer}:{invitation['port']}: {error}") from error
        return cls(invitation, store, host, device_index)

    def join(self, is_trainer: bool, deadline: float, is_lost: Callable[[], bool]) -> None:
        """Becomes a member; NCCL's meet in their first broadcast alone.

        Raises:
            WireError: they did not come by ``deadline``, in seconds of ``time.monotonic``, or ``is_lost`` says that one
                will not. The group was left then.
        """
        self._group, reason = self._within(lambda: self._made(self._store, is_trainer, deadline), deadline, is_lost)
        if reason:
            self.close()
            raise WireError(f"no group of {self._size} members by {self._backend}: {reason}")

    def _made(self, store: dist.TCPStore, is_trainer: bool, deadline: float) -> Any:
        limit, places = _until(deadline), store
        # Where torch's own functions put a group of this name: engines that make theirs so meet this one.
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
        work, reason = self._launched(data, deadline, is_lost)
        if not reason:
            reason = _wait_until(work.is_completed, deadline, is_lost) or _said(work.wait)[1]
        if reason:
            del work  # the error keeps this frame, and the group ends with its last user
            self.close()
            raise WireError(f"a broadcast of {len(data)} bytes failed: {reason}")

    def _launched(self, data: torch.Tensor, deadline: float, is_lost: Callable[[], bool]) -> tuple[Any, str]:
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, _until(deadline)
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

        def launch() -> Any:
            with torch.cuda.stream(stream):  # of None: as it is
                return self._group.broadcast([data], options)

        if self._has_met:
            return _said(launch)
        self._has_met = True
        return self._within(launch, deadline, is_lost)  # in the first one NCCL waits until all have come

    def end(self, deadline: float) -> None:
        """Leaves the group when what was sent has arrived; all members do so at the same time."""
        if self._group is not None:
            self._within(self._group.shutdown, deadline, lambda: False)
        self.close()

    def close(self) -> None:
        """Leaves the group, without a wait; an operation of gloo's that others keep waiting lasts to its own limit."""
        held = [self._group]
        self._group = self._store = None
        if held[0] is not None:
            _said(held[0].abort)  # gloo's does nothing: its group ends with its object, which waits
            threading.Thread(target=held.clear, name="fsdp2x-group", daemon=True).start()

    def _within(self, act: Callable[[], Any], deadline: float, is_lost: Callable[[], bool]) -> tuple[Any, str]:
        """What a call gives that may wait for members without a limit, or why it failed.

        It is made in a thread, which it is left to when it comes too late.
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
    """Where the trainer of a group listens, whom its engines know by ``hosts``; "" when that is at several addresses.

    Raises:
        WireError: one of them is this host's alone, and another is not: engines would not reach each other.
    """
    names = sorted(set(hosts))
    if len(names) > 1 and any(ipaddress.ip_address(name).is_loopback for name in names):
        raise WireError(
            f"engines that know this host as {names} cannot reach each other in a group: take addresses of the network "
            "for all of them"
        )
    return names[0] if len(names) == 1 else ""


def _said(act: Callable[[], Any]) -> tuple[Any, str]:
    """What a call gives, or why it failed; no frame of it is kept."""
    try:
        return act(), ""
    except Exception as error:
        return None, str(error) or type(error).__name__


def _wait_until(is_done: Callable[[], bool], deadline: float, is_lost: Callable[[], bool]) -> str:
    """Why the wait was given up; nothing when it is done."""
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
    """NCCL's would end this process when another member is lost; a group that says it blocks has none."""
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
