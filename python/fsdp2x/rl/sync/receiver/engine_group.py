"""Engines on other hosts, for both sides: a process group of a trainer's rank, which hosts its store, and the engines.

    trainer    GroupPeer("tcp://10.0.0.7:7000", num_engines=2)    the group's store listens there
    engines    GroupReceiver("tcp://10.0.0.7:7000", sink)         polls like a ``Receiver``

Needs torch and ``engine.py`` in the same folder. Requests are those of ``engine.py``: rank 0, the trainer's, broadcasts
each to all engines, and every engine sends its answer. A bucket's bytes are one more broadcast. The store's keys:

    fsdp2x            the current group as JSON {name, size, backend, timeout_s, num_pushes}; {torn, reason} for
                      members of a group whose last push failed; "{}" for no group; "" when the store ends
    NAME/engines      number of engines that came; an engine's number is its rank
    NAME/refused      why an engine cannot join

The group is independent: neither side needs a default group, and an existing one is not touched. If a member dies,
hangs, or fails in it, the group ends for all. The next push makes another one, which engines join by themselves. Like
torch's groups it needs no secret and encrypts nothing. Whoever reaches the store's port can join, so use it inside the
network of a cluster. NCCL carries buckets only, and needs compatible releases on all members.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import queue
import re
import socket
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

if __package__:
    from .engine import ReceiveBuffer, Receiver, WireError
else:
    from engine import ReceiveBuffer, Receiver, WireError

SCHEME = "tcp://"
CURRENT, NO_GROUP, NO_MORE = "fsdp2x", "{}", ""  # a key of the store, and two of its values
LOOK_S = 0.05  # interval between looks at the store
_RETRY_S, _STORE_S = 0.5, 10.0  # interval between attempts to reach a store; limit of its operations
_MAX_TEXT_BYTES = 1 << 28


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of "tcp://host:port". An IPv6 host is in brackets.

    Raises:
        ValueError: it is not such an address.
    """
    parts = urllib.parse.urlsplit(address)
    if not address.startswith(SCHEME) or not parts.hostname or parts.port is None:
        raise ValueError(f'expected an address such as "tcp://10.0.0.7:7000", got {address!r}')
    return parts.hostname, parts.port


def join_address(host: str, port: int) -> str:
    """Returns "tcp://host:port"."""
    return f"{SCHEME}[{host}]:{port}" if ":" in host else f"{SCHEME}{host}:{port}"


def own_host(others: Sequence[str]) -> str:
    """Returns the address of this host as hosts ``others`` reach it: one of the network unless all are this host.

    Raises:
        OSError: one of them is unknown or out of reach.
    """
    found = []
    for other in others:
        family, kind, _, _, place = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # a datagram socket, so nothing is sent
            found.append(probe.getsockname()[0])
    return next((host for host in found if not ipaddress.ip_address(host).is_loopback), found[0])


def open_store(host: str, port: int) -> dist.TCPStore:
    """Returns a store that listens at an address of this host. Port 0 takes a free one.

    Raises:
        WireError: there is none, because the port is taken or the address is not one of this host.
    """
    try:
        door = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port, limit = door.getsockname()[1], datetime.timedelta(seconds=_STORE_S)
        options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": door.detach()}
        return dist.TCPStore(host, port, timeout=limit, **options)
    except (OSError, RuntimeError) as error:
        raise WireError(f"no store of torch.distributed at {host}:{port}: {error}") from error


def join_store(host: str, port: int) -> dist.TCPStore:
    """Returns a connection to a store. A connection serves one thread at a time.

    Raises:
        WireError: it is out of reach.
    """
    try:
        socket.create_connection((host, port), _STORE_S).close()  # torch would log each attempt that fails
        return dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=_STORE_S))
    except (OSError, RuntimeError) as error:
        raise WireError(f"cannot reach the trainer's store, {host}:{port}: {error}") from error


# ---- groups


class BroadcastGroup:
    """A member's view of a process group: it first knows the store, then all join at the same time.

    If a method raises, this process has left the group. ``deadline`` is in seconds of ``time.monotonic``.
    """

    def __init__(
        self, invitation: Mapping[str, Any], store: dist.TCPStore, host: str, device_index: int | None = None
    ) -> None:
        """Prepares a member.

        Args:
            invitation: ``backend``, "gloo" for CPU memory or "nccl" for a GPU's; ``size``, the number of members; and
                ``name`` of the group.
            store: a connection to the group's store.
            host: address of this host that the others reach; gloo listens there.
            device_index: the GPU. None: the current one.

        Raises:
            WireError: this process cannot be a member.
        """
        self._backend, self._size, self._host = invitation["backend"], invitation["size"], host
        self._name = invitation["name"]
        self._store: Any = store  # None after leaving the group
        self._group: Any = None
        self._calls: queue.SimpleQueue = queue.SimpleQueue()  # of the thread that waits for members
        self._end_calls = weakref.finalize(self, self._calls.put, None)
        if self._backend == "gloo" and dist.is_gloo_available():
            self.device = torch.device("cpu")
        elif self._backend == "nccl" and dist.is_nccl_available() and torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device() if device_index is None else device_index)
        else:
            raise WireError(f"no process group of {self._backend!r} is possible here: its library or a GPU is missing")

    def join(self, rank: int, deadline: float, is_lost: Callable[[], bool]) -> None:
        """Becomes a member. NCCL's members only connect in their first broadcast.

        Raises:
            WireError: the others did not come in time, or ``is_lost`` reports that one will not.
        """
        threading.Thread(target=_run_calls, args=(self._calls,), name="fsdp2x-group", daemon=True).start()
        self._group = self._within(lambda _: self._made(self._store, rank, deadline), deadline, is_lost)

    def _made(self, store: dist.TCPStore, rank: int, deadline: float) -> Any:
        limit, places = _until(deadline), store
        # The prefix of torch's own functions for a group of this name, so that engines that use them can join.
        for prefix in (self._name, f"{self._name}/", "cpu/" if self._backend == "gloo" else "cuda/"):
            places = dist.PrefixStore(prefix, places)
        store.set_timeout(limit)
        if self._backend == "gloo":
            gloo: Any = dist.ProcessGroupGloo  # whose options torch's stubs lack
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=self._host)]
            options._timeout, options._threads = limit, 1
            return gloo(places, rank, self._size, options)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        with _without_watchdog():
            return dist.ProcessGroupNCCL(places, rank, self._size, options)

    def broadcast(self, data: torch.Tensor, deadline: float, is_lost: Callable[[], bool] = lambda: False) -> None:
        """Broadcasts rank 0's ``data``, contiguous on ``device``, to all others, and waits.

        Raises:
            WireError: it failed, was too late, or ``is_lost`` reports a lost member.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, _until(deadline)
        stream = torch.cuda.current_stream(data.device) if data.is_cuda else None

        def act(group: Any) -> None:
            with torch.cuda.stream(stream):  # None changes nothing
                group.broadcast([data], options).wait()
            if stream is not None:
                stream.synchronize()

        self._within(act, deadline, is_lost)

    def end(self, deadline: float) -> None:
        """Leaves the group after everything sent has arrived. All members do so at the same time."""
        if self._group is not None:
            with contextlib.suppress(WireError):
                self._within(lambda group: group.shutdown(), deadline)
        self.close()

    def close(self) -> None:
        """Leaves the group without waiting. A pending operation of gloo lasts until its own limit."""
        held = [self._group]
        self._group = self._store = None
        self._end_calls()
        if held[0] is not None:
            with contextlib.suppress(Exception):
                held[0].abort()  # gloo's does nothing: its group ends with its object, which waits
            threading.Thread(target=held.clear, name="fsdp2x-group", daemon=True).start()

    def _within(self, act: Callable[[Any], Any], deadline: float, is_lost: Callable[[], bool] = lambda: False) -> Any:
        """Returns what ``act`` does with torch's group, which may wait for members without a limit.

        The group's thread calls it, and is abandoned if the call is too late. It is one thread, because each that uses
        gloo costs memory that is not freed. No frame of this one refers to torch's group, which ends with its last
        reference, because errors keep frames.
        """
        if self._store is None:
            raise WireError(f"the group of {self._size} members by {self._backend} has ended")
        done, found = threading.Event(), []

        def run() -> None:
            try:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                found.append((act(self._group), ""))
            except Exception as error:
                found.append((None, _reason(error)))
            done.set()

        self._calls.put(run)
        while not done.wait(LOOK_S) and not found:
            if time.monotonic() > deadline:
                found.append((None, "not in time: a member hangs or is busy"))
            elif is_lost():
                found.append((None, "a member has left or failed"))
        result, reason = found[0]
        if reason:
            self.close()
            raise WireError(f"the group of {self._size} members by {self._backend} failed: {reason}")
        return result


def _run_calls(calls: queue.SimpleQueue) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # or its group lives until the next one


def _reason(error: Exception) -> str:
    """Returns an error's text without gloo's place in its source and advice."""
    text = re.sub(r"^\[\S+\] ", "", str(error)).partition(". This is typically")[0] or type(error).__name__
    return "not in time: a member hangs or is busy" if "imed out waiting" in text else text


_environment = threading.Lock()


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Turns off NCCL's watchdog, which would end this process if a member is lost. Groups that block have none.

    No option of a group can do this. Its constructor reads the environment, which one thread changes at a time.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    with _environment:
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


class EngineGroup(BroadcastGroup):
    """A trainer and engines: a group of gloo for requests and answers, and with NCCL a second one for buckets."""

    def __init__(self, invitation: Mapping[str, Any], place: tuple[str, int], device_index: int | None = None) -> None:
        """Prepares a member of the group whose store listens at ``place``."""
        host = own_host([place[0]])
        super().__init__({**invitation, "backend": "gloo"}, join_store(*place), host)
        self._buckets: BroadcastGroup | None = None
        if invitation["backend"] != "gloo":
            self._buckets = BroadcastGroup(invitation, join_store(*place), host, device_index)
            self.device = self._buckets.device

    def join(self, rank: int, deadline: float, is_lost: Callable[[], bool]) -> None:
        """Joins, and broadcasts nothing, so that a group that cannot work is known before weights are at stake."""
        super().join(rank, deadline, is_lost)
        if self._buckets is not None:
            self._buckets.join(rank, deadline, is_lost)
        self.broadcast_bucket(torch.zeros(1, dtype=torch.uint8, device=self.device), deadline, is_lost)

    def broadcast_bucket(self, *args: Any) -> None:
        """Broadcasts bytes on ``device``. See ``broadcast``."""
        (self if self._buckets is None else self._buckets).broadcast(*args)

    def ask(self, kind: str, body: Mapping[str, Any], deadline: float) -> None:
        """Sends a request to all engines."""
        for part in _packed({"kind": kind, **body}):
            self.broadcast(part, deadline)

    def receive(self, deadline: float) -> tuple[str, dict[str, Any], list[int]]:
        """Returns (kind, body, no descriptors) of a request."""
        body = self._unpacked(lambda part: self.broadcast(part, deadline))
        return str(body.pop("kind", "")), body, []

    def answer(self, body: Mapping[str, Any], deadline: float) -> None:
        """Answers a request."""
        for part in _packed(body):
            self._within(lambda group, part=part: group.send([part], 0, 0).wait(_until(deadline)), deadline)

    def hear(self, rank: int, deadline: float) -> dict[str, Any]:
        """Returns an engine's answer."""

        def fill(part: torch.Tensor) -> None:
            self._within(lambda group: group.recv([part], rank, 0).wait(_until(deadline)), deadline)

        return self._unpacked(fill)

    def _unpacked(self, fill: Callable[[torch.Tensor], None]) -> dict[str, Any]:
        """Returns the JSON object of two parts, its size and its bytes."""
        fill(size := torch.zeros(1, dtype=torch.int64, device="cpu"))
        try:
            if not 0 < (num_bytes := int(size)) <= _MAX_TEXT_BYTES:
                raise ValueError(f"{num_bytes} bytes")
            fill(text := torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
            if not isinstance(value := json.loads(text.numpy().tobytes()), dict):
                raise ValueError(f"a {type(value).__name__}")
            return value
        except (ValueError, RecursionError) as error:  # RecursionError comes from nested JSON
            self.close()
            raise WireError(f"a member sends no JSON object: {error}") from error

    def is_closed(self) -> bool:
        """Returns whether this process has left the group."""
        return self._store is None or self._buckets is not None and self._buckets._store is None

    def close(self) -> None:
        super().close()
        if self._buckets is not None:
            self._buckets.close()


def _packed(value: Mapping[str, Any]) -> list[torch.Tensor]:
    text = bytearray(json.dumps(value, separators=(",", ":")).encode())
    return [torch.tensor([len(text)], device="cpu"), torch.frombuffer(text, dtype=torch.uint8)]


# ---- the engine's side


class GroupReceiver(Receiver):
    """A ``Receiver`` for trainers on any host: ``GroupPeer("tcp://host:port", num_engines=...)``.

    A thread follows the trainers' store, so an engine may start before or after the trainers. ``poll`` joins their
    group, and the next one if a group ends. In addition to the weights it needs memory for the largest bucket, on the
    group's device.
    """

    def __init__(self, address: str, sink: Any, **options: Any) -> None:
        """Looks for trainers, and does not wait for them.

        Args:
            address: "tcp://host:port" where the trainers' store listens.
            sink: function or object that takes the weights.
            options: those of ``Receiver``.

        Raises:
            ValueError: another kind of address.
        """
        self._place = split_address(address)
        self._news: queue.Queue[dict[str, Any]] = queue.Queue()  # what the store says of groups, with this one's rank
        self._current = self._joined = ""  # names of the store's group, and of the one that this process has joined
        self._ended = threading.Event()
        # That of this thread, because another one may poll.
        self._device_index = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        super().__init__(address, sink, **options)
        threading.Thread(target=self._look_for_stores, name="fsdp2x-engine", daemon=True).start()

    def _look_for_stores(self) -> None:
        while not self._ended.is_set():
            # Whatever a store holds, the engine goes on.
            with contextlib.suppress(OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
                self._follow(join_store(*self._place))
            self._current = ""
            self._ended.wait(_RETRY_S)

    def _follow(self, store: dist.TCPStore) -> None:
        before = name = ""
        rank = 0
        while not self._ended.wait(LOOK_S) and (text := store.get(CURRENT).decode()) != NO_MORE:
            if text == before:
                continue
            before, news = text, json.loads(text)
            self._current = news.get("name", "")
            if self._current not in ("", name):
                name = self._current
                rank = store.add(f"{name}/engines", 1)
            if self._current:
                about = {"size": int(news["size"]), "timeout_s": float(news["timeout_s"]), "backend": news["backend"]}
                news = {"name": name, "rank": rank, **about}
            self._news.put(news)

    # ---- what differs from sockets

    def _listen(self) -> None:
        """Returns no socket, because a thread looks for trainers."""

    @property
    def sockets(self) -> list[socket.socket]:
        """None: poll it regularly."""
        return []

    @property
    def has_trainer(self) -> bool:
        return super().has_trainer and self._current == self._joined

    def _is_last(self, kind: str) -> bool:
        return kind in ("commit", "abort")  # members follow a push to its end

    def poll(self, timeout_s: float = 0.0) -> int | str | None:
        deadline = time.monotonic() + timeout_s
        while True:
            if self._line is not None and not self.has_trainer:
                self.release("the group has ended")
            try:
                news = self._news.get(timeout=min(max(deadline - time.monotonic(), 1e-6), LOOK_S))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    return None
                continue
            if news.get("torn", "") == self._joined != "":
                self.tear(str(news.get("reason")))
            # In place of a lost engine one may come too late for this group: the next one is without that engine.
            if self._current == news.get("name") and news["rank"] < news["size"]:
                if self._joined != self._current:
                    self._join(news)
                if self._line is not None and (version := self._answer()) is not None:
                    return version

    def _join(self, invitation: Mapping[str, Any]) -> None:
        self._joined = name = invitation["name"]
        deadline = time.monotonic() + invitation["timeout_s"]
        try:
            group = EngineGroup(invitation, self._place, self._device_index)
            group.join(invitation["rank"], deadline, lambda: self._current != name)
            self._line = group
        except (OSError, WireError) as error:
            with contextlib.suppress(WireError, RuntimeError):
                reason = f"engine {invitation['rank']} at {socket.gethostname()}: {error}"
                join_store(*self._place).set(f"{name}/refused", reason)

    def _map(self, sizes: list[int], files: list[int], most_bytes: int) -> list[ReceiveBuffer]:
        if len(sizes) != 1 or not 0 < sizes[0] <= most_bytes:
            raise WireError(f"a memory of {sizes} bytes, but the tensors of the layout take at most {most_bytes}")
        self._memory = torch.empty(*sizes, dtype=torch.uint8, device=self._line.device)
        return [ReceiveBuffer(self._memory)]

    def _on_bucket(self, body: dict[str, Any], files: list[int]) -> None:
        if not self._buffers or not 0 <= body["bytes"] <= len(self._memory):
            raise WireError(f"a bucket of {body['bytes']} bytes, for which no layout has made room")
        self._line.broadcast_bucket(self._memory[: body["bytes"]], time.monotonic() + self._timeout_s)
        super()._on_bucket(body, files)

    def close(self) -> None:
        """Leaves the trainers and frees their bytes."""
        self._ended.set()
        self.release("the engine was closed")
