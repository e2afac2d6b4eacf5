"""Pushes into SGLang: its sessions and its traps, with one worker and with several, before sessions and with them."""

import contextlib
import datetime
import time

import pytest
import torch
import torch.distributed as dist

import device_handles
import fsdp2x
from engines import step, wire
from fsdp2x.rl.sync.receiver.engine_group import BroadcastGroup, open_store
from fsdp2x.sync import Sglang, SyncError
from harness import distributed
from models import STACK_UNITS, mixed_stack
from reference import same, shard
from sglang_engine import Server, serving


@contextlib.contextmanager
def engines(ctx, shapes, num=1, rank=0, **options):
    """(target, the engines on the rank that talks to them, none elsewhere)."""
    said = {name: options.pop(name) for name in ("pause", "group") if name in options}
    with contextlib.ExitStack() as stack:
        stack.enter_context(device_handles.installed())
        servers, addresses = [], [None]
        if ctx.rank == rank:
            servers = [Server(shapes, **options) for _ in range(num)]
            addresses = [[stack.enter_context(serving(server)) for server in servers]]
        dist.broadcast_object_list(addresses, src=rank)
        yield Sglang(addresses[0], rank=rank, **said), servers
        dist.barrier()


def stack_model(ctx):
    model = shard(ctx, mixed_stack(), STACK_UNITS)
    return model, {name: value.shape for name, value in wire(model).items()}


def holds(servers, expected):
    for server in servers:
        for weights in server.weights:
            same(weights, expected)


PUSH = ["server_info", "pause_generation", "begin_weight_update", "update_weights_from_tensor", "end_weight_update"]
AFTER = ["flush_cache", "update_weight_version", "continue_generation"]


@pytest.mark.parametrize("has_sessions", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2])
@distributed(world_sizes=(1, 2, 3))
def test_what_is_pushed_is_what_runs(ctx, num_workers, has_sessions):
    """Several dtypes in a bucket, at offsets that they divide; copies that run after the answers; every cut."""
    model, shapes = stack_model(ctx)
    options = {"num_workers": num_workers, "has_sessions": has_sessions}
    with engines(ctx, shapes, 2, rank=ctx.world - 1, **options) as (target, servers):
        for number, bucket_bytes in enumerate((1, 300, 1 << 20)):
            with fsdp2x.sync.connect(model, target, bucket_bytes=bucket_bytes) as sync:
                step(model)
                report = sync.push(version=number)
                holds(servers, wire(model))
                for server in servers:
                    assert server.generate() == (str(number), str(number))
                    assert server.num_post_loads == (number + 1 if has_sessions else 0)
                    assert server.flags == [(False, None)] * report.num_buckets, "a bucket flushes or labels"
                    server.flags.clear()


@pytest.mark.parametrize("has_sessions", [True, pytest.param(False, marks=pytest.mark.full)])
@distributed(world_sizes=(2,))
def test_buckets_that_are_broadcast(ctx, has_sessions):
    """Two servers of two workers, and a group for each push."""
    model, shapes = stack_model(ctx)
    options = {"num_workers": 2, "has_sessions": has_sessions}
    with engines(ctx, shapes, 2, group="gloo", **options) as (target, servers):
        with fsdp2x.sync.connect(model, target, bucket_bytes=300, timeout_s=20) as sync:
            for version in range(2):
                step(model)
                report = sync.push(version=version)
                holds(servers, wire(model))
                for server in servers:
                    assert server.generate() == (str(version), str(version))
                    assert server.flags == [(False, None)] * report.num_buckets, "a bucket flushes or labels"
                    server.flags.clear()
                    assert not server.groups and "update_weights_from_tensor" not in server.events
            # A server that was started anew knows no group of the pushes before.
            for server in servers[:1]:
                server.__init__(shapes, **options)
            sync.push(version=2)
            holds(servers, wire(model))


GROUP_ROUTES = {"init_weights_update_group": "begin", "update_weights_from_distributed": "load"}


@pytest.mark.parametrize("route", GROUP_ROUTES)
@distributed(world_sizes=(2,))
def test_a_broadcast_that_a_server_refuses(ctx, route):
    """One of two servers refuses it. No rank waits for it until the timeout, and the next push fixes both."""
    model, shapes = stack_model(ctx)
    with engines(ctx, shapes, 2, group="gloo") as (target, servers):
        with fsdp2x.sync.connect(model, target, bucket_bytes=300, timeout_s=2) as sync:
            for server in servers[1:]:
                server.broken[route] = "out of order"
            began = time.monotonic()
            with pytest.raises(SyncError, match=f"answers /{route} with 400.*out of order") as caught:
                sync.push(version=1)
            assert time.monotonic() - began < 25 and caught.value.phase == GROUP_ROUTES[route]
            for server in servers:
                assert server.mode is not None and not server.groups, "it generates, or a group is left"
            sync.push(version=2)
            holds(servers, wire(model))
            assert [server.generate() for server in servers] == [("2", "2")] * len(servers)


@distributed(world_sizes=(3,))
def test_groups_that_torch_makes(ctx):
    """Engines that call torch's own functions, as SGLang's do, meet the trainer's rank, which calls none of them."""
    port, name, data = [None], "update", torch.arange(1000).to(torch.uint8)
    if ctx.rank == 0:
        store = open_store("127.0.0.1", 0)
        port = [store.port]
    dist.broadcast_object_list(port)
    if ctx.rank == 0:
        group = BroadcastGroup({"name": name, "size": 3, "backend": "gloo"}, store, "127.0.0.1")
        group.join(0, time.monotonic() + 30, lambda: False)
        group.broadcast(data, time.monotonic() + 30)
        group.close()
    else:
        limit, c10d = datetime.timedelta(seconds=30), dist.distributed_c10d
        store, rank, size = next(c10d.rendezvous(f"tcp://127.0.0.1:{port[0]}", ctx.rank, 3, timeout=limit))
        made, _ = c10d._new_process_group_helper(
            size, rank, [], "gloo", dist.PrefixStore(name, store), group_name=name, timeout=limit
        )
        c10d._world.pg_group_ranks[made] = {index: index for index in range(size)}
        got = torch.zeros_like(data)
        dist.broadcast(got, src=0, group=made)
        dist.destroy_process_group(made)
        assert torch.equal(got, data)
    dist.barrier()


@distributed(world_sizes=(2,))
def test_buckets_in_memory_of_the_gpu(ctx):
    """Every worker is sent a handle of its own; buckets are there until the copies ran, and go after the push."""
    model, shapes = stack_model(ctx)
    rebuilding = device_handles.rebuilding
    with engines(ctx, shapes, 2, num_workers=2) as (target, servers):
        with fsdp2x.sync.connect(model, target, bucket_bytes=300) as sync:
            for version in range(2):
                rebuilding.num_readers = 0
                report = sync.push(version=version)
                holds(servers, wire(model))
                assert rebuilding.num_readers == 4 * report.num_buckets * (ctx.rank == 0)
                assert rebuilding.num_open() == 0, "a bucket outlives its push"
            for server in servers[:1]:
                server.broken["end_weight_update"] = "out of order"
            with pytest.raises(SyncError, match="out of order"):
                sync.push(version=2)
            assert rebuilding.num_open() == 0
            sync.push(version=3)
            holds(servers, wire(model))
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(serving(Server(shapes)))] if ctx.rank == 0 else [None]
        dist.broadcast_object_list(addresses)
        with fsdp2x.sync.connect(model, Sglang(addresses[0])) as sync:
            with pytest.raises(SyncError, match='this rank gathers weights on the CPU. Use .*group="gloo" of Sglang'):
                sync.push(version=0)


@distributed(world_sizes=(2,))
def test_the_order_of_a_push_to_one_that_sleeps(ctx):
    model, shapes = stack_model(ctx)
    with engines(ctx, shapes) as (target, servers), fsdp2x.sync.connect(model, target) as sync:
        sync.push(version=0)
        for server in servers:
            assert server.events == PUSH + AFTER
            server.generate(keeps=True)
            server.events.clear()
        target.sleep()
        if servers:
            assert servers[0].asleep == {"weights", "kv_cache"}
            with pytest.raises(RuntimeError, match="it is already asleep"):
                target.sleep()
        sync.push(version=1)
        holds(servers, wire(model))
        wake = "resume_memory_occupation"
        slept = ["pause_generation", "flush_cache", "release_memory_occupation"]
        for server in servers:
            assert server.events == [*slept, *PUSH[:2], wake, *PUSH[2:], wake, *AFTER]
            assert server.generate() == ("1", "1")


@pytest.mark.parametrize("pause", ["retract", "abort"])
@distributed(world_sizes=(2,))
def test_no_cache_outlives_its_weights(ctx, pause):
    model, shapes = stack_model(ctx)
    with engines(ctx, shapes, pause=pause) as (target, servers), fsdp2x.sync.connect(model, target) as sync:
        sync.push(version=0)
        for server in servers:
            assert server.generate(keeps=True) == ("0", "0")
        dist.barrier()
        sync.push(version=1)
        for server in servers:
            assert server.generate() == ("1", "1")
            assert len(server.running) == (pause == "retract")


@distributed(world_sizes=(2,))
def test_a_server_that_dies_in_a_bucket(ctx):
    """An error in a loader ends SGLang: a push to another server at the same address heals."""
    model, shapes = stack_model(ctx)
    with engines(ctx, shapes) as (target, servers), fsdp2x.sync.connect(model, target, bucket_bytes=300) as sync:
        sync.push(version=0)
        for server in servers:
            server.bad = "blocks.1.down.weight" if "blocks.1.down.weight" in shapes else sorted(shapes)[4]
        with pytest.raises(SyncError, match="does not answer /update_weights_from_tensor") as caught:
            sync.push(version=1)
        assert caught.value.phase == "load" and caught.value.bucket > 0
        with pytest.raises(SyncError, match="does not answer /server_info"):
            sync.push(version=2)
        for server in servers:
            server.__init__(shapes)
        sync.push(version=3)
        holds(servers, wire(model))


@distributed(world_sizes=(2,))
def test_a_session_that_a_dead_trainer_left(ctx):
    model, shapes = stack_model(ctx)
    with engines(ctx, shapes) as (target, servers), fsdp2x.sync.connect(model, target) as sync:
        for server in servers:
            server.is_open, server.mode = True, "retract"
        sync.push(version=0)
        holds(servers, wire(model))


@distributed(world_sizes=(2,))
def test_what_is_refused(ctx):
    model, shapes = stack_model(ctx)
    with pytest.raises(ValueError, match="addresses such as"):
        Sglang("localhost")
    with pytest.raises(ValueError, match="pause must be 'retract' or 'abort', got 'in_place'"):
        Sglang("http://x", pause="in_place")
    with pytest.raises(ValueError, match="group must be 'gloo', 'nccl' or None, got 'mpi'"):
        Sglang("http://x", group="mpi")
    with pytest.raises(NotImplementedError, match="SGLang loads full tensors"):
        fsdp2x.sync.connect(model, Sglang("http://x"), deltas=True)
    with engines(ctx, shapes, num_replicas=2) as (target, servers), fsdp2x.sync.connect(model, target) as sync:
        with pytest.raises(SyncError, match="has 2 data-parallel replicas") as caught:
            sync.push(version=0)
        assert caught.value.phase == "begin"
        assert all(server.mode is None for server in servers), "a server that was refused is paused"
    with engines(ctx, shapes, group="gloo") as (target, servers), fsdp2x.sync.connect(model, target) as sync:
        for server in servers:
            server.on_server_info = lambda body: {"tp_size": 1, "pp_size": 2}
        with pytest.raises(SyncError, match="has 2 pipeline stages, but numbers the workers of a group by"):
            sync.push(version=0)
    with fsdp2x.sync.connect(model, Sglang("http://127.0.0.1:9"), timeout_s=5) as sync:
        with pytest.raises(SyncError, match="does not answer /server_info"):
            sync.push(version=0)
