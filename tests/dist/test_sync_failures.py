"""Pushes that fail: the same error on every rank in time, torn engines that refuse, a full push that heals."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2x
from engine_process import digests
from engines import OVER, EngineProcess, Layerwise, Store, new_address, peer
from fsdp2x.sync import InProcess, Peer, SyncError
from fsdp2x.sync.engine import TornWeights
from harness import dist_run, distributed
from reference import params, same, shard


def whole_model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))


def make_model(ctx):
    model = whole_model()
    expected = params(model)
    return shard(ctx, model), expected


def committed(engine):
    """(state, version, digests by name) of an engine process."""
    status = engine.status()
    return status["state"], status["version"], status["digests"]


def memory_files():
    """Descriptors and mappings of this package's memory, and what has a name in shared memory."""
    found = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if os.path.islink(path)]
    found += Path("/proc/self/maps").read_text().split()
    return sum("memfd:fsdp2x" in one for one in found), sorted(
        name for name in os.listdir("/dev/shm") if "fsdp2x" in name
    )


class Broken(Store):
    """Raises once, at a place of its choice."""

    def __init__(self, place=None):
        super().__init__()
        self.place = place

    def reach(self, place):
        if self.place == place:
            self.place = None
            raise ValueError(f"no room in {place}")

    def start(self, mode):
        self.reach("start")

    def load(self, items):
        self.reach(f"bucket {len(self.bucket_sizes)}")
        super().load(items)

    def apply_delta(self, name, positions, values):
        self.reach("delta")
        super().apply_delta(name, positions, values)

    def finish(self, version=None):
        self.reach("finish")


def same_error_everywhere(ctx, sync, failing_rank, phase, bucket, match, **push):
    with pytest.raises(SyncError, match=match) as caught:
        sync.push(**push)
    error = caught.value
    fields = (str(error), error.phase, error.bucket, error.names, error.rank, error.reason)
    everywhere = [None] * ctx.world
    dist.all_gather_object(everywhere, fields)
    assert everywhere == [fields] * ctx.world
    assert (error.phase, error.bucket, error.rank) == (phase, bucket, failing_rank)
    assert sync.is_torn and sync.version is None
    with pytest.raises(RuntimeError, match="weights are torn.*nothing may be generated"):
        sync.require_clean()
    with pytest.raises(ValueError, match='the last push failed: engines are torn; push mode="full" first'):
        sync.push(version=99, mode="delta")


PLACES = [("start", "begin", None), ("bucket 0", "load", 0), ("bucket 3", "load", 3), ("finish", "finish", None)]


@distributed(world_sizes=(3,))
def test_a_loader_that_raises_on_one_rank(ctx):
    model, expected = make_model(ctx)
    for calls in ("bucket", "push"):
        for place, phase, bucket in PLACES:
            if calls == "push" and place == "bucket 3":
                continue  # there is one call for all of them
            engine, aborted = Broken(place if ctx.rank == 1 else None), []
            target = InProcess(
                engine.load,
                calls=calls,
                start=engine.start,
                apply_delta=engine.apply_delta,
                finish=engine.finish,
                abort=aborted.append,
            )
            options = {"bucket_bytes": 300, "deltas": True, "names": "model"}
            with fsdp2x.sync.connect(model, target, **options) as sync:
                sync.require_clean()
                bucket = None if calls == "push" and phase == "load" else bucket
                same_error_everywhere(ctx, sync, 1, phase, bucket, f"rank 1 in phase .{phase}.*no room", version=1)
                assert len(aborted) == 1 and "no room" in aborted[0]
                sync.push(version=2)
                sync.require_clean()
                same(engine.weights, expected)


@distributed(world_sizes=(2,))
def test_a_loader_that_stops_early(ctx):
    model, expected = make_model(ctx)
    got = {}
    stops = [True]

    def load(items):
        for name, tensor in items:
            got[name] = tensor
            if name == "3.weight" and stops.pop():
                return

    with fsdp2x.sync.connect(model, InProcess(load, calls="push"), bucket_bytes=300) as sync:
        with pytest.raises(SyncError, match="returned before it had taken all tensors") as caught:
            sync.push(version=1)
        assert caught.value.names == ("3.weight", "3.bias")[: len(caught.value.names)]
        stops.append(False)
        sync.push(version=2)
        same(got, expected)


@pytest.mark.parametrize("over", OVER)
@distributed(world_sizes=(3,))
def test_an_engine_that_raises(ctx, over):
    """Two workers, one of which fails: its answer is a value, later answers are not mistaken for others."""
    model, expected = make_model(ctx)
    for place, phase, bucket in PLACES:
        engines = [Store(), Broken(place)]
        with peer(ctx, *engines, over=over) as (target, served):
            with fsdp2x.sync.connect(model, target, bucket_bytes=300, deltas=True) as sync:
                same_error_everywhere(ctx, sync, 0, phase, bucket, "ValueError: no room in", version=1)
                for one in served or ():
                    assert one.receiver.status["state"] == "torn"
                    with pytest.raises(TornWeights, match="weights are torn .*no room.*until a full push"):
                        with one.receiver.reading():
                            pass
                sync.push(version=2)
                with torch.no_grad():
                    model[2].weight.to_local()[:1, :1] += 1
                whole = dict(fsdp2x.full_tensors(model))
                if ctx.rank == 0:
                    engines[1].place = "delta"
                with pytest.raises(SyncError, match="no room in delta"):
                    sync.push(version=3, mode="delta")
                sync.push(version=4)
                for one, engine in zip(served or (), engines, strict=bool(served)):
                    assert one.versions == [2, 4]
                    with one.receiver.reading() as version:
                        assert version == 4
                        same(engine.weights, whole)


@distributed(world_sizes=(2,))
def test_nothing_stays_behind(ctx):
    model, expected = make_model(ctx)
    before = memory_files()
    for place in (None, "bucket 2"):
        with peer(ctx, Broken(place)) as (target, served):
            with fsdp2x.sync.connect(model, target, bucket_bytes=300) as sync:
                if place is None:
                    sync.push(version=1)
                    assert memory_files()[0] > before[0] and memory_files()[1] == before[1]
                else:
                    with pytest.raises(SyncError, match="no room"):
                        sync.push(version=1)
        del target, served, sync
        dist.barrier()
    assert memory_files() == before


@distributed(world_sizes=(2,))
def test_what_does_not_fit_is_told_before_any_byte(ctx):
    model, expected = make_model(ctx)

    class Other(Store):
        def check(self, layout):
            raise ValueError("this engine has no tensor '5.bias'")

    with fsdp2x.sync.connect(model, Peer(new_address()), timeout_s=5) as sync:
        with pytest.raises(SyncError, match="no receiver answers at '@fsdp2x-test-.*is the engine running"):
            sync.push(version=1)
    with peer(ctx, Other()) as (target, served), fsdp2x.sync.connect(model, target) as sync:
        for version in (1, 2):
            with pytest.raises(SyncError, match="phase 'begin'.*this engine has no tensor '5.bias'"):
                sync.push(version=version)
        if served:
            with served.receiver.reading() as version:
                assert version is None, "it was never asked to begin"
    engine = Layerwise()
    with peer(ctx, engine.load) as (target, served), fsdp2x.sync.connect(model, target, deltas=True) as sync:
        sync.push(version=1)
        with pytest.raises(SyncError, match="NotImplementedError: this engine takes no deltas"):
            sync.push(version=2, mode="delta")


def fixed_address(over):
    """Where one engine after the other listens."""
    if over == "memory":
        return new_address()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def target_at(address, over="group"):
    return Peer(address, **OVER[over])


def push_until_an_end(ctx, address, over, death):
    """Returns what the surviving ranks saw; `death`: (rank, bucket) that ends in mid-push."""
    model, expected = make_model(ctx)
    sync = fsdp2x.sync.connect(model, target_at(address, over), bucket_bytes=300, timeout_s=10)
    sync.push(version=1)
    if death is not None:
        rank, last = death
        if ctx.rank == rank:
            buckets = sync._buckets

            def dying(*arguments):
                for bucket in buckets(*arguments):
                    if bucket.index == last:
                        os._exit(7)
                    yield bucket

            sync._buckets = dying
    try:
        sync.push(version=2)
    except Exception as error:
        return type(error).__name__, str(error), sync.is_torn
    return "", "", sync.is_torn


@pytest.mark.parametrize(
    ("rank", "over"),
    [(0, "memory"), *(pytest.param(*way, marks=pytest.mark.full) for way in ((1, "memory"), (0, "group")))],
)
def test_a_trainer_that_dies(rank, over):
    address = fixed_address(over)
    with EngineProcess(address) as engine:
        outcomes = dist_run(push_until_an_end, 3, address, over, (rank, 3), expect_exit={rank: 7})
        for index, outcome in enumerate(outcomes):
            if index != rank:
                kind, text, is_torn = outcome.value
                assert kind == "RuntimeError" and is_torn and f"rank {rank} (pid" in text, text
        status = engine.status()
        assert (status["state"], status["version"]) == ("torn", 1), status
        assert "the trainer is gone" in status["reason"] or "a trainer failed" in status["reason"]
        # The same engine, other trainers: healed by their first push.
        assert [outcome.value[0] for outcome in dist_run(push_until_an_end, 2, address, over, None)] == ["", ""]
        assert committed(engine) == ("clean", 2, digests(params(whole_model())))


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
    """The engine is behind a link of its own; the same push as in one network, then the cable is pulled."""
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
        for outcome in dist_run(push_until_an_end, 2, "tcp://10.213.77.2:7000", "group", None, timeout=120):
            assert outcome.value == ("", "", False)
        assert committed(engine) == ("clean", 2, digests(params(whole_model())))
        outcomes = dist_run(push_over_a_cable, 2, engine.process.pid, timeout=120)
        for outcome in outcomes:
            assert "hangs or is busy" in outcome.value
        deadline = time.monotonic() + 100
        while (status := engine.status())["state"] != "torn":
            assert time.monotonic() < deadline, status
            time.sleep(0.1)


def push_over_a_cable(ctx, pid):
    """What is said when it is pulled before the third bucket."""
    model, _ = make_model(ctx)
    sync = fsdp2x.sync.connect(model, target_at("tcp://10.213.77.2:7000"), bucket_bytes=300, timeout_s=5)
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
