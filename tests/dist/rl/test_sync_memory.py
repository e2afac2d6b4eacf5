"""Measures a push: each rank's memory while it runs, and the bytes sent from shards to an engine."""

import contextlib
import mmap

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2x
import memory
from engines import Store, peer
from fsdp2x.base import collectives
from fsdp2x.base.collectives import Exchange
from fsdp2x.base.native import _C
from fsdp2x.rl.sync.receiver.engine_group import EngineGroup
from fsdp2x.sync import InProcess
from harness import distributed
from reference import params, same, shard

TRANSPORTS = ("shm", "process_group")
MIB = 1 << 20
# Each parameter is a bucket. With smaller buckets the bound would be less than a parameter of 4 MiB and the largest.
BUCKET_BYTES, LARGEST_BYTES = 2 * MIB, 12 * MIB


class Compare:
    """An engine that keeps nothing: what comes is what is expected."""

    keeps_tensors = False

    def __init__(self, expected):
        self.expected, self.names = expected, []

    def load(self, items):
        for name, tensor in items:
            assert torch.equal(tensor, self.expected[name]), name
            self.names.append(name)


@contextlib.contextmanager
def target_of(ctx, kind, engine):
    if kind == "peer":
        with peer(ctx, engine) as (target, _):
            yield target
    else:
        yield InProcess(engine.load if kind == "everywhere" or ctx.rank == 0 else None, copies=False)


def six_and_one():
    """A parameter of 12 MiB between six of 4 MiB: an odd number, so that each push begins where another one ends."""
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 3072 if i == 3 else 1024, bias=False) for i in range(7)]
    return nn.Sequential(*layers)


# Blocks below 64 KiB: requests, answers and objects that the ranks agree by, and the arenas of threads.
SLACK_BYTES = MIB // 2


@pytest.mark.parametrize("kind", ["peer", "everywhere", "one rank"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(2, 3), fresh=True)
def test_two_buckets_and_the_largest_parameter(ctx, transport, kind):
    """Resident bytes of every thread, gloo's too, and pages of the memory files that exist, over three pushes."""
    memory.return_freed_memory()
    model = six_and_one()
    expected = params(model)
    shard(ctx, model)
    engine, num_pushes = Compare(expected), 3
    options = {"names": "model", "transport": transport, "bucket_bytes": BUCKET_BYTES}
    before = set(memory.shared_files())

    def made():
        return {inode: num_bytes for inode, num_bytes in memory.shared_files().items() if inode not in before}

    with target_of(ctx, kind, engine) as target:
        with contextlib.ExitStack() as stack:

            def push():
                session = stack.enter_context(fsdp2x.sync.connect(model, target, **options))
                for version in range(num_pushes):
                    session.push(version=version)

            # Objects by which the ranks agree are small, and gloo's threads free some of them unseen.
            sizes = [size for size in memory.allocations(push) if abs(size) >= 64 << 10]
            stack.close()
            private_bytes = memory.peak_private_bytes(push)
            dist.barrier()
            shared_bytes = sum(made().values())
    receives = kind == "everywhere" or ctx.rank == 0
    assert engine.names == (list(expected) * 2 * num_pushes if receives else [])
    # A bucket of a file is whole pages, and so is the file in which nothing lies here.
    limit_bytes = 2 * BUCKET_BYTES + LARGEST_BYTES + 3 * mmap.PAGESIZE
    assert memory.peak_of(sizes) + shared_bytes <= limit_bytes
    assert private_bytes + shared_bytes <= limit_bytes + SLACK_BYTES
    if not receives:
        assert memory.peak_of(sizes) <= LARGEST_BYTES // ctx.world, "a whole tensor"
        assert private_bytes <= LARGEST_BYTES // ctx.world + SLACK_BYTES
    assert not made(), "memory outlives the session"


# ---- bytes


class Routed(nn.Module):
    """Parameters that are exchanged one by one and such that are packed, even and uneven; ``gate`` stays as it is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(512, 1026), nn.Linear(1026, 512, bias=False)
        self.gate, self.norm = nn.Linear(512, 7, bias=False), nn.LayerNorm(512)

    def wire(self, dtype):
        """Returns the engines' expected weights and their bytes: 2 per element, 4 for the gate."""
        found = {name: value if name == "gate.weight" else value.to(dtype) for name, value in params(self).items()}
        sizes = {"up.weight": 512 * 1026, "up.bias": 1026, "down.weight": 512 * 1026, "norm.weight": 512}
        return found, 2 * (sum(sizes.values()) + 512) + 4 * 7 * 512


OPTIONS = {"names": "model", "dtype": torch.bfloat16, "keep": {"gate.*": torch.float32}}
# Packed parts are as long as the longest rank's. Each parameter adds up to one row and the alignment of the next one.
PADDING_BYTES = 6 * (2 * 1026 + 4 * 512 + _C.ALIGN_BYTES)


@contextlib.contextmanager
def counting_collectives():
    """Bytes of tensors that this rank hands to others one to one, and to collectives."""
    counted = {"packed": 0, "sent": 0}
    gather = collectives.plain_all_gather

    def exchange(group, received, sent, count=None):
        parts = (part for row in sent for peer, part in enumerate(row) if part is not None and peer != group.rank())
        counted["sent"] += sum(part.nbytes for part in parts)
        return Exchange(group, received, sent, count)

    def plain_all_gather(group, output, source, count=None):
        counted["packed"] += source.nbytes
        return gather(group, output, source, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "Exchange", exchange)
        patch.setattr(collectives, "plain_all_gather", plain_all_gather)
        patch.setattr("fsdp2x.io.export.rings.Exchange", exchange)
        yield counted


@pytest.mark.parametrize("receivers", ["everywhere", "one rank"])
@pytest.mark.parametrize("bucket_bytes", [1, 16 * MIB])
@distributed(world_sizes=(2, 3))
def test_bytes_that_are_handed_to_the_process_group(ctx, bucket_bytes, receivers):
    """The cast is made at the shards: each element goes once, as it is on the wire, to each rank that has an engine."""
    model = Routed()
    expected, wire_bytes = model.wire(torch.bfloat16)
    shard(ctx, model)
    got = {}
    receives = receivers == "everywhere" or ctx.rank == 0
    target = InProcess((lambda items: got.update(items)) if receives else None)
    options = {**OPTIONS, "transport": "process_group", "bucket_bytes": bucket_bytes}
    with fsdp2x.sync.connect(model, target, **options) as sync, counting_collectives() as counted:
        report = sync.push(version=0)
    assert report.bytes_sent == wire_bytes == sum(value.nbytes for value in expected.values())
    same(got, expected if receives else {})
    everyone = [None] * ctx.world
    dist.all_gather_object(everyone, counted)
    sent, packed = (sum(of_rank[what] for of_rank in everyone) for what in ("sent", "packed"))
    limit_bytes = wire_bytes + ctx.world * PADDING_BYTES
    if receivers == "everywhere":
        # Large parameters go from each rank to each other one, small ones once into a collective.
        large_bytes = 2 * 2 * 512 * 1026
        assert (ctx.world - 1) * large_bytes <= sent <= (ctx.world - 1) * (large_bytes + ctx.world * PADDING_BYTES)
        assert wire_bytes - large_bytes <= packed <= limit_bytes - large_bytes
    else:  # all but what the receiver has itself
        assert packed == 0
        assert wire_bytes // 2 <= sent * ctx.world / (ctx.world - 1) <= limit_bytes


@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(2, 3))
def test_bytes_in_memory_files(ctx, transport):
    """All in one bucket: the pages that ranks have written to are those of the wire's bytes."""
    model = Routed()
    expected, wire_bytes = model.wire(torch.bfloat16)
    shard(ctx, model, transport="process_group")
    store, before = Store(), set(memory.shared_files())
    with peer(ctx, store) as (target, served):
        with fsdp2x.sync.connect(model, target, transport=transport, **OPTIONS) as sync:
            report = sync.push(version=0)
            dist.barrier()
            written = sum(size for inode, size in memory.shared_files().items() if inode not in before)
            dist.barrier()
        assert (report.num_buckets, report.bytes_sent) == (1, wire_bytes)
        if served:
            same(store.weights, expected)
            # The pages: what rounds the buckets up, and what ranks write of themselves.
            assert wire_bytes <= written <= wire_bytes + PADDING_BYTES + 2 * mmap.PAGESIZE


@distributed(world_sizes=(2,))
def test_bytes_that_are_broadcast(ctx):
    """Each bucket once for all engines, from one rank, in a group that is apart from the trainers' own."""
    model = Routed()
    expected, wire_bytes = model.wire(torch.bfloat16)
    shard(ctx, model)
    stores, default, sizes = [Store(), Store()], dist.group.WORLD, []
    with peer(ctx, *stores, over="group") as (target, served), pytest.MonkeyPatch.context() as patch:
        with fsdp2x.sync.connect(model, target, bucket_bytes=600_000, **OPTIONS) as sync:
            sync.push(version=0)
            broadcast = EngineGroup.broadcast_bucket

            def count(group, data, *limits):
                sizes.append(len(data) if group is target._group else 0)
                broadcast(group, data, *limits)

            patch.setattr(EngineGroup, "broadcast_bucket", count)
            report = sync.push(version=1)
        sizes = [size for size in sizes if size]
        assert report.num_buckets > 1 and len(sizes) == (report.num_buckets if served else 0)
        assert not served or wire_bytes <= sum(sizes) <= wire_bytes + len(expected) * _C.ALIGN_BYTES
        for one, store in zip(served or (), stores, strict=bool(served)):
            assert one.receiver.status["version"] == 1
            same(store.weights, expected)
    assert dist.group.WORLD is default
