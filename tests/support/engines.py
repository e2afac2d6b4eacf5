"""Engines for tests of weight pushes: they take weights as real ones do, traps included."""

import contextlib
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import device_handles
import fsdp2x
from fsdp2x.io.names import TensorSpec
from fsdp2x.rl.sync.receiver import engine as engine_file
from fsdp2x.rl.sync.receiver.engine import Parameters, Receiver
from fsdp2x.rl.sync.receiver.engine_group import GroupReceiver
from fsdp2x.rl.sync.targets.base import PushBucket, WireLayout
from fsdp2x.sync import GroupPeer, Peer

OVER = ("memory", "device", "group")  # routes to receivers


def wire(model, **options) -> dict[str, torch.Tensor]:
    """Returns the tensors that a push of `model` sends, gathered by the bucket."""
    found = {}
    for bucket in fsdp2x.export.stream(model, **options):
        found.update((name, tensor.clone()) for name, tensor in bucket.items())
    return found


def step(model) -> None:
    """Other weights."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)


class Layerwise:
    """Like vLLM's reload of layers: keeps what it is given until the end, and only then copies."""

    def __init__(self):
        self.weights, self.waiting = {}, []

    def load(self, items):
        self.waiting += items

    def finish(self, version=None):
        self.weights.update((name, tensor.clone()) for name, tensor in self.waiting)
        self.waiting = []


class Store(Parameters):
    """Copies at once, makes its tensors as they come, and takes deltas."""

    def __init__(self):
        super().__init__({})
        self.bucket_sizes = []

    @property
    def weights(self):
        return self._tensors

    def check(self, layout):
        self._tensors = {name: torch.full(shape, 77).to(dtype) for name, dtype, shape in layout}

    def load(self, items):
        items = list(items)
        self.bucket_sizes.append(len(items))
        for name, tensor in items:
            self._tensors.setdefault(name, torch.empty_like(tensor))
        super().load(items)


class Served:
    """A receiver whose thread polls until the block ends, and no exception ends it before."""

    def __init__(self, address, sink, timeout_s=20.0):
        make = GroupReceiver if address.startswith("tcp:") else Receiver
        self.receiver = make(address, sink, timeout_s=timeout_s)
        self.versions = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self):
        while not self._stop.is_set():
            version = self.receiver.poll(0.02)
            if version is not None:
                self.versions.append(version)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        serves = self._thread.is_alive()
        self._stop.set()
        self._thread.join(30)
        assert serves and not self._thread.is_alive()
        self.receiver.close()


def new_address(over="memory"):
    if over != "group":
        return f"@fsdp2x-test-{secrets.token_hex(8)}"
    while True:  # a port that no other process gets by chance, because targets listen there more than once
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(20000, 32000))) as free:
            return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def target_of(over, addresses, rank=0):
    """A target that reaches receivers at these addresses, one for all of them over a group."""
    if over == "group":
        return GroupPeer(addresses[0], len(addresses), rank=rank)
    return Peer(addresses, rank=rank, memory="device" if over == "device" else "host")


@contextlib.contextmanager
def peer(ctx, *sinks, rank=0, timeout_s=20.0, over="memory"):
    """Yields (target, the servers on ``rank`` for the sinks, or None on other ranks)."""
    with contextlib.ExitStack() as stack:
        if over == "device":
            stack.enter_context(device_handles.installed())
        served = []
        if ctx.rank == rank:
            address = new_address(over)
            places = [address if over == "group" else new_address() for _ in sinks]
            made = [Served(place, sink, timeout_s) for place, sink in zip(places, sinks, strict=True)]
            served = [stack.enter_context(one) for one in made]
        addresses = [[one.receiver.address for one in served]]
        dist.broadcast_object_list(addresses, src=rank)
        yield target_of(over, addresses[0], rank), (served if len(served) > 1 else served[0]) if served else None


def push_by_hand(target, tensors, version=1, timeout_s=20.0):
    """One push of `tensors` by `target`, without a session."""
    specs = tuple(TensorSpec(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())
    target.open(WireLayout((specs,), (), 0), timeout_s)
    target.begin(version, "full", None)
    target.take(iter([PushBucket(0, specs, tuple(tensors.values()))]))
    target.finish(version)
    target.commit(version)
    target.close()


class EngineProcess:
    """`engine_process.py`, which polls when this returns; a context manager that ends it."""

    def __init__(self, address, environment=None):
        script = Path(__file__).with_name("engine_process.py")
        command = [sys.executable, script, engine_file.__file__, address]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env={**os.environ, **(environment or {})}, **pipes)
        assert self.process.stdout.readline() == "ready\n"

    def status(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.kill()
        self.process.wait(30)
        self.process.stdout.close()
