"""The engine's side of pushes, spoken to by hand: what it takes, what it refuses, what it survives."""

import ast
import importlib
import json
import os
import shutil
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import device_handles
from engines import Layerwise, Served, Store, new_address
from fsdp2x.base import torch_private
from fsdp2x.lifecycle.sleep import _give_to_driver as give_to_driver
from fsdp2x.rl.sync.receiver import engine
from fsdp2x.rl.sync.receiver.engine import (
    Parameters,
    ReceiveBuffer,
    Receiver,
    TornWeights,
    WireError,
    describe_handle,
    device_of,
    opened_memory,
    receive_frame,
    send_frame,
)
from fsdp2x.rl.sync.targets.transports import HandedMemory, IpcTransport
from fsdp2x.sync import Peer, Sglang, Vllm


class Client:
    """A trainer that says what a test wants."""

    def __init__(self, address, sizes=(2, 3)):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(engine.bind_address(address))
        self.file = os.memfd_create("fsdp2x-test")
        os.ftruncate(self.file, 4096)
        self.tensors = [[f"w{index}", "float32", [size]] for index, size in enumerate(sizes)]

    def ask(self, kind, /, *descriptors, **body):
        deadline = time.monotonic() + 20
        send_frame(self.socket, kind, body, deadline, descriptors)
        return receive_frame(self.socket, deadline)[1]

    def introduce(self, **changes):
        assert self.ask("hello", wire=engine.WIRE, session="1")["ok"]
        return self.ask("layout", self.file, **{"tensors": self.tensors, "files": [4096], **changes})

    def write(self, *values):
        os.pwrite(self.file, torch.tensor(values, dtype=torch.float32).numpy().tobytes(), 0)

    def push(self, version, *values):
        self.write(*values)
        answers = [
            self.ask("begin", mode="full", version=version, base=None),
            self.ask("bucket", bucket=0, tensors=[[0, 0, 0], [1, 0, 8]], deltas=[]),
            self.ask("finish"),
            self.ask("commit", version=version),
        ]
        return [answer["ok"] for answer in answers]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        os.close(self.file)


def test_needs_nothing_but_torch():
    tree = ast.parse(open(engine.__file__).read())
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add(node.module.partition(".")[0])
    assert roots <= {"torch"} | set(sys.stdlib_module_names) and "pickle" not in roots


def test_nobody_generates_during_a_push():
    address = new_address()
    with Served(address, Store()) as served, Client(address) as client:
        client.introduce()
        assert client.ask("begin", mode="full", version=1, base=None)["state"] == "open"
        seen, reader = [], threading.Event()

        def generate():
            reader.set()
            with served.receiver.reading() as version:
                seen.append(version)

        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        assert reader.wait(20) and not seen
        assert client.ask("bucket", bucket=0, tensors=[[0, 0, 0], [1, 0, 8]], deltas=[])["ok"]
        assert client.ask("finish")["ok"] and not seen
        assert client.ask("commit", version=1)["ok"]
        thread.join(20)
        assert seen == [1]


def test_a_trainer_that_says_nothing():
    address = new_address()
    with Served(address, Store(), timeout_s=0.5) as served:
        with Client(address) as client:
            client.introduce()
            assert client.push(1, 1, 2, 3, 4, 5) == [True] * 4
            assert client.ask("begin", mode="full", version=2, base=None)["ok"]
            assert client.ask("bucket", bucket=0, tensors=[[0, 0, 0]], deltas=[])["ok"]
            assert not client.socket.recv(1), "the engine ends the connection"
        deadline = time.monotonic() + 20
        while served.receiver.status["state"] != "torn" and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(TornWeights, match="the trainer is gone in the middle of a push"):
            with served.receiver.reading():
                pass
        with Client(address) as client:
            client.introduce()
            assert "holds 1 and is torn" in client.ask("begin", mode="delta", version=3, base=1)["error"]
            assert client.push(3, 1, 2, 3, 4, 5) == [True] * 4


WRONG = [
    (
        "bucket",
        {"bucket": 0, "tensors": [[0, 0, 4092]], "deltas": []},
        "inside of 4096 shared bytes, got 8 bytes at 4092",
    ),
    ("bucket", {"bucket": 0, "tensors": [[0, 0, -8]], "deltas": []}, "8 bytes at -8"),
    ("bucket", {"bucket": 0, "tensors": [[0, 0, 2]], "deltas": []}, "got 8 bytes at 2"),
    ("bucket", {"bucket": 0, "tensors": [[9, 0, 0]], "deltas": []}, "IndexError"),
    ("bucket", {"bucket": 0}, "KeyError: 'tensors'"),
    ("bucket", {"bucket": 0, "tensors": [], "deltas": [[0, 0, 0, 4096]]}, "32768 bytes at 0"),
    ("commit", {"version": 5}, "a commit of 5 while the weights are open"),
    ("conquer", {}, "an unknown request 'conquer'"),
]


@pytest.mark.parametrize(("kind", "body", "error"), WRONG)
def test_wrong_requests_are_answered(kind, body, error):
    address = new_address()
    with Served(address, Store()) as served, Client(address) as client:
        client.introduce()
        assert (
            "a bucket while the weights are initial" in client.ask("bucket", bucket=0, tensors=[], deltas=[])["error"]
        )
        assert client.ask("begin", mode="full", version=5, base=None)["ok"]
        answer = client.ask(kind, **body)
        assert not answer["ok"] and error in answer["error"]
        if kind == "bucket":
            assert "while the weights are open" in client.ask("commit", version=5)["error"]
        assert served.receiver.status["state"] == "torn"
        assert client.push(6, 1, 2, 3, 4, 5) == [True] * 4


def test_layouts_that_cannot_be():
    held = {"w0": torch.zeros(2), "w1": torch.zeros(3)}
    address = new_address()
    with Served(address, Parameters(held)), Client(address) as client:
        assert (
            "'w9' of shape [2], but this engine has no tensor"
            in client.introduce(tensors=[["w9", "float32", [2]]])["error"]
        )
        assert "this engine has one of shape [2]" in client.introduce(tensors=[["w0", "float32", [3]]])["error"]
        assert "has no dtype 'nonsense'" in client.introduce(tensors=[["w0", "nonsense", [2]]])["error"]
        assert "the layout says 8192 bytes, got a memory file of 4096" in client.introduce(files=[8192])["error"]
        assert "1 memory files, the layout names 2" in client.introduce(files=[4096, 4096])["error"]
        assert "a push before a layout" in client.ask("begin", mode="full", version=1, base=None)["error"]
        assert client.introduce()["ok"] and client.push(1, 1, 2, 3, 4, 5) == [True] * 4
        assert held["w1"].tolist() == [3, 4, 5]
        with Client(address) as second:
            with pytest.raises((WireError, AssertionError)):
                second.introduce()
        assert client.push(2, 5, 4, 3, 2, 1) == [True] * 4


def test_writes_of_a_loader_stay_with_the_engine():
    """A loader that works in place on what it is given does not see its own writes instead of the next bucket."""
    seen = []

    class InPlace:
        keeps_tensors = False

        def load(self, items):
            seen.append([tensor.tolist() for _, tensor in items])
            for _, tensor in items:
                tensor.mul_(2)

    address = new_address()
    with Served(address, InPlace()), Client(address) as client:
        client.introduce()
        for version, values in enumerate(([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])):
            assert client.push(version, *values) == [True] * 4
            assert seen[-1] == [values[:2], values[2:]]
        assert os.pread(client.file, 4, 0) == torch.tensor(6.0).numpy().tobytes()


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
    files = ("engine.py", "engine_tcp.py", "engine_group.py", "vllm_worker.py")
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
    far = worker.fsdp2x_listen_tcp("a secret of the session", "127.0.0.1")
    assert far["ok"] and far["address"].startswith("tcp://127.0.0.1:") and far["state"] == "initial"
    worker.fsdp2x_receiver.close()
    for name in files:
        sys.modules.pop(name.removesuffix(".py"))


# ---- handles of a GPU's memory on the wire: what arrives, where it is read, and what is refused


def test_what_is_written_is_read():
    """Through JSON, and only inside of what was handed out."""
    memory = HandedMemory(torch.device("cpu"), 1000)
    with device_handles.installed():
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
        HandedMemory(torch.device("cpu"), 8).device_handle()
    with pytest.raises(NotImplementedError, match="memory of meta cannot be handed"):
        HandedMemory(torch.device("meta"), 8)


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


def test_dropped_buckets_go_back_to_the_allocator(monkeypatch):
    """At the end of a push, however it ends, and before a model that sleeps gives memory to the driver."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    target = Sglang("http://127.0.0.1:1")
    servers = target._servers  # which a commit and an abort would ask
    for end in (lambda: target.commit(1), lambda: target.abort("no reason"), target.close):
        target._servers = servers if end == target.close else []
        target._handed = [object()]
        end()
        assert not target._handed and calls == ["ipc_collect"]
        calls.clear()
    transport = IpcTransport()
    transport._handed = object()
    transport.close()
    assert transport._handed is None and calls == ["ipc_collect"]
    calls.clear()
    give_to_driver(torch.device("cuda", 0))
    assert calls == ["ipc_collect", "empty_cache"]


def test_what_targets_refuse():
    for make in (lambda: Peer("@x", memory="gpu"), lambda: Vllm("http://x", memory="gpu")):
        with pytest.raises(ValueError, match="memory must be 'host' or 'device', got 'gpu'"):
            make()
