"""An engine, a trainer, or a link dies or falls silent in every phase of a push.

The tests check which error comes in time, which weights engines hold, and which push fixes it.
"""

import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter, namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2x
from engines import OVER, SECRET, EngineProcess, Store, new_address
from fsdp2x.rl.sync.receiver.engine import (
    WIRE,
    Receiver,
    WireError,
    bind_address,
    close_files,
    receive_frame,
    send_frame,
)
from fsdp2x.rl.sync.receiver.engine_tcp import TcpReceiver, split_address
from fsdp2x.sync import Peer, SyncError
from harness import dist_run
from harness.pool import fork
from reference import shard

TIMEOUT_S, SLACK_S = 1.0, 5.0
LAST = 5  # bucket
# (request, its bucket, mode of the push)
PLACES = [
    ("begin", None, "full"),
    ("bucket", 0, "full"),
    ("bucket", LAST, "full"),
    ("finish", None, "full"),
    ("commit", None, "full"),
    ("commit", None, "delta"),
]
# "dropped": the engine does the request, but its answer is lost. "silence": it does not even receive the request.
SAYS = {
    "dropped": "in time: (the other side|a member) hangs or is busy",
    "silence": "in time: (the other side|a member) hangs or is busy",
    "cut": "the other side closed the connection",
    "killed": "the other side closed the connection",
}
Engine = namedtuple("Engine", "address question pid")


def digests(tensors):
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in sorted(tensors.items())}


def eventually(probe, expected, seconds=10):
    deadline = time.monotonic() + seconds
    while (found := probe()) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == expected


def belongings():
    """Descriptors and threads by kind, and what is left elsewhere."""
    gc.collect()
    opened = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, by a thread or with the list itself
            opened[re.sub(r"\d+", "", os.readlink(path))] += 1
    children = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    threads = Counter(thread.name for thread in threading.enumerate())
    shared = [name for name in os.listdir("/dev/shm") if "fsdp2x" in name]
    return opened, len(os.listdir("/proc/self/task")), threads, "".join(children), shared


# ---- engines, in processes that can be killed


def serve(over, question, ready):
    """Receives weights. Between two pushes, it reports its weights to each connection to ``question``."""
    torch.set_num_threads(1)
    sink = Store()
    if over == "group":
        receiver = TcpReceiver("tcp://127.0.0.1:0", sink, secret=SECRET)
    else:
        receiver = Receiver(new_address(), sink)
    with socket.socket(socket.AF_UNIX) as asked:
        asked.bind(bind_address(question))
        asked.listen()
        ready.send(receiver.address)
        while True:
            if asked not in select.select([asked, *receiver.sockets], [], [])[0]:
                receiver.poll()
                continue
            with asked.accept()[0] as visitor:
                held = {**receiver.status, "digests": digests(sink.weights), "opened": belongings()[0]}
                visitor.sendall(json.dumps(held).encode())


def held_by(engine):
    with socket.socket(socket.AF_UNIX) as visit:
        visit.settimeout(20)
        visit.connect(bind_address(engine.question))
        return json.loads(visit.makefile().read())


def version_of(engine):
    return [held_by(engine)[key] for key in ("state", "version")]


@contextlib.contextmanager
def engines(over, count=1):
    started = []
    try:
        for _ in range(count):
            (ours, theirs), question = multiprocessing.Pipe(), new_address()
            started.append((fork(serve, (over, question, theirs), "engine"), ours, question))
            theirs.close()
        assert all(ours.poll(60) for _, ours, _ in started)
        yield [Engine(ours.recv(), question, process.pid) for process, ours, question in started]
    finally:
        for process, ours, _ in started:
            process.kill()
            process.join(30)
            ours.close()


# ---- between trainers and engines


def exactly(source, num_bytes):
    data = b""
    while len(data) < num_bytes and (part := source.recv(num_bytes - len(data))):
        data += part
    return data


class Relay(threading.Thread):
    """Stands where trainers look for an engine, and passes frames on to the first of ``engines``.

    ``fault``: (what happens, to which request, of which bucket), once.
    """

    def __init__(self, over, engines):
        super().__init__(daemon=True)
        self.over, self.engines, self.fault = over, list(engines), (None, None, None)
        if over == "group":
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._listener, self.address = socket.socket(socket.AF_UNIX), new_address()
            self._listener.bind(bind_address(self.address))
            self._listener.listen()
        self.start()

    def run(self):
        while True:
            try:
                trainer, _ = self._listener.accept()
            except OSError:  # closed
                return
            with trainer, self._engine() as engine, contextlib.suppress(WireError, OSError):
                self._pass_on(trainer, engine)

    def _engine(self):
        address = self.engines[0].address
        if self.over == "group":
            return socket.create_connection(split_address(address))
        engine = socket.socket(socket.AF_UNIX)
        engine.connect(bind_address(address))
        return engine

    def _pass_on(self, trainer, engine):
        if self.over == "group":  # the greeting
            for source, target, num_bytes in ((engine, trainer, len(WIRE) + 32), (trainer, engine, 64)):
                target.sendall(exactly(source, num_bytes))
            trainer.sendall(exactly(engine, 32))
        while True:
            kind, body, files = receive_frame(trainer, time.monotonic() + 60)
            what, *place = self.fault
            what = what if place == [kind, body.get("bucket")] else None
            if what is not None:
                self.fault = (None, None, None)
            if what in (None, "dropped"):
                send_frame(engine, kind, body, time.monotonic() + 60, files)
                kind, body, _ = receive_frame(engine, time.monotonic() + 60)
            close_files(files)
            if what == "cut":
                return
            if what == "killed":
                os.kill(self.engines.pop(0).pid, signal.SIGKILL)
                engine.settimeout(60)
                engine.recv(1)
                return
            if what is not None:
                trainer.settimeout(60)
                while trainer.recv(1 << 16):
                    pass  # until it gives up
                return
            send_frame(trainer, kind, body, time.monotonic() + 60)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.join(30)
        assert not self.is_alive()


# ---- trainers


def make_model(ctx):
    torch.manual_seed(0)
    return shard(ctx, nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAST + 1))))


def change(model):
    """An element of each shard; the digests of what engines must hold then."""
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().view(-1)[:1].add_(1)
    return digests(dict(fsdp2x.full_tensors(model)))


def failing_push(sync, **push):
    """(what it raises, after how many seconds)."""
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        sync.push(**push)
    return caught.value.with_traceback(None), time.monotonic() - began


def push_through(ctx, over, fault, found):
    model = make_model(ctx)
    relay = Relay(over, found) if ctx.rank == 0 else None
    address = [relay.address if relay else None]
    dist.broadcast_object_list(address)
    sync = fsdp2x.sync.connect(model, Peer(address[0], **OVER[over]), bucket_bytes=300, deltas=True, timeout_s=20)
    for number, (kind, bucket, mode) in enumerate(PLACES if fault != "silence" else PLACES[:-1]):
        old = change(model)
        sync.push(version=f"{number} old")
        dist.barrier()
        before = belongings(), relay and held_by(relay.engines[0])["opened"]
        new = change(model)
        if relay:
            relay.fault = (fault, kind, bucket)
        sync._timeout_s = TIMEOUT_S  # of this push alone: the others may be slow on a busy machine
        error, seconds = failing_push(sync, version=f"{number} new", mode=mode)
        sync._timeout_s = 20.0

        phase = "load" if kind == "bucket" else kind
        names = () if bucket is None else (f"{bucket}.weight", f"{bucket}.bias")
        fields = [str(error), error.phase, error.bucket, error.names, error.rank, error.reason]
        everywhere = [None] * ctx.world
        dist.all_gather_object(everywhere, fields)
        assert everywhere == [fields] * ctx.world and type(error) is SyncError
        assert fields[1:5] == [phase, bucket, names, 0] and re.search(SAYS[fault], error.reason), fields
        assert ("an engine whose answer was lost may have committed" in str(error)) == (kind == "commit")
        assert TIMEOUT_S * (fault in ("dropped", "silence")) <= seconds < TIMEOUT_S + SLACK_S
        del error
        assert sync.is_torn and sync.version is None
        with pytest.raises(RuntimeError, match="weights are torn.*Do not generate"):
            sync.require_clean()
        with pytest.raises(ValueError, match='the last push failed, so engines are torn. Push mode="full" first'):
            sync.push(version=f"{number} refused", mode="delta")

        holds_old = kind == "begin" and fault in ("cut", "silence")
        if relay:
            engine, held = relay.engines[0], ["torn", f"{number} old"]
            if fault == "killed":
                held = ["initial", None]
            elif holds_old:
                held = ["clean", f"{number} old"]
            elif (kind, fault) == ("commit", "dropped"):
                held = ["clean", f"{number} new"]
            eventually(lambda engine=engine: version_of(engine), held)
            if held[0] == "clean":
                assert held_by(engine)["digests"] == (old if holds_old else new)
        dist.barrier()
        if not holds_old:  # a trainer that took the push before for the last one
            sync._state, sync._version = "clean", f"{number} old"
            error, _ = failing_push(sync, version=f"{number} refused", mode="delta")
            assert error.phase == "begin" and f"a delta to version '{number} old', but this engine" in error.reason
            del error
        for mode in ("full", "delta"):
            healed = change(model)
            sync.push(version=f"{number} {mode}", mode=mode)
            if relay:
                assert version_of(relay.engines[0]) == ["clean", f"{number} {mode}"]
                assert held_by(relay.engines[0])["digests"] == healed
        eventually(lambda: (belongings(), relay and held_by(relay.engines[0])["opened"]), before)
    sync.close()
    if relay:
        relay.close()


WAYS = [("memory", fault) for fault in SAYS] + [pytest.param("group", fault, marks=pytest.mark.full) for fault in SAYS]


@pytest.mark.parametrize(("over", "fault"), WAYS)
def test_an_engine_in_every_phase(over, fault):
    with engines(over, 1 + len(PLACES) * (fault == "killed")) as found:
        dist_run(push_through, 2, over, fault, found)


def push_and_lose_a_rank(ctx, address, over, rank, place):
    """Returns the survivor's error. ``rank`` kills itself at ``place``."""
    model = make_model(ctx)
    before = belongings()[0]
    sync = fsdp2x.sync.connect(model, Peer(address, **OVER[over]), bucket_bytes=300, deltas=True, timeout_s=20)
    change(model)
    sync.push(version="old")
    new = change(model)
    if ctx.rank == rank:
        guarded = sync._guarded

        def dying(phase, call):
            if phase == place:
                time.sleep(0.2)  # the other rank waits for it
                os.kill(os.getpid(), signal.SIGKILL)
            return guarded(phase, call)

        sync._guarded = dying
    error, seconds = failing_push(sync, version="new")
    assert sync.is_torn and sync.version is None and seconds < SLACK_S
    refused, seconds = failing_push(sync, version="next")
    assert type(refused) is RuntimeError and seconds < SLACK_S and f"rank {rank} (pid" in str(refused)
    said = type(error).__name__, str(error), new
    sync.close()
    del sync, error, refused
    opened = belongings()[0]
    assert [kind for kind in opened if "fsdpx" in kind] == [kind for kind in before if "fsdpx" in kind]
    return said


def push_after_others(ctx, address, over):
    model = make_model(ctx)
    with fsdp2x.sync.connect(model, Peer(address, **OVER[over]), bucket_bytes=300, deltas=True, timeout_s=20) as sync:
        with pytest.raises(ValueError, match="nothing was committed yet"):
            sync.push(version="healed", mode="delta")
        change(model)
        healed = change(model)
        sync.push(version="healed")
        return healed


TRAINERS = [(1, "memory", "load"), (1, "memory", "commit"), (0, "memory", "load")]
TRAINERS += [pytest.param(0, "group", "load", marks=pytest.mark.full)]


@pytest.mark.parametrize(("rank", "over", "place"), TRAINERS)
def test_a_trainer_in_the_first_bucket_and_at_the_commit(rank, over, place):
    """A collective's error names the rank that ended and the tensors. It is no SyncError, as no engine has failed.

    An engine that has committed still becomes torn, because no rank knows whether all engines have committed.
    """
    with engines(over) as (engine,):
        opened = held_by(engine)["opened"]
        lost = engine.address, over, rank, place
        outcomes = dist_run(push_and_lose_a_rank, 2, *lost, expect_exit={rank: -signal.SIGKILL})
        kind, text, new = outcomes[1 - rank].value
        assert kind == "RuntimeError" and re.search(rf"rank {rank} \(pid \d+\) ended meanwhile", text), text
        eventually(lambda: version_of(engine), ["torn", "new" if place == "commit" else "old"])
        if place == "commit":
            assert held_by(engine)["digests"] == new
        else:
            assert "'0.weight' to '0.bias'" in text, text
        healed = dist_run(push_after_others, 2, engine.address, over)[0].value
        assert version_of(engine) == ["clean", "healed"] and held_by(engine)["digests"] == healed
        eventually(lambda: held_by(engine)["opened"], opened)


# ---- a network between them


def link_to(pid, ours):
    """A cable between this network and that of a process: 10.213.77.1 at ``ours``, and .2."""
    enter = ["nsenter", "--net", "--target", str(pid)]
    for command in (
        ["ip", "link", "add", ours, "type", "veth", "peer", "name", "fsdp2x0", "netns", str(pid)],
        ["ip", "address", "add", "10.213.77.1/24", "dev", ours],
        ["ip", "link", "set", ours, "up"],
        [*enter, "ip", "address", "add", "10.213.77.2/24", "dev", "fsdp2x0"],
        [*enter, "ip", "link", "set", "fsdp2x0", "up"],
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.mark.full
def test_a_network_between_them():
    """The engine has a separate link. One push arrives, and the link goes down during the next one."""
    if os.getuid() != 0 or shutil.which("ip") is None or subprocess.run(["unshare", "--net", "true"]).returncode:
        pytest.skip("networks of one's own need root and iproute2")
    link = f"fsdp2x{os.getpid() % 100000}"
    try:
        engine = EngineProcess("tcp://10.213.77.2:7000", prepare=lambda pid: link_to(pid, link))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no such link can be made here: {error.stderr.decode().strip()}")
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, ["ip", "link", "delete", link], check=True, timeout=60)
        stack.enter_context(engine)
        outcomes = dist_run(push_over_a_cable, 2, engine.process.pid, timeout=120)
        for outcome in outcomes:
            assert "hangs or is busy" in outcome.value
        eventually(lambda: [engine.status()[key] for key in ("state", "version")], ["torn", 1], 100)


def push_over_a_cable(ctx, pid):
    """Returns the error after the link goes down before the third bucket."""
    model = make_model(ctx)
    target = Peer("tcp://10.213.77.2:7000", **OVER["group"])
    sync = fsdp2x.sync.connect(model, target, bucket_bytes=300, timeout_s=5)
    sync.push(version=1)
    buckets = sync._buckets

    def pulled(*arguments):
        for bucket in buckets(*arguments):
            if bucket.index == 2 and ctx.rank == 0:
                command = ["nsenter", "--net", "--target", str(pid), "ip", "link", "set", "fsdp2x0", "down"]
                subprocess.run(command, check=True, timeout=60)
            yield bucket

    sync._buckets = pulled
    with pytest.raises(SyncError) as caught:
        sync.push(version=2)
    assert (caught.value.phase, caught.value.rank) == ("load", 0)
    return str(caught.value)
