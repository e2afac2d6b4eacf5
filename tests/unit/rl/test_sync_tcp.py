"""The door of a `TcpReceiver`: trainers that know the secret come in, strangers cost the engine nothing."""

import contextlib
import random
import socket
import threading
import time

import pytest
import torch

from engines import SECRET, Served, Store, push_by_hand
from fsdp2x.rl.sync.receiver import engine_tcp
from fsdp2x.rl.sync.receiver.engine import WIRE, is_closed, receive_frame, send_frame
from fsdp2x.rl.sync.receiver.engine_tcp import TcpReceiver, greet_engine, own_host, split_address
from fsdp2x.rl.sync.targets.base import TargetError, WireLayout
from fsdp2x.sync import Peer

ANY_PORT = "tcp://127.0.0.1:0"
GREETING_BYTES = 64


def dial(receiver, timeout_s=60):
    return socket.create_connection(split_address(receiver.address), timeout_s)


def ask(connection, kind, body):
    deadline = time.monotonic() + 60
    send_frame(connection, kind, body, deadline)
    return receive_frame(connection, deadline)[1]


@contextlib.contextmanager
def trainer(receiver):
    """A connection that has been greeted and has told a layout."""
    with dial(receiver) as connection:
        greet_engine(connection, SECRET, 60)
        assert ask(connection, "hello", {"wire": WIRE, "session": "s"})["ok"]
        assert ask(connection, "layout", {"tensors": [["a", "float32", [3]]], "files": [256]})["ok"]
        yield connection


VALUES = {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([[4.0, 5.0]], dtype=torch.bfloat16)}


def push(served):
    """A push that arrives."""
    push_by_hand(Peer(served.receiver.address, secret=SECRET), VALUES)
    with served.receiver.reading() as held:
        assert held == 1
        assert all(torch.equal(served.receiver._sink.weights[name], value) for name, value in VALUES.items())


def garbage(connection):
    connection.sendall(random.Random(0).randbytes(4096))


def half_a_greeting(connection):
    connection.recv(40)
    connection.sendall(bytes(GREETING_BYTES // 2))


def a_replayed_greeting(connection):
    """Sends the greeting of another connection, which had a different nonce."""
    connection.recv(40)
    connection.sendall(bytes(GREETING_BYTES))


def another_secret(connection):
    with pytest.raises(OSError, match="its secret differs"):
        greet_engine(connection, "the secret of somebody else", 60)


def nothing(connection):
    pass


STRANGERS = (garbage, half_a_greeting, a_replayed_greeting, another_secret, nothing)


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda one: one.__name__)
def test_strangers_leave_a_push_alone(stranger):
    """They stay at the door, some for seconds, while the weights are pushed; none of them is answered."""
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(Served(ANY_PORT, Store()))
        for _ in range(4):
            with contextlib.suppress(ConnectionError):
                stranger(stack.enter_context(dial(served.receiver)))
        push(served)


def test_strangers_who_send_a_byte_now_and_then_keep_nobody_out(monkeypatch):
    """All visitors that are greeted at a time, and one more; a greeting has one deadline, not one for each byte."""
    monkeypatch.setattr(engine_tcp, "_GREETING_S", 0.4)
    with Served(ANY_PORT, Store()) as served, contextlib.ExitStack() as opened:
        strangers = [opened.enter_context(dial(served.receiver)) for _ in range(engine_tcp._MOST_VISITORS + 1)]
        stop = threading.Event()

        def drip():
            while not stop.wait(0.1):
                for stranger in strangers:
                    with contextlib.suppress(OSError):
                        stranger.send(b"x")

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        try:
            with dial(served.receiver, 5) as connection:
                greet_engine(connection, SECRET, 5)
        finally:
            stop.set()
            thread.join(10)


@pytest.mark.parametrize(
    ("num_bytes", "reason"), [(12, "before the group was joined"), (1256, "the trainer is gone in the middle")]
)
def test_buckets_that_cannot_be(num_bytes, reason):
    """One that comes before the engine is in a group, and a trainer that leaves. The next one heals both."""
    body = {"bucket": 0, "bytes": num_bytes, "tensors": [[0, 0, 0]], "deltas": []}
    with Served(ANY_PORT, Store()) as served:
        with trainer(served.receiver) as connection:
            assert ask(connection, "begin", {"mode": "full", "version": 1, "base": None})["ok"]
            if num_bytes == 12:
                assert "before the group was joined" in ask(connection, "bucket", body)["error"]
        while served.receiver.status["state"] != "torn":
            time.sleep(0.01)
        assert reason in served.receiver.status["reason"]
        push(served)


def test_a_door_that_nobody_answers_behind():
    """Something else listens there: silent, closing at once, or of another protocol."""
    layout = WireLayout((), ((3, 64),), 0)
    for said in (b"", b"HTTP/1.1 400 Bad Request\r\n" + bytes(40), None):
        ended = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve(listener=listener, said=said, ended=ended):
                connection, _ = listener.accept()
                with connection:
                    if said is None:
                        ended.wait(60)
                    connection.sendall(said or b"")

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            target = Peer(f"tcp://127.0.0.1:{listener.getsockname()[1]}", secret=SECRET)
            with pytest.raises(TargetError, match="no receiver answers at .tcp://127.0.0.1:"):
                target.open(layout, 0.5)
            ended.set()
            thread.join(60)


def test_an_impostor_gets_no_weights():
    """It greets as a receiver does, and does not know the secret: the trainer leaves."""
    left = []

    def serve():
        connection, _ = listener.accept()
        with connection:
            connection.sendall(WIRE.encode() + bytes(32))
            connection.recv(GREETING_BYTES)
            connection.sendall(bytes(32))
            connection.settimeout(60)
            left.append(connection.recv(1))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        target = Peer(f"tcp://127.0.0.1:{listener.getsockname()[1]}", secret=SECRET)
        with pytest.raises(TargetError, match="it does not know the secret"):
            target.open(WireLayout((), ((3, 64),), 0), 60.0)
        thread.join(60)
    assert left == [b""]


def test_nothing_stays_behind():
    before = {thread.name for thread in threading.enumerate()}
    receiver = TcpReceiver(ANY_PORT, Store(), secret=SECRET)
    with dial(receiver) as waiting:
        greet_engine(waiting, SECRET, 60)  # the receiver does not poll, so the connection waits in its queue
        receiver.close()
        deadline = time.monotonic() + 60
        while {thread.name for thread in threading.enumerate()} != before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        while not is_closed(waiting):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(OSError):
            dial(receiver, 1)
    with TcpReceiverAt(receiver.address):
        pass


@contextlib.contextmanager
def TcpReceiverAt(address):
    """The port is free again at once."""
    receiver = TcpReceiver(address, Store(), secret=SECRET)
    assert receiver.address == address
    yield receiver
    receiver.close()


def test_ipv6():
    try:
        receiver = TcpReceiver("tcp://[::1]:0", Store(), secret=SECRET)
    except OSError as error:
        pytest.skip(f"no IPv6: {error}")
    assert receiver.address.startswith("tcp://[::1]:")
    with dial(receiver) as connection:
        greet_engine(connection, SECRET, 60)
    receiver.close()


def test_addresses_and_secrets():
    assert split_address("tcp://engine-3:7000") == ("engine-3", 7000)
    assert split_address("tcp://[fe80::1]:7000") == ("fe80::1", 7000)
    assert own_host("127.0.0.1") == "127.0.0.1"
    for address in ("tcp://", "tcp://host", "tcp://:7000", "tcp://host:port", "http://host:1"):
        with pytest.raises(ValueError):
            split_address(address)
    for address, options, match in (
        ("tcp://host:7000", {}, "the same secret of at least 16 characters"),
        ("tcp://host:7000", {"secret": "short"}, "the same secret of at least 16 characters"),
        ("tcp://host:7000", {"secret": SECRET, "group": "mpi"}, "group must be 'gloo', 'nccl' or None, got 'mpi'"),
        ("tcp://host:7000", {"secret": SECRET, "memory": "device"}, 'memory="device" is for engines on this host'),
        (["tcp://host:7000", "@engine"], {"secret": SECRET}, "Use one kind for all receivers"),
        ("@engine", {"secret": SECRET}, "a secret is only for addresses such as tcp://host:port"),
        ("@engine", {"group": "gloo"}, "a group is only for addresses such as tcp://host:port"),
    ):
        with pytest.raises(ValueError, match=match):
            Peer(address, **options)
    with pytest.raises(ValueError, match="the same secret"):
        TcpReceiver(ANY_PORT, Store(), secret="short")
