"""The engine's side of pushes, spoken to by hand over each carrier: what it takes, refuses, and survives."""

import contextlib
import importlib
import json
import os
import random
import shutil
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import device_handles
from engines import Layerwise, Served, Store, new_address, push_by_hand, target_of
from fsdp2x.base import torch_private
from fsdp2x.io.names import TensorSpec
from fsdp2x.rl.sync.receiver import engine
from fsdp2x.rl.sync.receiver.engine import (
    WIRE,
    Parameters,
    ReceiveBuffer,
    Receiver,
    WireError,
    bind_address,
    describe_handle,
    device_of,
    opened_memory,
    receive_frame,
    send_frame,
)
from fsdp2x.rl.sync.receiver.engine_group import _without_watchdog, own_host, split_address
from fsdp2x.rl.sync.targets.base import TargetError, WireLayout
from fsdp2x.rl.sync.targets.transports import HandedMemory
from fsdp2x.sync import GroupPeer, Peer, Vllm

CARRIERS = ("memory", "group")
SPECS = tuple(TensorSpec(f"w{index}", torch.Size([size]), torch.float32) for index, size in enumerate((2, 3)))
VALUES = {"w0": torch.tensor([1.0, 2.0]), "w1": torch.tensor([3.0, 4.0, 5.0])}
BUCKET = {"bucket": 0, "bytes": 64, "tensors": [[0, 0, 0], [1, 0, 8]], "deltas": []}


class Client:
    """A trainer that has been introduced, and then says what a test wants."""

    def __init__(self, over, address):
        self.over, self.target, self.layout = over, target_of(over, [address]), WireLayout((SPECS,), (), 128)
        self.target.open(self.layout, 20.0)

    def ask(self, kind, /, *descriptors, **body):
        deadline = time.monotonic() + 20
        if self.over == "group":
            self.target._announce_push()
            self.target._tell("load", kind, body)
            return self.target._group.hear(1, deadline)
        (connection,) = self.target._connections.values()
        send_frame(connection, kind, body, deadline, descriptors)
        return receive_frame(connection, deadline)[1]

    def push(self, version, *values):
        self.target._memory.bytes[:20].view(torch.float32).copy_(torch.tensor(values))
        begun = self.ask("begin", mode="full", version=version, base=None)
        answers = [begun, self.ask("bucket", **BUCKET), self.ask("finish"), self.ask("commit", version=version)]
        return [answer["ok"] for answer in answers]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.target.close()


@contextlib.contextmanager
def served(over, sink):
    """(an engine that polls, a client of it)."""
    with Served(new_address(over), sink) as engine, Client(over, engine.receiver.address) as client:
        yield engine, client


@pytest.mark.parametrize("over", CARRIERS)
def test_nobody_generates_during_a_push(over):
    with served(over, Store()) as (engine, client):
        assert client.ask("begin", mode="full", version=1, base=None)["state"] == "open"
        seen, reader = [], threading.Event()

        def generate():
            reader.set()
            with engine.receiver.reading() as version:
                seen.append(version)

        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        assert reader.wait(20) and not seen
        assert client.ask("bucket", **BUCKET)["ok"]
        assert client.ask("finish")["ok"] and not seen
        assert client.ask("commit", version=1)["ok"]
        thread.join(20)
        assert seen == [1]


# Requests in the middle of a push, and the errors in their answers.
WRONG = [
    ("bucket", {"tensors": [[0, 0, 4092]], "deltas": []}, "shared bytes, got 8 bytes at 4092"),
    ("bucket", {"tensors": [[0, 0, -8]], "deltas": []}, "8 bytes at -8"),
    ("bucket", {"tensors": [[0, 0, 2]], "deltas": []}, "got 8 bytes at 2"),
    ("bucket", {"tensors": [[9, 0, 0]], "deltas": []}, "IndexError"),
    ("bucket", {}, "KeyError: 'tensors'"),
    ("bucket", {"tensors": [], "deltas": [[0, 0, 0, 4096]]}, "32768 bytes at 0"),
    ("begin", {"mode": "full", "version": 6, "base": None}, "weights that are open cannot become open"),
    ("layout", {"tensors": [], "files": [], "adapter": {"name": "a"}}, "a layout in the middle of a push"),
    ("commit", {"version": 5}, "a commit of 5 while the weights are open"),
    ("conquer", {}, "an unknown request 'conquer'"),
]


@pytest.mark.parametrize("over", CARRIERS)
@pytest.mark.parametrize(("kind", "body", "error"), WRONG)
def test_wrong_requests_are_answered(kind, body, error, over):
    with served(over, Store()) as (engine, client):
        assert "a bucket while the weights are initial" in client.ask("bucket", **BUCKET)["error"]
        assert client.ask("begin", mode="full", version=5, base=None)["ok"]
        answer = client.ask(kind, **({"bucket": 0, "bytes": 64, **body} if kind == "bucket" else body))
        assert not answer["ok"] and error in answer["error"], answer
        if kind == "bucket":
            assert "while the weights are open" in client.ask("commit", version=5)["error"]
        assert engine.receiver.status["state"] == "torn"
        client.ask("abort", reason="the test")
        assert client.push(6, 1, 2, 3, 4, 5) == [True] * 4


# (carriers, tensors, files, error)
LAYOUTS = [
    (CARRIERS, [["w9", "float32", [2]]], [4096], "'w9' of shape [2], but this engine has no tensor"),
    (CARRIERS, [["w0", "float32", [3]]], [4096], "this engine has one of shape [2]"),
    (CARRIERS, [["w0", "nonsense", [2]]], [4096], "has no dtype 'nonsense'"),
    (("memory",), [["w0", "float32", [2]]], [8192], "the layout says 8192 bytes, got a memory file of 4096"),
    (("memory",), [["w0", "float32", [2]]], [4096, 4096], "1 memory files, the layout names 2"),
    *(
        (("group",), [["w0", "float32", [2]]], sizes, "take at most 520")
        for sizes in ([-1], [5000], [10**15], [], [1, 1])
    ),
]


@pytest.mark.parametrize("over", CARRIERS)
def test_layouts_that_cannot_be(over):
    held = {"w0": torch.zeros(2), "w1": torch.zeros(3)}
    with served(over, Parameters(held)) as (engine, client):
        memory, files = client.target._memory.describe()
        for carriers, tensors, sizes, error in LAYOUTS:
            if over in carriers:
                answer = client.ask("layout", *files, tensors=tensors, files=sizes)
                assert not answer["ok"] and error in answer["error"], answer
        assert client.ask("layout", *files, tensors=[], **memory)["ok"]
        assert "a push before a layout" in client.ask("begin", mode="full", version=1, base=None)["error"]
        assert client.ask("layout", *files, **client.target._described(client.layout, memory))["ok"]
        assert client.push(1, 1, 2, 3, 4, 5) == [True] * 4
        assert held["w1"].tolist() == [3, 4, 5]
        if over == "memory":
            with pytest.raises(TargetError, match="another trainer is connected"):
                Client(over, engine.receiver.address)
        assert client.push(2, 5, 4, 3, 2, 1) == [True] * 4


# ---- junk


KINDS = b"hello layout begin bucket finish commit abort status".split()
FIELDS = "wire session tensors files mode version base bucket bytes deltas reason device adapter".split()
DEEP = b"[" * 200_000
NEST = b"[" * 900 + b"]" * 900
NESTED = b'{"version":' + NEST + b',"mode":"full","base":null,"reason":' + NEST + b"}"

leaves = st.one_of(
    st.none(), st.booleans(), st.floats(), st.text(max_size=5), st.sampled_from(["float32", "full", WIRE, "w0"]),
    st.sampled_from([-1, 0, 1, 2, 64, 2**31, 2**63, -(2**63), 2**64, 10**400]),
)  # fmt: skip
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6).map(lambda body: json.dumps(body).encode())
odd = st.sampled_from([DEEP, b'{"a":' + DEEP, NESTED, b'"\\ud800"', b'{"reason":"\\ud800"}'])
# (magic, kind, what the head says of descriptors, and of bytes beyond those that come, the body)
junk = st.tuples(
    st.sampled_from([WIRE.encode()] * 7 + [b"fsdp2x-0"]),
    st.sampled_from(KINDS * 2 + [b"\xff\xfe", b"__init__", b"answer"]),
    st.sampled_from([0] * 9 + [1, 2**32 - 1]),
    st.sampled_from([0] * 9 + [1, 2**40, 2**64 - 1]),
    st.one_of(bodies, st.binary(max_size=40), odd),
)


def frame(magic, kind, num_files, more, text):
    return struct.pack("<8s8sIQ", magic, kind, num_files, min(len(text) + more, 2**64 - 1)) + text


def test_junk_on_a_socket_ends_no_engine():
    """The sender is let go, and the next push arrives."""
    held = {"w0": torch.zeros(2), "w1": torch.zeros(3)}
    with Served(new_address(), Parameters(held)) as engine:

        def visit(begun, data):
            with (
                socket.socket(socket.AF_UNIX) as connection,
                contextlib.suppress(ConnectionError),
            ):
                connection.settimeout(20)
                connection.connect(bind_address(engine.receiver.address))
                if begun:
                    said = {"tensors": [["w0", "float32", [2]]], "files": []}
                    for kind, body in (("layout", said), ("begin", {"mode": "full", "version": 2, "base": None})):
                        send_frame(connection, kind, body, time.monotonic() + 20)
                        receive_frame(connection, time.monotonic() + 20)
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
            assert engine._thread.is_alive(), "the engine is gone"

        @settings(
            max_examples=60,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        @given(st.booleans(), st.lists(junk, min_size=1, max_size=4), st.one_of(st.none(), st.integers(1, 40)))
        @example(False, [(WIRE.encode(), b"hello", 0, 0, b'{"a":' + DEEP)], None)
        @example(True, [(WIRE.encode(), b"abort", 0, 0, NESTED)], None)
        def check(begun, frames, num_bytes):
            visit(begun, b"".join(frame(*one) for one in frames)[:num_bytes])

        check()
        push_by_hand(Peer(engine.receiver.address), VALUES)
        assert torch.equal(held["w1"], VALUES["w1"])


@pytest.mark.full
def test_junk_in_a_group_ends_no_engine():
    """At the store's port, in its keys, and as requests. The next push arrives."""
    with Served(new_address("group"), Store()) as engine, contextlib.ExitStack() as stack:
        target = GroupPeer(engine.receiver.address, 1)
        for text in ('"', "[]", "7", '{"name": 3}', '{"name": "a", "size": 2}', NEST.decode(), "\\ud800"):
            target.listen()
            target._store.set("fsdp2x", text)
            time.sleep(0.1)
        for data in (random.Random(0).randbytes(4096), b"", b"GET / HTTP/1.1\r\n\r\n"):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", target._store.port), 20))
            stranger.sendall(data)
        target.close()
        for text in (
            b"\xff",
            b"[1]",
            b"{}",
            DEEP,
            NESTED,
            b'{"kind": 7}',
            b'{"kind": "__init__"}',
        ):
            client = Client("group", engine.receiver.address)
            deadline = time.monotonic() + 20
            for part in (torch.tensor([len(text)]), torch.frombuffer(bytearray(text), dtype=torch.uint8)):
                client.target._group.broadcast(part, deadline)
            with contextlib.suppress(WireError):
                assert not client.target._group.hear(1, deadline)["ok"]
            client.target.close()
        push_by_hand(target, VALUES)
        with engine.receiver.reading() as version:
            assert version == 1 and torch.equal(engine.receiver._sink.weights["w1"], VALUES["w1"])


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n" + bytes(40), None])
def test_trainers_find_something_else(said):
    """It closes at once, has another protocol, or is silent."""
    address = new_address()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(bind_address(address))
        listener.listen()
        ended = threading.Event()

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(said or b"")
                if said is None:
                    ended.wait(60)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(TargetError, match=f"the engine at '{address}'"):
            Peer(address).open(WireLayout((SPECS,), (), 0), 0.5)
        ended.set()
        thread.join(60)


def test_nothing_stays_behind():
    """A receiver that is closed leaves no thread, while a trainer's store is there and while there is none."""
    before = {thread.name for thread in threading.enumerate()}
    for _ in range(2):
        with served("group", Store()) as (engine, client):
            assert client.push(1, 1, 2, 3, 4, 5) == [True] * 4
            engine.receiver.close()
    deadline = time.monotonic() + 20
    while {thread.name for thread in threading.enumerate()} != before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_addresses():
    assert split_address("tcp://engine-3:7000") == ("engine-3", 7000)
    assert split_address("tcp://[fe80::1]:7000") == ("fe80::1", 7000)
    assert own_host(["127.0.0.1"]) == "127.0.0.1"
    for address in ("tcp://", "tcp://host", "tcp://:7000", "tcp://host:port", "http://host:1", "@engine"):
        with pytest.raises(ValueError, match="fsdp2x.sync.GroupPeer: "):
            GroupPeer(address, 1)
    with pytest.raises(ValueError, match="num_engines must be positive, got 0"):
        GroupPeer("tcp://host:7000", 0)
    with pytest.raises(ValueError, match="backend must be 'gloo' or 'nccl', got 'mpi'"):
        GroupPeer("tcp://host:7000", 1, backend="mpi")
    with pytest.raises(TargetError, match="no store of torch.distributed at 192.0.2.1:7000"):
        GroupPeer("tcp://192.0.2.1:7000", 1).open(WireLayout((SPECS,), (), 0), 1.0)


def test_an_engine_that_comes_later():
    target = GroupPeer("tcp://127.0.0.1:0", 1)
    pushing = threading.Thread(target=push_by_hand, args=(target, VALUES), daemon=True)
    address = target.listen()
    pushing.start()
    time.sleep(0.3)
    with Served(address, Store()) as engine:
        pushing.join(20)
        assert engine.receiver.status["version"] == 1


def test_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6: {error}")
    target = GroupPeer("tcp://[::1]:0", 1)
    assert (address := target.listen()).startswith("tcp://[::1]:")
    with Served(address, Store()) as engine:
        push_by_hand(target, VALUES)
        assert engine.receiver.status["version"] == 1


# ---- weights


def test_writes_of_a_loader_stay_with_the_engine():
    """A loader that works in place on what it is given does not see its own writes instead of the next bucket."""
    seen = []

    class InPlace:
        keeps_tensors = False

        def load(self, items):
            seen.append([tensor.tolist() for _, tensor in items])
            for _, tensor in items:
                tensor.mul_(2)

    with served("memory", InPlace()) as (_, client):
        for version, values in enumerate(([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])):
            assert client.push(version, *values) == [True] * 4
            assert seen[-1] == [values[:2], values[2:]]
        assert client.target._memory.bytes[:4].view(torch.float32).item() == 6


def test_a_socket_with_a_path_is_removed(tmp_path):
    path = str(tmp_path / "engine.sock")
    receiver = Receiver(path, Layerwise())
    with pytest.raises(OSError):
        Receiver(path, Layerwise())
    assert os.path.exists(path)
    receiver.close()
    assert not os.path.exists(path)


def test_the_worker_of_vllm_needs_nothing_of_ours(tmp_path, monkeypatch):
    folder = Path(engine.__file__).parent
    files = ("engine.py", "engine_group.py", "vllm_worker.py")
    for name in files:
        shutil.copy(folder / name, tmp_path)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    worker_file = importlib.import_module("vllm_worker")
    assert worker_file.Receiver is importlib.import_module("engine").Receiver is not Receiver
    for name in files:
        assert "import fsdp2x" not in (text := (tmp_path / name).read_text()) and "from fsdp2x" not in text
    worker = worker_file.Fsdp2xWorker()
    worker.device = "cpu"  # as vLLM's own worker has one
    first, again = worker.fsdp2x_listen(), worker.fsdp2x_listen()
    assert first == again and first["ok"] and first["state"] == "initial"
    assert worker.fsdp2x_receive(True, 0.0)["error"].startswith("WireError: no trainer has begun")
    far = worker.fsdp2x_listen("tcp://127.0.0.1:9")
    assert far["ok"] and far["address"] == "tcp://127.0.0.1:9" and far["state"] == "initial"
    assert worker.fsdp2x_release()["ok"] and worker.fsdp2x_listen() == first
    worker.fsdp2x_receiver.close()
    for name in files:
        sys.modules.pop(name.removesuffix(".py"))


# ---- handles of a GPU's memory on the wire: what arrives, where it is read, and what is refused


def test_what_is_written_is_read():
    """Through JSON, and only inside of what was handed out."""
    with device_handles.installed():
        memory = HandedMemory(torch.device("cpu"), 1000)
        read = ReceiveBuffer(opened_memory(json.loads(json.dumps(describe_handle(memory.device_handle())))))
    memory.bytes[8:16].view(torch.float32).copy_(torch.tensor([1.5, -2.0]))
    assert read.view(8, torch.float32, [2]).tolist() == [1.5, -2.0]
    for offset, shape in ((996, [2]), (-4, [1]), (2, [1])):
        with pytest.raises(ValueError, match="inside of 1000 shared bytes"):
            read.view(offset, torch.float32, shape)


def test_a_gpu_that_is_not_seen():
    with pytest.raises(ValueError, match="share memory of GPU of-nobody, but this engine sees"):
        device_of("of-nobody")


def test_memory_of_the_host_is_no_gpus():
    with pytest.raises(ValueError, match="this rank gathers weights on the CPU"):
        HandedMemory(torch.device("cpu"), 8)


SETTINGS = "max_split_size_mb:64,expandable_segments:{},roundup_power2_divisions:[256:1,512:2]"


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no allocator for CUDA")
@pytest.mark.parametrize("on", ["True", "False"])
@pytest.mark.parametrize("tells", [True, False])
def test_memory_for_others_is_in_no_expandable_segment(monkeypatch, on, tells):
    """Other processes may be unable to map such a segment. Afterwards the user's settings are restored."""
    allocator = {"now": SETTINGS.format(on)}
    private = torch_private.torch._C
    monkeypatch.setattr(private, "_accelerator_setAllocatorSettings", lambda text: allocator.update(now=text))
    if tells:
        monkeypatch.setattr(private, "_accelerator_getAllocatorSettings", lambda: allocator["now"], raising=False)
    else:
        monkeypatch.delattr(private, "_accelerator_getAllocatorSettings", raising=False)
        told = {"PYTORCH_CUDA_ALLOC_CONF": allocator["now"]}
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": told})
    during = []
    monkeypatch.setattr(torch, "empty", lambda *_, **__: during.append(allocator["now"]))
    HandedMemory(torch.device("cuda", 0), 8)
    assert len(during) == 1 and "expandable_segments:True" not in during[0]
    assert "max_split_size_mb:64" in during[0] and "[256:1,512:2]" in during[0]
    assert allocator["now"] == SETTINGS.format(on)


def test_what_targets_refuse():
    for make in (lambda: Peer("@x", memory="gpu"), lambda: Vllm("http://x", memory="gpu")):
        with pytest.raises(ValueError, match="memory must be 'host' or 'device', got 'gpu'"):
            make()
    with pytest.raises(ValueError, match="got no address"):
        Peer([])


def test_groups_of_two_threads_restore_the_environment(monkeypatch):
    """They are made one after the other. If not, the second one would restore the value of the first."""
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    has_begun, may_end = threading.Event(), threading.Event()

    def second() -> None:
        with _without_watchdog():
            has_begun.set()
            may_end.wait(10)

    thread = threading.Thread(target=second)
    with _without_watchdog():
        thread.start()
        assert not has_begun.wait(0.2)
    assert has_begun.wait(10)
    may_end.set()
    thread.join(10)
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
