"""Pushes into workers of checkpoint-engine: its dialogue, and what ends it, against a stand-in of its worker."""

import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist

import fsdp2x
from checkpoint_worker import Ended, Worker
from engines import step, wire
from fsdp2x.sync import CheckpointEngine, SyncError
from harness import distributed
from models import STACK_UNITS, build, mixed_stack
from reference import same, shard

pytest.importorskip("zmq")


class Engine:
    """All workers, on rank 0, which calls them; the other ranks' request has nothing to do."""

    def __init__(self, ctx, num_ranks=None):
        self.rank, self.num_calls, self.error = ctx.rank, 0, None
        self.workers = [Worker() for _ in range(num_ranks or ctx.world)] if ctx.rank == 0 else []

    def request(self, socket_paths):
        """As `collective_rpc`: every worker is called, and the first that raises is told of."""
        if self.rank != 0:
            return
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        raised = []

        def call(worker, uuid):
            worker.uuid = uuid
            try:
                worker.update_weights_from_ipc(dict(socket_paths))
            except (Exception, Ended) as error:
                raised.append(error)

        pairs = zip(self.workers, socket_paths, strict=True)
        threads = [threading.Thread(target=call, args=(w, uuid), daemon=True) for w, (uuid, _) in pairs]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not raised:
            threads[0].join(0.01)
            threads = [thread for thread in threads if thread.is_alive()] or threads
        if raised:
            raise RuntimeError(f"a worker raised {raised[0]!r}")

    def holds(self, expected):
        for worker in self.workers:
            same(worker.weights, expected)


@distributed(world_sizes=(1, 2, 3))
def test_what_is_pushed_is_what_runs(ctx):
    """Every cut; slots used again at once; the buffer gone before weights are processed; no descriptor stays."""
    model, engine = shard(ctx, mixed_stack(), STACK_UNITS), Engine(ctx)
    target, files = CheckpointEngine(engine.request), 0
    for bucket_bytes in (1, 300, 1 << 20):
        with fsdp2x.sync.connect(model, target, bucket_bytes=bucket_bytes) as sync:
            for version in range(2):
                step(model)
                report = sync.push(version=version)
                files = len(os.listdir("/proc/self/fd")) if version == 0 else files
                engine.holds(wire(model))
                for worker in engine.workers:
                    assert worker.events.pop() == "post" and len(worker.events) == report.num_buckets
                    worker.events.clear()
            dist.barrier()
            assert len(os.listdir("/proc/self/fd")) <= files + 2, "a buffer of an earlier push is open"
    assert engine.num_calls == (6 if ctx.rank == 0 else 0)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@distributed(world_sizes=(2,))
def test_names_and_layout_of_the_files(ctx, name):
    """One worker for two ranks: the other rank has none."""
    model, engine = fsdp2x.fully_shard(build(name)), Engine(ctx, 1)
    expected = {k: v if k.endswith("gate.weight") else v.bfloat16() for k, v in wire(model).items()}
    keep = {"*.gate.weight": torch.float32} if name == "qwen3_moe" else {}
    target = CheckpointEngine(engine.request if ctx.rank == 0 else None)
    with fsdp2x.sync.connect(model, target, dtype=torch.bfloat16, keep=keep, bucket_bytes=3000) as sync:
        sync.push(version=1)
        engine.holds({k: v.bfloat16() for k, v in expected.items()} if name == "qwen3" else expected)


FAILURES = {
    "load": ("load", "the worker says: KeyError"),
    "handle": ("begin", "the worker does not answer, and the engine's call has failed"),
    "load, without a word": ("load", "the worker does not answer, and the engine's call has failed"),
    "post": ("finish", "the worker does not answer, and the engine's call has failed"),
    "call": ("begin", "no worker has come to its socket, and the engine's call has failed: ValueError: no such method"),
}


@pytest.mark.parametrize("where", list(FAILURES))
@distributed(world_sizes=(2,))
def test_each_failure(ctx, where):
    """An error on every rank; workers that were told raise; the next push heals."""
    model, engine = shard(ctx, mixed_stack(), STACK_UNITS), Engine(ctx)
    phase, text = FAILURES[where]
    with fsdp2x.sync.connect(model, CheckpointEngine(engine.request), bucket_bytes=300, timeout_s=3) as sync:
        sync.push(version=0)
        names = list(wire(model))
        for worker in engine.workers[:1]:
            worker.breaks_at = where.split(",")[0]
            if where == "load":
                worker.breaks_at, worker.bad = None, names[4]
        if where == "call":
            engine.error = ValueError("no such method")
        step(model)
        with pytest.raises(SyncError, match=text) as caught:
            sync.push(version=1)
        assert (caught.value.phase, caught.value.rank, sync.is_torn) == (phase, 0, True)
        assert (caught.value.bucket is not None) == (phase == "load")
        with pytest.raises(RuntimeError, match="nothing may be generated"):
            sync.require_clean()
        engine.error = None
        sync.push(version=2)
        engine.holds(wire(model))


@distributed(world_sizes=(2,))
def test_workers_that_do_not_come(ctx):
    """The engine's call hangs: an error in time on every rank, and later pushes say why until it has ended."""
    model, gate = shard(ctx, mixed_stack(), STACK_UNITS), threading.Event()
    target = CheckpointEngine(lambda socket_paths: gate.wait(60))
    with fsdp2x.sync.connect(model, target, timeout_s=1) as sync:
        with pytest.raises(SyncError, match="no worker has come to its socket in 1 s") as caught:
            sync.push(version=0)
        assert caught.value.phase == "begin"
        with pytest.raises(SyncError, match="has not ended the call of the push before"):
            sync.push(version=1)
        gate.set()


@distributed(world_sizes=(2,))
def test_what_is_refused(ctx):
    model = shard(ctx, mixed_stack(), STACK_UNITS)
    nothing = CheckpointEngine(lambda socket_paths: None)
    with pytest.raises(NotImplementedError, match="it takes no deltas"):
        fsdp2x.sync.connect(model, nothing, deltas=True)
    with pytest.raises(NotImplementedError, match="not of meta"):
        fsdp2x.sync.connect(model, CheckpointEngine(print, device=torch.device("meta")))
    twice = CheckpointEngine(print)
    twice.introduction = lambda: ("GPU-0", f"address of rank {ctx.rank}")
    with pytest.raises(ValueError, match="2 ranks have a worker on GPU-0"):
        fsdp2x.sync.connect(model, twice)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "zmq", None)
        with pytest.raises(ValueError, match="pip install pyzmq"):
            fsdp2x.sync.connect(model, nothing)
