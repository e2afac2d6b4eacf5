"""Pushes into vLLM: its orders and its traps, as a server and as an `LLM`, with one worker and with two."""

import contextlib
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn

import device_handles
import fsdp2x
from engines import step
from fsdp2x.sync import SyncError, Vllm
from harness import distributed
from reference import same, shard
from vllm_engine import Core, Llm, installed, serving


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(8, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 4, bias=False) for _ in range(2))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))


def make_model(ctx):
    torch.manual_seed(0)
    return shard(ctx, Policy())


@contextlib.contextmanager
def engine(ctx, way, world=1, shapes=None, **options):
    """(target, the engine on rank 0, None elsewhere).

    "far": a server whose workers are on another host; "one gpu": that read buckets in memory of the trainer's GPU.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(installed())
        if way == "far":
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr("fsdp2x.sync.vllm_worker.place_of_process", lambda: ["elsewhere", ""])
        if way == "one gpu":
            stack.enter_context(device_handles.installed())
            options["memory"] = "device"
        core, given = None, [None]
        if ctx.rank == 0:
            core = Core(world, shapes=shapes)
            stack.callback(core.stop)
            given = [Llm(core)] if way == "llm" else [stack.enter_context(serving(core))]
        if way != "llm":
            dist.broadcast_object_list(given)
        yield Vllm(given[0], **options), core
        dist.barrier()


def holds(model, core, but=()):
    """Every worker runs with its part of the model's weights."""
    full = dict(fsdp2x.full_tensors(model))
    for worker in core.workers if core is not None else ():
        expected = {}
        for name, tensor in full.items():
            is_cut = name.split(".")[-2] in "qkv"
            expected[name] = tensor.chunk(len(core.workers))[worker.model.rank] if is_cut else tensor
            if name == "embed.weight" and worker.model.rank > 0:
                expected[name] = tensor[:0]
        values = worker.model.values()
        same(
            {n: values[n] for n in sorted(values) if n not in but},
            {n: expected[n] for n in sorted(expected) if n not in but},
        )


RECEIVE, LISTEN = "fsdp2x_receive", "fsdp2x_listen"
BEFORE = [LISTEN, ("is_sleeping",)]
AFTER = [("reset_prefix_cache", True), ("reset_encoder_cache",), ("set_weight_version", "1")]


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("way", ["server", "llm", "far", "one gpu"])
@distributed(world_sizes=(2,))
def test_what_is_pushed_is_what_runs(ctx, way, num_workers):
    """Kept tensors, fused and padded layers, prepacked ones, experts, at every cut into buckets."""
    model = make_model(ctx)
    with engine(ctx, way, num_workers) as (target, core):
        for bucket_bytes in (32, 300, 700, 1 << 20):  # a tensor, a layer, a layer and a half, all
            with fsdp2x.sync.connect(model, target, bucket_bytes=bucket_bytes) as sync:
                for version in range(2):
                    step(model)
                    sync.push(version=version)
                    holds(model, core)
                    if core is not None:
                        assert core.generate() == (str(version), str(version))
        if core is not None:
            assert [worker.lora_resets for worker in core.workers] == [8] * num_workers


@distributed(world_sizes=(2,))
def test_an_llm_on_every_rank(ctx):
    """As trainers do that share their accelerators with engines."""
    model = make_model(ctx)
    with installed():
        core = Core()
        with fsdp2x.sync.connect(model, Vllm(Llm(core)), bucket_bytes=300) as sync:
            for version in range(2):
                step(model)
                sync.push(version=version)
                holds(model, core)
            if ctx.rank == 1:
                core.workers[0].model.bad = "embed.weight"
            with pytest.raises(SyncError, match="rank 1 in phase 'load'.*Attempted to load weight") as caught:
                sync.push(version=2)
            assert caught.value.rank == 1
            sync.push(version=3)
            holds(model, core)
        core.stop()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("way", ["server", "llm"])
@distributed(world_sizes=(2,))
def test_the_order_of_a_push_to_one_that_sleeps(ctx, way, level):
    """Weights wake first, then comes the pause; the KV cache wakes when the weights are committed."""
    model = make_model(ctx)
    after = AFTER if way == "server" else [("reset_prefix_cache", False), *AFTER[1:]]
    pause, resume = ([("pause", "keep")], [("resume",)]) if way == "server" else ([], [])
    with engine(ctx, way) as (target, core), fsdp2x.sync.connect(model, target) as sync:
        sync.push(version=1)
        if core is not None:
            assert core.events == [*BEFORE, *pause, RECEIVE, *after, *resume] and core.version == "1"
            core.events.clear()
        target.sleep(level)
        if level == 2 and core is not None:
            with pytest.raises(RuntimeError, match="level 2 dropped the weights. Push, which wakes"):
                target.wake()
        step(model)
        sync.push(version=1)
        holds(model, core)
        if core is not None:
            weights, cache = [("wake_up", ["weights"])], [("wake_up", ["kv_cache"])]
            assert core.events == [("sleep", level), *BEFORE, *weights, *pause, RECEIVE, *after, *cache, *resume]
            assert core.generate() == ("1", "1")


@distributed(world_sizes=(2,))
def test_sleep_and_wake_without_a_push(ctx):
    model = make_model(ctx)
    with engine(ctx, "server") as (target, core):
        with pytest.raises(RuntimeError, match="Connect first"):
            target.sleep()
        with fsdp2x.sync.connect(model, target) as sync:
            sync.push(version=0)
            with pytest.raises(ValueError, match="level must be 1 or 2, got 3"):
                target.sleep(3)
            target.sleep(1)
            if core is not None:
                with pytest.raises(RuntimeError, match="it is already asleep"):
                    target.sleep(1)
            target.wake()
            if core is not None:
                assert core.generate() == ("0", "0")


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
@distributed(world_sizes=(2,))
def test_no_cache_outlives_its_weights(ctx, pause):
    """Requests that were kept hold blocks of the cache, and vLLM keeps it then, unless told to preempt them."""
    model = make_model(ctx)
    with engine(ctx, "server", pause=pause) as (target, core), fsdp2x.sync.connect(model, target) as sync:
        sync.push(version=0)
        if core is not None:
            assert core.generate(keeps=True) == ("0", "0")
        dist.barrier()
        sync.push(version=1)
        if core is not None:
            assert ("pause", pause) in core.events
            assert core.generate() == ("1", "1")
            assert len(core.running) == (pause == "keep")


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("way", ["server", "llm"])
@distributed(world_sizes=(2,))
def test_a_bad_tensor_poisons_nothing(ctx, way, num_workers):
    """The last worker fails at each kind of layer; the others' answers stay in step, and the next push heals."""
    model = make_model(ctx)
    with engine(ctx, way, num_workers) as (target, core):
        with fsdp2x.sync.connect(model, target, bucket_bytes=300) as sync:
            sync.push(version=0)
            for version, bad in enumerate(["embed.weight", "layers.0.k.weight", "layers.1.experts.1.weight"], 1):
                if core is not None:
                    core.workers[-1].model.bad = bad
                step(model)
                with pytest.raises(SyncError, match="Attempted to load weight") as caught:
                    sync.push(version=version)
                assert caught.value.phase == "load" and sync.is_torn
                if core is not None:
                    for worker in core.workers:
                        assert worker.fsdp2x_receiver.status["state"] == "torn"
                        worker.model.values()  # no layer is without memory, no experts without a kernel
                    assert core.version == str((version - 1) * 10) and (core.mode == "keep") == (way == "server")
                    with pytest.raises(RuntimeError, match="the last push failed"):
                        target.wake()
                sync.push(version=version * 10)
                holds(model, core)
                if core is not None:
                    assert core.mode is None and core.version == str(version * 10)


@pytest.mark.parametrize("way", ["server", "llm"])
@distributed(world_sizes=(2,))
def test_what_a_push_leaves_out(ctx, way):
    """vLLM keeps old tensors of layers that get none, and says so in its log alone."""
    model = make_model(ctx)
    for partial in (False, True):
        with engine(ctx, way, partial=partial) as (target, core):
            with fsdp2x.sync.connect(model, target) as sync:
                sync.push(version=0)
            step(model)
            some = {"params": lambda name, param: "layers.1.experts" not in name}
            with fsdp2x.sync.connect(model, target, **some) as sync:
                if not partial:
                    with pytest.raises(SyncError, match="nothing for 1 of this .*, such as 'experts1'") as caught:
                        sync.push(version=1)
                    assert caught.value.phase == "finish"
                    continue
                sync.push(version=1)
                holds(model, core, but=["layers.1.experts.0.weight", "layers.1.experts.1.weight"])
                target.sleep(2)
                with pytest.raises(SyncError, match="nothing for 1 of this engine's layers"):
                    sync.push(version=2)


@distributed(world_sizes=(2,))
def test_a_commit_that_one_worker_refuses(ctx):
    """The other worker has committed and no longer listens. It still becomes torn, and no rank waits for it."""
    model = make_model(ctx)
    with engine(ctx, "server", 2) as (target, core), fsdp2x.sync.connect(model, target) as sync:
        sync.push(version=0)
        receivers = [worker.fsdp2x_receiver for worker in core.workers] if core is not None else []
        if core is not None:
            receivers[1]._on_commit = lambda body, files: 1 / 0
        with pytest.raises(SyncError, match="ZeroDivisionError") as caught:
            sync.push(version=1)
        assert caught.value.phase == "commit"
        assert [one.status["state"] for one in receivers] == ["torn"] * len(receivers)
        if core is not None:
            assert core.mode == "keep" and core.version == "0"
            del receivers[1]._on_commit
        sync.push(version=2)
        holds(model, core)


@distributed(world_sizes=(2,))
def test_a_cache_that_is_not_reset(ctx):
    model = make_model(ctx)
    with engine(ctx, "server") as (target, core), fsdp2x.sync.connect(model, target) as sync:
        if core is not None:
            core.on_reset_prefix_cache = lambda running=False: False  # answered with 200
        with pytest.raises(SyncError, match="did not reset its prefix cache"):
            sync.push(version=0)


@pytest.mark.parametrize("way", ["server", "far"])
@distributed(world_sizes=(2,))
def test_a_session_ends_and_another_begins(ctx, way):
    """A trainer that is gone in the middle of a push leaves a paused, torn engine, which the next one heals."""
    model = make_model(ctx)
    with engine(ctx, way, 2) as (target, core):
        sync = fsdp2x.sync.connect(model, target)
        if core is not None:
            core.workers[1].model.bad = "embed.weight"
        with pytest.raises(SyncError):
            sync.push(version=0)
        sync.close()
        if core is not None:
            assert all(not worker.fsdp2x_receiver._buffers for worker in core.workers), "memory of trainers is kept"
        address = [target._controls[0].name]
        with fsdp2x.sync.connect(model, Vllm(address)) as sync:
            sync.push(version=1)
            holds(model, core)


@pytest.mark.parametrize("way", ["server", "far"])
@distributed(world_sizes=(2,))
def test_a_server_that_another_session_holds(ctx, way):
    """It is refused in time; what was paused for it is not lost for the session that holds the workers."""
    model = make_model(ctx)
    with engine(ctx, way, 2) as (target, core), fsdp2x.sync.connect(model, target) as sync:
        sync.push(version=0)
        other = Vllm(target._controls[0].name)
        with fsdp2x.sync.connect(model, other, timeout_s=20) as second, pytest.MonkeyPatch.context() as patch:
            patch.setattr("fsdp2x.rl.sync.targets.vllm.CONTACT_S", 1.0)
            with pytest.raises(SyncError, match="another trainer is connected") as caught:
                second.push(version=1)
        assert caught.value.phase == "begin"
        sync.push(version=2)
        holds(model, core)
        if core is not None:
            assert core.generate() == ("2", "2")


def refused(ctx, target, match, **options):
    model = make_model(ctx)
    with fsdp2x.sync.connect(model, target, timeout_s=5, **options) as sync:
        with pytest.raises(SyncError, match=match) as caught:
            sync.push(version=0)
        assert caught.value.phase == "begin"


@distributed(world_sizes=(2,))
def test_engines_that_are_refused(ctx):
    def core_with(**changes):
        def change(core):
            vars(core).update(changes)

        return change

    cases = [
        (
            core_with(extension=""),
            "has no worker extension. Start it with --worker-extension-cls fsdp2x.sync.vllm_worker",
        ),
        (
            core_with(world_size=4),
            "has 4 workers, of which 1 answer, because a data-parallel server.*a server for each",
        ),
        (core_with(mode="keep"), "paused or put to sleep by another client"),
    ]
    for change, match in cases:
        with engine(ctx, "server") as (target, core):
            if core is not None:
                change(core)
            refused(ctx, target, match)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        refused(ctx, Vllm(f"http://127.0.0.1:{free.getsockname()[1]}"), "does not answer /server_info: .*refused")
    core = Core()
    with serving(core, has_dev_routes=False) as url:
        refused(ctx, Vllm(url), "with 404: .* start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1")
    core.stop()


@distributed(world_sizes=(1,))
def test_what_vllm_does_not_take(ctx):
    model = make_model(ctx)
    with pytest.raises(NotImplementedError, match="it takes no deltas. Connect with deltas=False"):
        fsdp2x.sync.connect(model, Vllm(None), deltas=True)
    with pytest.raises(ValueError, match="pause must be 'keep', 'wait' or 'abort', got 'freeze'"):
        Vllm(None, pause="freeze")
    with pytest.raises(TypeError, match="an address, a vllm.LLM or None, got a int"):
        Vllm(8000)
    with pytest.raises(ValueError, match="addresses such as"):
        Vllm(["localhost:8000"])
    with pytest.raises(ValueError, match='a group is for servers and replaces memory="device"'):
        Vllm(None, group="gloo")
    with pytest.raises(ValueError, match="group must be 'gloo', 'nccl' or None, got 'mpi'"):
        Vllm("http://127.0.0.1:8000", group="mpi")
    adapter = nn.Module()
    adapter.lora_A = nn.Linear(4, 4)
    with engine(ctx, "llm") as (target, _):
        with fsdp2x.sync.connect(shard(ctx, adapter), target) as sync:
            with pytest.raises(SyncError, match="vLLM loads adapters by its own requests.*'lora_A.weight'"):
                sync.push(version=0)


@distributed(world_sizes=(2,))
def test_an_llm_whose_workers_are_elsewhere(ctx):
    model = make_model(ctx)
    with engine(ctx, "llm") as (target, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp2x.sync.vllm_worker.place_of_process", lambda: ["elsewhere", ""])
        with fsdp2x.sync.connect(model, target, timeout_s=5) as sync:
            with pytest.raises(SyncError, match="runs on another host.*Start a server there, and give Vllm its addr"):
                sync.push(version=0)


@distributed(world_sizes=(2,))
def test_workers_that_came_nearer(ctx):
    """A server that listens on a port keeps doing so, even if its trainers share its memory."""
    model = make_model(ctx)
    with engine(ctx, "server", 2) as (target, core):
        address = target._controls[0].name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fsdp2x.sync.vllm_worker.place_of_process", lambda: ["elsewhere", ""])
            dist.barrier()
            with fsdp2x.sync.connect(model, target) as sync:
                sync.push(version=0)
            dist.barrier()
        with fsdp2x.sync.connect(model, Vllm(address)) as sync:
            step(model)
            sync.push(version=1)
            holds(model, core)
