"""Buckets sent by broadcast: one trainer rank and the engines have a separate process group.

Other files test the behavior that all routes share, through `OVER` in `engines.py`. This file tests the rest.
"""

import contextlib
import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from test_sync_deaths import digests, engines, held_by
from test_sync_failures import make_model

import fsdp2x
from engines import OVER, Store, peer, push_when_noticed
from fsdp2x.rl.sync.receiver import engine as engine_file
from fsdp2x.rl.sync.receiver.engine import WireError, send_frame
from fsdp2x.rl.sync.receiver.engine_group import BroadcastGroup, common_host
from fsdp2x.rl.sync.receiver.engine_tcp import TcpReceiver
from fsdp2x.sync import Peer, SyncError
from harness import dist_run, distributed
from reference import same

GROUP = OVER["group"]


def push_to_three(ctx, addresses, pids):
    """Pushes to engine processes: all hold every version, and every rank reports a stopped engine and drops it."""
    model, expected = make_model(ctx)
    default = dist.group.WORLD
    broadcasts = []
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        broadcast = BroadcastGroup.broadcast

        def count(self, data, *rest):
            broadcasts.append(len(data))
            broadcast(self, data, *rest)

        patch.setattr(BroadcastGroup, "broadcast", count)
        sync = stack.enter_context(fsdp2x.sync.connect(model, Peer(addresses, **GROUP), bucket_bytes=300, timeout_s=2))
        sync.push(version=1)
        if ctx.rank == 0:
            num_bytes = sum(tensor.nbytes for tensor in expected.values())
            meeting, *buckets = broadcasts
            assert meeting == 1 and len(buckets) > 2 and num_bytes <= sum(buckets) < 2 * num_bytes
        assert ctx.rank == 0 or not broadcasts
        dist.barrier()
        if ctx.rank == 0:
            os.kill(pids[1], signal.SIGSTOP)
        dist.barrier()
        began = time.monotonic()
        with pytest.raises(SyncError, match="rank 0 in phase '(begin|load)'.*hangs or is busy"):
            sync.push(version=2)
        assert time.monotonic() - began < 30 and sync.is_torn
        if ctx.rank == 0:
            os.kill(pids[1], signal.SIGCONT)
        dist.barrier()
        push_when_noticed(sync, 3)
    assert dist.group.WORLD is default
    return digests(expected)


def test_engines_of_their_own():
    with engines("group", 3) as found:
        addresses, pids = [engine.address for engine in found], [engine.pid for engine in found]
        for outcome in dist_run(push_to_three, 2, addresses, pids, timeout=120):
            for held in map(held_by, found):
                assert (held["state"], held["version"], held["digests"]) == ("clean", 3, outcome.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@distributed(world_sizes=(2,))
def test_a_backend_that_is_not_there(ctx):
    """By value, before anything is torn, and the engine is free for another group."""
    model, expected = make_model(ctx)
    sink = Store()
    with peer(ctx, sink, over="group") as (target, served):
        other = Peer(target._addresses, secret=GROUP["secret"], group="nccl")
        with fsdp2x.sync.connect(model, other, timeout_s=60) as sync:
            with pytest.raises(SyncError, match="rank 0 in phase 'begin'.*no process group of 'nccl' is possible here"):
                sync.push(version=1)
        assert served is None or served.receiver.status["state"] == "initial"
        with fsdp2x.sync.connect(model, target) as sync:
            sync.push(version=7)
        if served is not None:
            assert served.receiver.status["version"] == 7
            same(sink.weights, expected)


def no_sockets(self, body, files):
    raise OSError("out of sockets")


def reset(connection, kind, body, deadline, files=()):
    if kind in ("join", "bucket"):
        raise WireError("reset by peer")
    send_frame(connection, kind, body, deadline, files)


LEAVE = {
    "finds no way": (TcpReceiver, "_on_invite", no_sockets, "begin"),
    "refuses": (TcpReceiver, "_on_join", no_sockets, "begin"),
    "cannot be asked": (engine_file, "send_frame", reset, "begin"),
    "fails in a broadcast": (BroadcastGroup, "broadcast", no_sockets, "load"),
}


@pytest.mark.parametrize("way", LEAVE)
@distributed(world_sizes=(2,))
def test_a_member_that_leaves_the_others_alone(ctx, way):
    """The first of two engines leaves. The error names only that one, and no rank waits until the timeout."""
    model, expected = make_model(ctx)
    sinks = [Store(), Store()]
    with peer(ctx, *sinks, over="group") as (target, served):
        with fsdp2x.sync.connect(model, target, timeout_s=60) as sync:
            first, second = target._addresses
            place, name, act, phase = LEAVE[way]
            done = getattr(place, name)
            sync.push(version=0) if phase == "load" else None

            def leave(self, *rest):
                is_first = {
                    "finds no way": lambda: self is served[0].receiver,
                    "refuses": lambda: self is served[0].receiver,
                    "cannot be asked": lambda: self is target._connections.get(first),
                    "fails in a broadcast": lambda: served and self is served[0].receiver._group,
                }[way]()
                return (act if is_first else done)(self, *rest)

            began = time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(place, name, leave)
                with pytest.raises(SyncError, match=f"rank 0 in phase '{phase}'") as caught:
                    sync.push(version=1)
            assert time.monotonic() - began < 30
            assert repr(first) in str(caught.value) and repr(second) not in str(caught.value)
            push_when_noticed(sync, 2)
        for one, sink in zip(served or (), sinks, strict=bool(served)):
            assert one.receiver.status["version"] == 2
            same(sink.weights, expected)


def test_addresses_that_do_not_go_together():
    assert common_host(["10.0.0.1", "10.0.0.1"]) == "10.0.0.1" and common_host(["::1"]) == "::1"
    assert common_host(["10.0.0.1", "10.1.0.1"]) == "", "the store listens at all of them"
    with pytest.raises(WireError, match=r"know this host as \['10.0.0.1', '127.0.0.1'\] cannot reach each other"):
        common_host(["127.0.0.1", "10.0.0.1"])


@distributed(world_sizes=(3,))
def test_groups_that_torch_makes(ctx):
    """Engines that call torch's own functions, as SGLang's do, meet the trainer's rank, which calls none of them."""
    invitation = [None]
    deadline = time.monotonic() + 30
    if ctx.rank == 0:
        group, invitation[0] = BroadcastGroup.opened("gloo", 2, "127.0.0.1", 30)
    dist.broadcast_object_list(invitation)
    name, size = invitation[0]["name"], invitation[0]["size"]
    data = torch.arange(1000).to(torch.uint8)
    if ctx.rank == 0:
        group.join(True, deadline, lambda: False)
        group.broadcast(data, deadline, lambda: False)
        group.close()
    else:
        limit = datetime.timedelta(seconds=30)
        c10d = dist.distributed_c10d
        store, rank, size = next(
            c10d.rendezvous(f"tcp://127.0.0.1:{invitation[0]['port']}", ctx.rank, size, timeout=limit)
        )
        made, _ = c10d._new_process_group_helper(
            size, rank, [], "gloo", dist.PrefixStore(name, store), group_name=name, timeout=limit
        )
        c10d._world.pg_group_ranks[made] = {index: index for index in range(size)}
        got = torch.zeros_like(data)
        dist.broadcast(got, src=0, group=made)
        dist.destroy_process_group(made)
        assert torch.equal(got, data)
    dist.barrier()
