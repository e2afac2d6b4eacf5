"""Collectives by reading the peers' memory: ranks whose memory the host shares, and the twins of the kernels."""

import contextlib
import copy
import dataclasses
import functools
import mmap
import os
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2x
import streams
from fsdp2x.runtime import torch_private
from fsdp2x.runtime.native import _C
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import grads, mean_of_ranks, only_fsdp2x, params, same, shard
from streams import WIDTH, Experts, record_of_steps, step, wide


def share_by_host(group: dist.ProcessGroup, log: list, num_bytes: int):
    """What `torch_private.peer_sharer` gives on devices: a memory file that every rank maps, gone with its mappings."""
    file = os.memfd_create("fsdp2x-test")
    try:
        os.ftruncate(file, num_bytes)
        files: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(files, (os.getpid(), file, num_bytes), group=group)
        assert {size for _, _, size in files} == {num_bytes}, "the ranks allocate in different orders"
        views = []
        for pid, number, _ in files:
            peer = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
            views.append(torch.frombuffer(mmap.mmap(peer, num_bytes), dtype=torch.uint8))
            os.close(peer)
        dist.barrier(group=group)
    finally:
        os.close(file)
    log.append(num_bytes)
    return views[dist.get_rank(group)], [view.data_ptr() for view in views], views


def collectives(group, log, timeout=20.0):
    share = functools.partial(share_by_host, group, log)
    return _C.PeerCollectives(
        dist.get_rank(group), dist.get_process_group_ranks(group), share, timeout_seconds=timeout, with_twins=True
    )


class Truant:
    """Collectives of a rank that leaves out one of its calls."""

    def __init__(self, peers) -> None:
        self._peers = peers
        self.num_calls = 0
        self.left_out = 0  # the number of the call; 0: none
        self.allocate, self.check = peers.allocate, peers.check
        for name in ("all_gather", "all_gather_group", "reduce_scatter"):
            setattr(self, name, functools.partial(self._call, name))

    def _call(self, name, *args):
        self.num_calls += 1
        return None if self.num_calls == self.left_out else getattr(self._peers, name)(*args)


def install(timeout=20.0, wrap=lambda peers: peers):
    """The accelerators' transport with peers' memory; returns its recorder and the sizes that were shared."""
    recorder, shared = streams.install(), []
    make = lambda group, device: wrap(collectives(group, shared, timeout))  # noqa: E731
    mock.patch.object(streams.transport, "peer_collectives", make).start()
    return recorder, shared


def with_peers(model):
    model._get_fsdp_state().comm_memory = "peers"  # as the setter does on a CUDA mesh
    return model


@contextlib.contextmanager
def no_collectives_but_ours():
    """torch.distributed must not be asked to move parameters or gradients."""
    refused = mock.Mock(side_effect=AssertionError("a collective of torch.distributed"))
    names = [n for n in dir(dist) if n.startswith(("all_gather_into", "all_gather_single", "reduce_scatter"))]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, refused))
        stack.enter_context(mock.patch.object(torch_private, "all_gather_group", refused))
        yield


POLICIES = {
    "float32": None,
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bfloat16 reduced": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "float16 reduced": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16),
}


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize(
    ("policy", "model"),
    [
        ("float32", "wide"),
        ("float32", "odd"),
        ("bfloat16", "odd"),
        ("bfloat16 reduced", "odd"),
        ("float16 reduced", "wide"),
    ],
)
@pytest.mark.each_value
def test_training_is_that_over_the_process_group(ctx, policy, model):
    """Widths of 3, 6 and 7 rows: short and empty shards, and parts that start anywhere."""
    only_fsdp2x(ctx)
    recorder, shared = install()
    reference = Stack() if model == "odd" else wide()
    width = 6 if model == "odd" else WIDTH
    options = {} if POLICIES[policy] is None else {"mp_policy": POLICIES[policy]}
    ours = with_peers(shard(ctx, copy.deepcopy(reference), STACK_UNITS, transport="streams", **options))
    theirs = shard(ctx, reference, STACK_UNITS, transport="process_group", **options)
    results = []
    for one, guard in ((ours, no_collectives_but_ours), (theirs, contextlib.nullcontext)):
        optimizer = fsdp2x.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        seen = []
        for number in range(4):
            with guard():
                loss = one(inputs(ctx.rank, number, width=width)).float().square().mean()
                loss.backward()
            seen += [loss.detach(), *[param.grad.to_local().clone() for param in one.parameters()]]
            optimizer.step()
            optimizer.zero_grad()
        results.append((seen, params(one)))
    # Two ranks have one sum; three are added in rank order here, in the ring's there. What has 16 bits on the wire is
    # rounded once here, and after every addition there.
    close = {"rtol": 1e-5, "atol": 1e-6} if "reduced" not in policy else {"rtol": 5e-2, "atol": 5e-3}
    same(results[0], results[1], "losses, gradients, parameters", **close)
    if ctx.world == 2 and policy == "float32":
        same(results[0], results[1], "bits")
    assert len(shared) > 3 and streams.races(recorder.entries) == []


@distributed(world_sizes=(2,))
def test_nothing_is_shared_in_a_steady_step(ctx):
    only_fsdp2x(ctx)
    recorder, shared = install()
    model = with_peers(shard(ctx, wide(), STACK_UNITS, transport="streams"))
    record_of_steps(ctx, recorder, model, num=1)
    before = list(shared)
    entries = record_of_steps(ctx, recorder, model)
    assert shared == before
    assert streams.races(entries) == []
    lent = model._get_fsdp_state().root.loans()
    assert len(lent) == len(shared)


@distributed(world_sizes=(2, 3))
def test_accumulation_and_missing_gradients(ctx):
    """Without sync, then with it; an expert of three has a gradient on each rank."""
    only_fsdp2x(ctx)
    install()
    reference = wide()
    model = with_peers(shard(ctx, copy.deepcopy(reference), STACK_UNITS, transport="streams"))
    for number in range(3):
        model.set_requires_gradient_sync(number == 2)
        step(model, ctx, number)

    def all_losses(m, rank):
        return sum(m(inputs(rank, number, width=WIDTH)).square().mean() for number in range(3))

    mean_of_ranks(reference, all_losses, ctx.world)
    same(grads(model), grads(reference), "accumulated", rtol=1e-4, atol=1e-6)

    reference = Experts()
    model = with_peers(shard(ctx, copy.deepcopy(reference), transport="streams"))

    def loss(m, rank):
        return m(inputs(rank, width=WIDTH), rank).square().mean()

    loss(model, ctx.rank).backward()
    mean_of_ranks(reference, loss, ctx.world)
    same(grads(model), grads(reference), "experts", rtol=1e-5, atol=1e-6)
    assert [grad is None for grad in grads(model).values()] == [i // 2 >= ctx.world for i in range(6)]


@distributed(world_sizes=(4,))
def test_replicas(ctx):
    """Two groups of two: each has memory of its own, and the sum over the replicas stays torch's."""
    only_fsdp2x(ctx)
    install()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reference = wide()
    model = with_peers(shard(ctx, copy.deepcopy(reference), STACK_UNITS, mesh=mesh, transport="streams"))
    step(model, ctx)
    mean_of_ranks(reference, lambda m, rank: m(inputs(rank, 0, width=WIDTH)).square().mean(), ctx.world)
    same(grads(model), grads(reference), "gradients", rtol=1e-4, atol=1e-6)


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_sums_are_in_rank_order_and_rounded_once(ctx, dtype):
    only_fsdp2x(ctx)
    peers = collectives(dist.group.WORLD, [])
    wide_type = torch.float64 if dtype is torch.float64 else torch.float32
    for numel in (1, 7, 4099):
        every = []
        for rank in range(ctx.world):
            torch.manual_seed(10 * numel + rank)
            every.append(torch.randn(ctx.world, numel).to(dtype))
        memory = peers.allocate(ctx.world * numel * dtype.itemsize).view(dtype)
        memory.copy_(every[ctx.rank].flatten())
        expected = every[0][ctx.rank].to(wide_type)
        for rank in range(1, ctx.world):
            expected = expected + every[rank][ctx.rank].to(wide_type)
        output = torch.empty(numel, dtype=dtype)
        peers.reduce_scatter(output, memory, False)
        assert torch.equal(output, expected.to(dtype))
        peers.reduce_scatter(output, memory, True)
        assert torch.equal(output, (expected / ctx.world).to(dtype))
        part = memory.view(torch.uint8).view(ctx.world, -1)[ctx.rank]
        peers.all_gather(memory.view(torch.uint8), part)
        own = torch.stack([every[rank][rank] for rank in range(ctx.world)])
        assert torch.equal(memory.view(ctx.world, numel), own)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("mistake", ["a rank stays away", "other memory"])
def test_a_peer_that_does_not_come_is_an_error(ctx, mistake):
    """Nobody hangs, and nobody takes what is not valid: not even who comes late, when the others have given up."""
    only_fsdp2x(ctx)
    peers = collectives(dist.group.WORLD, [], timeout=1.0)
    why = f"rank {ctx.rank} waited 1 s for rank {1 - ctx.rank} in a collective"
    memories = [peers.allocate(64 * ctx.world) for _ in range(2)]
    chosen = memories[ctx.rank if mistake == "other memory" else 0]
    own = chosen.view(ctx.world, -1)[ctx.rank]
    if ctx.rank == 0 or mistake == "other memory":
        peers.all_gather(chosen, own)
        with pytest.raises(RuntimeError, match=why):
            peers.check()
        with pytest.raises(RuntimeError, match=why):
            peers.all_gather(chosen, own)
    dist.barrier()
    if ctx.rank == 1 and mistake == "a rank stays away":
        peers.all_gather(chosen, own)
        with pytest.raises(RuntimeError, match=why):
            peers.check()


@distributed(world_sizes=(3,))
@pytest.mark.parametrize("moment", [pytest.param("the last gather", marks=pytest.mark.full), "the last reduction"])
def test_the_step_in_which_a_peer_does_not_come_raises(ctx, moment):
    """At its last collective: no other one follows in that step which could tell."""
    only_fsdp2x(ctx)
    made: list[Truant] = []
    recorder, _ = install(timeout=2.0, wrap=lambda peers: made.append(Truant(peers)) or made[-1])
    model = with_peers(shard(ctx, wide(), STACK_UNITS, transport="streams"))

    def one_step():
        if moment == "the last reduction":
            return step(model, ctx)
        with torch.no_grad():
            return model(inputs(ctx.rank, width=WIDTH))

    one_step()
    (peers,) = made
    before = peers.num_calls
    recorder.clear()
    dist.barrier()
    one_step()
    num_calls = peers.num_calls - before
    # What the host finds then is there: it waits for the lane of the collective.
    lane = "gather" if moment == "the last gather" else "reduce"
    operations = [(entry[0], entry[1]) for entry in recorder.entries]
    last = max(i for i, (operation, on) in enumerate(operations) if on == lane and operation not in streams.MARKS)
    waits = [entry for entry in recorder.entries[last:] if entry[:2] == ("wait", "host")]
    assert any(entry[2].split()[0] == lane for entry in waits)
    last_call = peers.num_calls + num_calls
    dist.barrier()
    if ctx.rank == 1:
        peers.left_out = last_call
        one_step()
    else:
        with pytest.raises(RuntimeError, match=f"rank {ctx.rank} waited 2 s for rank 1 in a collective"):
            one_step()
    assert peers.num_calls == last_call
    dist.barrier()


@distributed(world_sizes=(2,))
def test_wrong_arguments_are_errors(ctx):
    only_fsdp2x(ctx)
    peers = collectives(dist.group.WORLD, [])
    memory = peers.allocate(64 * ctx.world)
    elsewhere = torch.zeros(64 * ctx.world, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="part must lie in its place"):
        peers.all_gather(memory, memory[64 * (1 - ctx.rank) :][:64])
    with pytest.raises(RuntimeError, match="does not lie in memory that the peers can read"):
        peers.all_gather(elsewhere, elsewhere.view(ctx.world, -1)[ctx.rank])
    with pytest.raises(RuntimeError, match="expected one part of 2"):
        peers.reduce_scatter(torch.empty(3), memory.view(torch.float32), False)
    with pytest.raises(RuntimeError, match="serve 1 to 72 ranks"):
        _C.PeerCollectives(0, list(range(73)), lambda num_bytes: None, timeout_seconds=1.0, with_twins=True)
    bad = _C.PeerCollectives(0, [0, 1], lambda num_bytes: (torch.zeros(num_bytes), [1], None), 1.0, with_twins=True)
    with pytest.raises(RuntimeError, match="on 1 ranks, expected"):
        bad.allocate(100)


def test_memory_is_freed_with_its_tensor():
    freed = []

    class Mapping:
        def __del__(self):
            freed.append("freed")

    def share(num_bytes):
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        return memory, [memory.data_ptr()], Mapping()

    peers = _C.PeerCollectives(0, [0], share, timeout_seconds=1.0, with_twins=True)
    memory = peers.allocate(1000)
    part = memory[:8]
    del memory
    assert freed == []
    del part
    assert freed == ["freed"]


@distributed(world_sizes=(2,))
def test_the_setter(ctx):
    """On a CPU there is no such memory; where there is, the choice is the whole model's."""
    only_fsdp2x(ctx)
    install()
    model = shard(ctx, wide(), STACK_UNITS, transport="streams")
    with pytest.raises(NotImplementedError, match="symmetric memory needs CUDA devices"):
        model.set_symm_mem_for_comm("CUDA")
    step(model, ctx)
    model.zero_grad()
    state = model._get_fsdp_state()
    state.ranks = dataclasses.replace(state.ranks, device=torch.device("cuda", 0))
    with mock.patch.object(_C, "can_run_kernels", lambda device: False):
        for is_built, why in ((False, "built without nvcc"), (True, "its driver cannot run them")):
            with mock.patch.object(_C, "has_device_kernels", lambda is_built=is_built: is_built):
                with pytest.raises(NotImplementedError, match=f"on cuda:0, and .*{why}"):
                    model.set_symm_mem_for_comm("CUDA")
    state.ranks = dataclasses.replace(state.ranks, device=torch.device("cpu"))
    assert state.comm_memory is None


@distributed(world_sizes=(2,))
def test_what_torch_is_asked_to_share(ctx):
    """Memory of torch's CUDA backend is zero on the device before peers learn where it lies."""
    import torch.distributed._symmetric_memory as symmetric

    calls = []

    def empty(num_bytes, dtype, device):
        calls.append(("empty", num_bytes, dtype, device))
        return torch.full((num_bytes,), 7, dtype=dtype)

    def rendezvous(memory, group):
        calls.append(("rendezvous", int(memory.sum()), group))
        return types.SimpleNamespace(buffer_ptrs=(11, 12))

    patches = [
        mock.patch.object(symmetric, "set_backend", lambda name: calls.append(name)),
        mock.patch.object(symmetric, "empty", empty),
        mock.patch.object(symmetric, "rendezvous", rendezvous),
        mock.patch.object(torch.cuda, "synchronize", lambda device: calls.append(("synchronize", device))),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        memory, addresses, mapping = torch_private.peer_sharer(dist.group.WORLD, "device")(100)
    assert memory.numel() == 100 and addresses == [11, 12] and mapping.buffer_ptrs == (11, 12)
    assert calls == [
        "CUDA",
        ("empty", 100, torch.uint8, "device"),
        ("synchronize", "device"),
        ("rendezvous", 0, dist.group.WORLD.group_name),
    ]
