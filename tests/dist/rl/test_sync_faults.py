"""Faults of a push: phase x carrier x fault, of an engine, a trainer, a loader, a layout, or a network.

In every case all ranks raise the same error in time, torn engines refuse, a full push heals, and nothing is left.
"""

import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import re
import select
import signal
import socket
import threading
import time
from collections import Counter, namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2x
from engines import Layerwise, Store, new_address, peer, target_of
from fsdp2x.rl.sync.receiver import engine_group
from fsdp2x.rl.sync.receiver.engine import Receiver, bind_address, close_files
from fsdp2x.rl.sync.receiver.engine_group import GroupReceiver
from fsdp2x.rl.sync.session import SessionState
from fsdp2x.sync import GroupPeer, InProcess, SyncError
from harness import dist_run, distributed
from harness.pool import fork
from reference import same, shard

TIMEOUT_S, SLACK_S = 1.0, 5.0
LAST = 5  # bucket
# (request, its bucket, mode of the push)
PLACES = [("begin", None, "full"), ("bucket", 0, "full"), ("bucket", LAST, "full"), ("finish", None, "full")]
PLACES += [("commit", None, "full"), ("commit", None, "delta")]
# What an engine does at a request, and what the error says. "late": it does the request, and does not answer in time.
FAULTS = {
    "dies": "closed the connection|Connection closed|reset by peer",
    "hangs": "in time: (the other side|a member) hangs or is busy",
    "late": "in time: (the other side|a member) hangs or is busy",
    "leaves": "closed the connection|Connection closed|reset by peer",
    "raises": "says: ValueError: no room",
}
CARRIERS = ("memory", "group")
Engine = namedtuple("Engine", "address question")


def held_after(over, fault, kind, number):
    """[state, version] of the other engine and of the one with the fault, in a push from "old" to "new"."""
    old, new = f"{number} old", f"{number} new"
    held = ["torn", old]
    if fault == "dies":
        held = ["initial", None]  # of the process that replaces it
    elif kind == "commit" and fault in ("hangs", "late"):
        held = ["clean" if over == "memory" else "torn", new]  # a connection that is gone does not tell of the failure
    elif (over, fault, kind) == ("memory", "leaves", "begin"):
        held = ["clean", old]
    return [["torn", new if kind == "commit" else old], held]


def digests(tensors):
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in sorted(tensors.items())}


def eventually(probe, expected, seconds=10):
    deadline = time.monotonic() + seconds
    while (found := probe()) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == expected, f"{found}\n{expected}"


def settled(probe):
    """What a probe finds when it has found the same for a while."""
    last = None
    while (found := probe()) != last:
        last = found
        time.sleep(0.1)
    return found


def belongings():
    """Descriptors and threads by kind, mappings, and what is left elsewhere."""
    gc.collect()
    opened = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, by a thread or with the list itself
            opened[re.sub(r"\d+", "", os.readlink(path))] += 1
    children = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    threads = Counter(thread.name for thread in threading.enumerate())
    shared = [name for name in os.listdir("/dev/shm") if "fsdp2x" in name]
    mapped = Path("/proc/self/maps").read_text().count("memfd:fsdp2x")
    return opened, len(os.listdir("/proc/self/task")), threads, "".join(children), shared, mapped


# ---- engines, in processes that can be killed


class Sink(Store):
    """Raises once, in the next call."""

    raises = False

    def _reach(self, *_):
        if self.raises:
            self.raises = False
            raise ValueError("no room")

    start = finish = drop_adapter = _reach

    def load(self, items):
        self._reach()
        super().load(items)


def serve(over, address, question, timeout_s, is_ready):
    """Takes weights. Reports what it holds to each connection to ``question``, which may bring the next fault."""
    torch.set_num_threads(1)
    is_ready.send(None)
    with socket.socket(socket.AF_UNIX) as asked:
        while True:
            try:
                asked.bind(bind_address(question))
                break
            except OSError:  # of the process that this one replaces when it dies
                time.sleep(0.02)
        asked.listen()
        sink, fault = Sink(), [None, None, None]
        receiver = (GroupReceiver if over == "group" else Receiver)(address, sink, timeout_s=timeout_s)
        handle = receiver._handle

        def faulty(kind, body, files):
            what = fault[0] if fault[1:] == [kind, body.get("bucket")] else None
            if what is not None:
                fault[:] = [None, None, None]
            if what in ("dies", "hangs"):
                os.kill(os.getpid(), signal.SIGKILL if what == "dies" else signal.SIGSTOP)
            if what == "leaves":
                close_files(files)
                receiver.release("it leaves")
                return {"ok": False}
            sink.raises = what == "raises"
            answer = handle(kind, body, files)
            if what == "late":
                os.kill(os.getpid(), signal.SIGSTOP)
            return answer

        receiver._handle = faulty
        while True:
            receiver.poll(0.02)
            if select.select([asked], [], [], 0)[0]:
                with asked.accept()[0] as visitor:
                    fault[:] = json.loads(visitor.recv(1000)) or fault
                    held = {**receiver.status, "digests": digests(sink.weights), "opened": belongings()[0]}
                    visitor.sendall(json.dumps(held).encode())


def held_by(engine, fault=None):
    """What an engine reports, and its next fault. Waits for the process that replaces one that died."""
    for _ in range(1000):
        with contextlib.suppress(ConnectionError, ValueError), socket.socket(socket.AF_UNIX) as visit:
            visit.settimeout(20)
            visit.connect(bind_address(engine.question))
            visit.sendall(json.dumps(fault).encode())
            return json.loads(visit.makefile().read())
        time.sleep(0.02)
    raise AssertionError("no engine answers")


def versions(found):
    return [[held_by(engine)[key] for key in ("state", "version")] for engine in found]


@contextlib.contextmanager
def engines(over, count=1, num_spares=0, timeout_s=20.0):
    """The last one has ``num_spares`` processes that replace it one after the other."""
    started, found = [], []
    try:
        address = new_address(over)
        for index in range(count):
            found.append(Engine(address if over == "group" else new_address(), new_address()))
            for _ in range(1 + num_spares * (index == count - 1)):
                ours, theirs = multiprocessing.Pipe()
                started.append((fork(serve, (over, *found[-1], timeout_s, theirs), "engine"), ours))
                theirs.close()
        assert all(ours.poll(60) for _, ours in started)
        yield found
    finally:
        for process, ours in started:
            process.kill()
            process.join(30)
            ours.close()


# ---- trainers


def make_model(ctx):
    torch.manual_seed(0)
    return shard(ctx, nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAST + 1))))


def change(model):
    """Changes an element of each shard. Returns the digests that engines must then hold."""
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().view(-1)[:1].add_(1)
    return digests(dict(fsdp2x.full_tensors(model)))


def connected(model, target, **options):
    return fsdp2x.sync.connect(model, target, **{"bucket_bytes": 300, "deltas": True, "timeout_s": 20, **options})


def fails(ctx, sync, phase, bucket, rank, match, **push):
    """Checks that a push fails on every rank with the same error, whose seconds this returns."""
    began = time.monotonic()
    with pytest.raises(SyncError) as caught:
        sync.push(**push)
    seconds, error = time.monotonic() - began, caught.value.with_traceback(None)
    fields = [str(error), error.phase, error.bucket, error.rank, error.reason]
    everywhere = [None] * ctx.world
    dist.all_gather_object(everywhere, fields)
    assert everywhere == [fields] * ctx.world
    assert fields[1:4] == [phase, bucket, rank] and re.search(match, error.reason), fields
    assert len(error.names) == 2 * (bucket is not None)
    assert ("an engine whose answer was lost may have committed" in str(error)) == (phase == "commit")
    assert sync.is_torn and sync.version is None
    with pytest.raises(RuntimeError, match="weights are torn.*Do not generate"):
        sync.require_clean()
    return seconds


def push_through(ctx, over, fault, found, places):
    def all_belongings():
        return belongings(), [held_by(engine)["opened"] for engine in found if ctx.rank == 0]

    model = make_model(ctx)
    sync = connected(model, target_of(over, [engine.address for engine in found]))
    for number, (kind, bucket, mode) in enumerate(places):
        change(model)
        sync.push(version=f"{number} old")
        dist.barrier()
        before = settled(all_belongings)
        change(model)
        if ctx.rank == 0:
            pid = held_by(found[-1], [fault, kind, bucket])["pid"]
        dist.barrier()
        sync._timeout_s = TIMEOUT_S  # of this push alone: the others may be slow on a busy machine
        phase = "load" if kind == "bucket" else kind
        seconds = fails(ctx, sync, phase, bucket, 0, FAULTS[fault], version=f"{number} new", mode=mode)
        sync._timeout_s = 20.0
        assert TIMEOUT_S * (fault in ("hangs", "late")) <= seconds < TIMEOUT_S + SLACK_S
        with pytest.raises(ValueError, match='the last push failed, so engines are torn. Push mode="full" first'):
            sync.push(version=f"{number} refused", mode="delta")
        if ctx.rank == 0:
            if fault in ("hangs", "late"):
                os.kill(pid, signal.SIGCONT)
            eventually(lambda: versions(found), held_after(over, fault, kind, number))
        dist.barrier()
        # A trainer that takes the push before for the last one.
        sync._state, sync._version = SessionState.CLEAN, f"{number} old"
        fails(ctx, sync, "begin", None, 0, f"a delta to version '{number} old', but", version="refused", mode="delta")
        for mode in ("full", "delta"):
            healed = change(model)
            sync.push(version=f"{number} {mode}", mode=mode)
            for engine in found if ctx.rank == 0 else ():
                held = held_by(engine)
                assert (held["state"], held["version"], held["digests"]) == ("clean", f"{number} {mode}", healed)
        eventually(all_belongings, before)
    sync.close()


@pytest.mark.parametrize("over", CARRIERS)
@pytest.mark.parametrize("places", [PLACES[::2], pytest.param(PLACES[1::2], marks=pytest.mark.full)], ids=[0, 1])
@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=pytest.mark.full if fault in ("late", "leaves") else ()) for fault in FAULTS]
)
def test_an_engine_in_every_phase(fault, places, over):
    """One of two engines. The other one is torn as well, and no answer is mistaken for that of another request."""
    with engines(over, 2, len(places) * (fault == "dies")) as found:
        dist_run(push_through, 2, over, fault, found, places, timeout=120)


def push_and_fail(ctx, over, address, fault, rank, place):
    """Returns the survivor's error. ``rank`` kills itself or hangs at ``place``."""
    model = make_model(ctx)
    before = belongings()
    sync = connected(model, target_of(over, [address]))
    change(model)
    sync.push(version="old")
    new, guarded = change(model), sync._guarded

    def failing(phase, call):
        if phase == place and ctx.rank == rank:
            time.sleep(0.2 if fault == "dies" else 2 * TIMEOUT_S)  # the other rank waits for it
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
        return guarded(phase, call)

    sync._guarded = failing
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        sync.push(version="new")
    error = caught.value.with_traceback(None)
    assert sync.is_torn and sync.version is None and time.monotonic() - began < 2 * TIMEOUT_S + SLACK_S
    said = type(error).__name__, str(error), new
    if fault == "dies":
        with pytest.raises(RuntimeError, match=rf"rank {rank} \(pid"):
            sync.push(version="next")
    sync.close()
    del sync, error, caught
    eventually(lambda: [belongings()[index] for index in (4, 5)], [before[index] for index in (4, 5)])
    return said


def push_after_others(ctx, over, address):
    model = make_model(ctx)
    with connected(model, target_of(over, [address])) as sync:
        with pytest.raises(ValueError, match="nothing was committed yet"):
            sync.push(version="healed", mode="delta")
        change(model)
        healed = change(model)
        sync.push(version="healed")
        return healed


# (fault, rank, place)
TRAINERS = [
    ("dies", 1, "load"),
    ("dies", 1, "commit"),
    pytest.param("dies", 0, "load", marks=pytest.mark.full),
    ("hangs", 0, "load"),
    pytest.param("hangs", 0, "finish", marks=pytest.mark.full),
]


@pytest.mark.parametrize("over", CARRIERS)
@pytest.mark.parametrize(("fault", "rank", "place"), TRAINERS)
def test_a_trainer(fault, rank, place, over):
    """A collective's error names the rank that ended and the tensors. It is no SyncError, as no engine has failed.

    An engine that has committed still becomes torn, because no rank knows whether all engines have committed.
    """
    with engines(over, timeout_s=TIMEOUT_S if fault == "hangs" else 20.0) as (engine,):
        opened = held_by(engine)["opened"]
        ends = {rank: -signal.SIGKILL} if fault == "dies" else {}
        outcomes = dist_run(push_and_fail, 2, over, engine.address, fault, rank, place, expect_exit=ends)
        kind, text, new = outcomes[1 - rank].value
        if fault == "dies":
            assert kind == "RuntimeError" and re.search(rf"rank {rank} \(pid \d+\) ended meanwhile", text), text
            assert place == "commit" or "'0.weight' to '0.bias'" in text, text
        else:
            assert kind == "SyncError" and f"rank 0 in phase '{place}'" in text, text
        eventually(lambda: versions([engine]), [["torn", "new" if place == "commit" else "old"]])
        assert place != "commit" or held_by(engine)["digests"] == new
        healed = dist_run(push_after_others, 2, over, engine.address)[0].value
        assert versions([engine]) == [["clean", "healed"]] and held_by(engine)["digests"] == healed
        eventually(lambda: held_by(engine)["opened"], opened)


# ---- engines that do not come, or do not fit


class Other(Store):
    def check(self, layout):
        raise ValueError("this engine has no tensor '5.bias'")


@pytest.mark.parametrize("over", CARRIERS)
@distributed(world_sizes=(2,))
def test_what_does_not_fit_is_told_before_any_byte(ctx, over):
    model = make_model(ctx)
    match = {"memory": "no receiver answers at '@fsdp2x-test-.*is the engine running", "group": "not all of 1 engines"}
    with connected(model, target_of(over, [new_address(over)]), timeout_s=TIMEOUT_S) as sync:
        fails(ctx, sync, "begin", None, 0, match[over], version=1)
    with peer(ctx, Other(), over=over) as (target, served), connected(model, target) as sync:
        for version in (1, 2):
            fails(ctx, sync, "begin", None, 0, "this engine has no tensor '5.bias'", version=version)
        if served:
            with served.receiver.reading() as version:
                assert version is None, "it was never asked to begin"
    with peer(ctx, Layerwise().load, over=over) as (target, served), connected(model, target) as sync:
        sync.push(version=1)
        fails(ctx, sync, "begin", None, 0, "NotImplementedError: this engine takes no d", version=2, mode="delta")
        sync.push(version=3)


@distributed(world_sizes=(2,))
def test_groups_that_cannot_be(ctx):
    """No rank waits for its timeout, nothing is torn, and the next push has a group with the same engines."""
    model = make_model(ctx)
    sinks, refused = [Store(), Store()], []
    make = engine_group.EngineGroup

    def refuse_once(*args):
        if threading.current_thread() is not threading.main_thread() and not refused:
            raise OSError(refused.append("out of sockets") or refused[0])
        return make(*args)

    with peer(ctx, *sinks, over="group") as (target, served):
        address, began = target.listen() if served else "tcp://127.0.0.1:1", time.monotonic()
        target.close()
        if not torch.cuda.is_available():
            with connected(model, GroupPeer(address, 2, backend="nccl")) as sync:
                fails(ctx, sync, "begin", None, 0, "no process group of 'nccl' is possible here", version=1)
        with connected(model, target) as sync:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine_group, "EngineGroup", refuse_once)
                fails(ctx, sync, "begin", None, 0, "engine [12] at .*: out of sockets", version=1)
            assert time.monotonic() - began < 15
            assert [one.receiver.status["state"] for one in served or ()] == ["initial"] * len(served or ())
            sync.push(version=2)
            assert [one.receiver.status["version"] for one in served or ()] == [2] * len(served or ())
        with connected(model, GroupPeer(address, 1)) as sync:
            with pytest.raises(SyncError, match="2 engines came to .*, but num_engines is 1"):
                for version in range(100):
                    sync.push(version=version)
                    time.sleep(0.1)


# ---- loaders in the trainers' processes


# What fails: (phase, bucket).
LOADERS = {"0.weight": ("load", 0), "3.weight": ("load", 3), "finish": ("finish", None)}


@pytest.mark.parametrize("place", LOADERS)
@distributed(world_sizes=(3,))
def test_a_loader_on_one_rank(ctx, place):
    model, (phase, bucket) = make_model(ctx), LOADERS[place]
    got, bad = {}, [place] if ctx.rank == 1 else []

    def reach(*at):
        if bad == [*at][:1]:
            raise ValueError(f"no room in {bad.pop()}")

    def load(items):
        for name, tensor in items:
            reach(name)
            got[name] = tensor

    with connected(model, InProcess(load, apply_delta=reach, finish=lambda version: reach("finish"))) as sync:
        sync.require_clean()
        fails(ctx, sync, phase, bucket, 1, "no room in", version=1)
        sync.push(version=2)
        sync.require_clean()
        same(got, dict(fsdp2x.full_tensors(model)))
