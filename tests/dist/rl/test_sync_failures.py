"""Pushes that fail: the same error on every rank in time, torn engines that refuse, a full push that heals."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2x
from engines import OVER, Layerwise, Store, new_address, peer
from fsdp2x.rl.sync.receiver.engine import TornWeights
from fsdp2x.sync import InProcess, Peer, SyncError
from harness import distributed
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
    with pytest.raises(RuntimeError, match="weights are torn.*Do not generate"):
        sync.require_clean()
    with pytest.raises(ValueError, match='the last push failed, so engines are torn. Push mode="full" first'):
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
