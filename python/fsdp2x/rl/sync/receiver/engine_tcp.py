"""The engine's side of ``Peer("tcp://...")``: a ``TcpReceiver`` takes weights from trainers on any host.

This file needs torch, the standard library, and ``engine.py`` and ``engine_group.py`` in the same folder. The protocol
is that of ``engine.py``. Before the first bucket, the receiver joins a process group with the trainer that broadcasts
buckets:

    invite  {backend, port, size, name}  the store at the trainer's address where members connect
    join    {}                           all members join, at the same time

Before the first request, both sides prove that they know the same secret, in three messages of fixed size:

    receiver -> trainer    the wire's name, a nonce
    trainer -> receiver    its nonce, HMAC-SHA256(secret, "trainer" + receiver's nonce + its own)
    receiver -> trainer    HMAC-SHA256(secret, "engine" + trainer's nonce + its own)

So other processes can neither request nor send anything here. The process group needs no secret: any process that finds
its store, a port of the trainer, can join. Nothing is encrypted. Use it inside the network of a cluster.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import socket
import threading
import time
import urllib.parse
from typing import Any

import torch

if __package__:
    from .engine import WIRE, ReceiveBuffer, Receiver, WireError, is_closed
    from .engine_group import BroadcastGroup
else:
    from engine import WIRE, ReceiveBuffer, Receiver, WireError, is_closed
    from engine_group import BroadcastGroup

SCHEME = "tcp://"
_NONCE_BYTES = _PROOF_BYTES = 32
_NAME = WIRE.encode()
_LEAST_SECRET = 16
_GREETING_S = 10.0  # limit of a greeting
_MOST_VISITORS = 16  # greeted at a time; more wait


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of "tcp://host:port". An IPv6 host is in brackets.

    Raises:
        ValueError: it is not such an address.
    """
    parts = urllib.parse.urlsplit(address)
    if not address.startswith(SCHEME) or not parts.hostname or parts.port is None:
        raise ValueError(f'expected an address such as "tcp://10.0.0.7:7000", got {address!r}')
    return parts.hostname, parts.port


def check_secret(secret: str | None) -> str:
    """Returns the secret if it is long enough.

    Raises:
        ValueError: it is missing or shorter than 16 characters.
    """
    if not isinstance(secret, str) or len(secret) < _LEAST_SECRET:
        raise ValueError(
            f"over TCP trainers and engines need the same secret of at least {_LEAST_SECRET} characters. Make one with "
            "secrets.token_hex()."
        )
    return secret


def own_host(toward: str) -> str:
    """Returns the address of this host as the host ``toward`` reaches it."""
    family, kind, _, _, place = socket.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # a datagram socket, so nothing is sent
        host = probe.getsockname()[0]
    return f"[{host}]" if ":" in host else host


# ---- greetings


def greet_engine(connection: socket.socket, secret: str, timeout_s: float) -> None:
    """Runs the trainer's part.

    Raises:
        OSError: the other side has another secret, uses another protocol, or does not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    said = _receive_exactly(connection, len(_NAME) + _NONCE_BYTES, deadline)
    if not said.startswith(_NAME):
        raise OSError(f"it does not use {WIRE}")
    theirs, mine = said[len(_NAME) :], secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(mine + _proof(secret, b"trainer", theirs, mine))
    try:
        proof = _receive_exactly(connection, _PROOF_BYTES, deadline)
    except ConnectionError as error:
        raise OSError("it closed the connection, because its secret differs") from error
    if not hmac.compare_digest(proof, _proof(secret, b"engine", mine, theirs)):
        raise OSError("it does not know the secret")


def greet_trainer(connection: socket.socket, secret: str, timeout_s: float) -> bool:
    """Runs the receiver's part. Returns whether the other side knows the secret.

    Raises:
        OSError: it is gone, or does not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    connection.settimeout(timeout_s)
    mine = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_NAME + mine)
    said = _receive_exactly(connection, _NONCE_BYTES + _PROOF_BYTES, deadline)
    theirs, proof = said[:_NONCE_BYTES], said[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"trainer", mine, theirs)):
        return False
    connection.sendall(_proof(secret, b"engine", theirs, mine))
    return True


def _proof(secret: str, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret.encode(), role + first + second, "sha256")


def _receive_exactly(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Receives bytes with one deadline for all, so that a visitor who sends them one by one gets no more time."""
    received = b""
    while len(received) < num_bytes:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise ConnectionError("the other side closed the connection")
        received += part
    return received


def set_options(connection: socket.socket) -> None:
    """Sends small requests at once, and detects a host that is gone within two minutes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class TcpReceiver(Receiver):
    """A ``Receiver`` for trainers on any host: ``Peer("tcp://host:port", secret=...)``.

    A thread greets connecting processes, which costs the engine no time. A trainer reaches ``poll`` after it has proven
    that it knows the secret. In addition to the weights it needs memory for the largest bucket, on the group's device.
    """

    def __init__(
        self,
        address: str,
        sink: Any,
        *,
        secret: str,
        timeout_s: float = 300.0,
        held: dict[str, Any] | None = None,
    ) -> None:
        """Listens at ``address``.

        Args:
            address: "tcp://host:port" of an interface of this host. Port 0 takes a free one, shown in
                ``self.address``.
            sink: function or object that takes the weights.
            secret: secret of at least 16 characters that trainers must know.
            timeout_s: seconds that a trainer may be silent in the middle of a push.
            held: ``status`` of a receiver of the same sink, which this one replaces.

        Raises:
            ValueError: another kind of address, or a secret that is too short.
            OSError: the address is taken, or is not one of this host.
        """
        self._host, self._port = split_address(address)
        self._secret = check_secret(secret)
        self._group: BroadcastGroup | None = None
        self._num_bytes = 0  # of the largest bucket
        # That of this thread, because the thread that polls may use another one.
        self._device_index = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        super().__init__(address, sink, timeout_s=timeout_s)
        if held is not None:
            self._state, self._version, self._reason = held["state"], held["version"], held["reason"]

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._door = socket.create_server((self._host, self._port), family=family)
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.address = f"{SCHEME}{host}:{self._door.getsockname()[1]}"
        self._proven: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._visitors = threading.BoundedSemaphore(_MOST_VISITORS)
        announced, self._bell = socket.socketpair()
        threading.Thread(target=self._keep_door, name="fsdp2x-door", daemon=True).start()
        return announced

    def _keep_door(self) -> None:
        while True:
            try:
                connection, _ = self._door.accept()
            except OSError:  # closed
                return
            self._visitors.acquire()
            threading.Thread(target=self._greet, args=(connection,), name="fsdp2x-greeting", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            set_options(connection)
            if greet_trainer(connection, self._secret, _GREETING_S):
                self._proven.put(connection)
                self._bell.send(b"!")
                return
        except OSError:
            pass
        finally:
            self._visitors.release()
        connection.close()

    def _admit(self) -> socket.socket | None:
        self._listener.recv(1)
        return self._proven.get_nowait()

    def _map(self, sizes: list[int], files: list[int]) -> list[ReceiveBuffer]:
        (self._num_bytes,) = sizes
        return []  # the group's device is not known yet

    def _on_invite(self, body: dict[str, Any], files: list[int]) -> None:
        host, trainer = self._trainer.getsockname()[0], self._trainer.getpeername()[0]
        self._group = BroadcastGroup.invited(body, trainer, host, self._timeout_s, self._device_index)

    def _on_join(self, body: dict[str, Any], files: list[int]) -> None:
        if self._group is None:
            raise WireError("a join before an invitation")
        deadline, connection = time.monotonic() + self._timeout_s, self._trainer
        self._group.join(False, deadline, lambda: is_closed(connection))
        self._group.meet(deadline, lambda: is_closed(connection))
        self._memory = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._group.device)
        self._buffers = [ReceiveBuffer(self._memory)]

    def release(self, reason: str) -> None:
        """Releases the trainer, its memory, and its group. A running push is torn."""
        super().release(reason)
        if self._group is not None:
            self._group.close()
            self._group = None

    def _on_bucket(self, body: dict[str, Any], files: list[int]) -> None:
        if self._group is None or not self._buffers:
            raise WireError("a bucket before the group was joined")
        num_bytes, deadline, connection = body["bytes"], time.monotonic() + self._timeout_s, self._trainer
        if not 0 <= num_bytes <= self._num_bytes:
            raise WireError(f"a bucket of {num_bytes} bytes, but the layout made room for {self._num_bytes}")
        self._group.broadcast(self._memory[:num_bytes], deadline, lambda: is_closed(connection))
        super()._on_bucket(body, files)

    def close(self) -> None:
        """Closes the port and the trainers' connections, and frees their bytes."""
        self.release("the engine was closed")
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # ends the wait of its thread
        for opened in (self._door, self._listener, self._bell):
            opened.close()
        while not self._proven.empty():
            self._proven.get_nowait().close()
