"""fsdp2x.sync: pushes are the model's weights bit for bit, full or as deltas, under the names that engines load."""

import contextlib
import mmap
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2x
from engines import OVER, Layerwise, Store, peer, wire
from fsdp2x.sync import InProcess, Peer, SyncError
from harness import distributed
from models import STACK_UNITS, Stack, build, mixed_stack, tiny_lora, tiny_vlm
from reference import params, same, shard

TRANSPORTS = ("shm", "process_group")


@torch.no_grad()
def change(model, fraction, seed):
    """Other bits in about ``fraction`` of the elements of every shard, zeros and NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        local = param.to_local() if hasattr(param, "to_local") else param
        if not local.is_floating_point() or not local.numel():
            continue
        chosen = torch.rand(local.shape, generator=generator) < fraction
        fresh = torch.randn(local.shape, generator=generator).to(local.dtype)
        odd = torch.tensor([float("nan"), -0.0, 0.0, float("inf")], dtype=local.dtype)
        pick = torch.randint(8, local.shape, generator=generator)
        for index, value in enumerate(odd):
            fresh[pick == index] = value
        local[chosen] = fresh[chosen]


def bits(tensors):
    return {name: tensor.contiguous().view(-1).view(torch.uint8) for name, tensor in tensors.items()}


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(1, 2, 3, 4))
def test_equals_the_unsharded_model(ctx, transport, over):
    """Uneven and empty shards, ignored parameters, mixed dtypes, one tensor and all of them in a bucket."""
    model = mixed_stack()
    expected = params(model)
    shard(ctx, model, STACK_UNITS, ignored_params={model.norm.weight})
    for bucket_bytes in (100, 300, 64 << 20):
        engine, store = Layerwise(), Store()
        options = {"names": "model", "transport": transport, "bucket_bytes": bucket_bytes}
        target = InProcess(engine.load, finish=engine.finish)
        with fsdp2x.sync.connect(model, target, **options) as sync:
            for version in (1, 2):
                report = sync.push(version=version)
                same(engine.weights, expected)
                assert list(engine.weights) == list(expected)
                assert (report.version, sync.version, report.num_tensors) == (version, version, len(expected))
                assert report.bytes_sent == sum(value.nbytes for value in expected.values())
        with peer(ctx, store, rank=ctx.world - 1, over=over) as (target, served):
            with fsdp2x.sync.connect(model, target, **options) as sync:
                for version in ("a", "b"):
                    sync.push(version=version)
                    if served:
                        with served.receiver.reading() as held:
                            assert held == version
                            same(store.weights, expected)
            if served:
                assert len(store.bucket_sizes) == 2 * report.num_buckets


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "mixtral", "vlm"])
@distributed(world_sizes=(2, 3))
def test_names_and_layout_of_the_files(ctx, name, over):
    model = fsdp2x.fully_shard(tiny_vlm() if name == "vlm" else build(name))
    keep = {"*.gate.weight": torch.float32} if name in ("qwen3_moe", "mixtral") else {}
    expected = {}
    for key, value in wire(model).items():
        expected[key] = value if key.endswith(".gate.weight") else value.bfloat16()
    engine, store = Layerwise(), Store()
    target = InProcess(engine.load, finish=engine.finish)
    options = {"dtype": torch.bfloat16, "keep": keep, "bucket_bytes": 3000}
    with fsdp2x.sync.connect(model, target, **options) as sync:
        sync.push(version=1)
        same(engine.weights, expected)
    with peer(ctx, store, over=over) as (target, served), fsdp2x.sync.connect(model, target, **options) as sync:
        sync.push(version=1)
        if served:
            same(store.weights, expected)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(1, 2, 4))
def test_a_delta_is_a_full_push(ctx, transport, over):
    model = Stack()
    model.blocks[1].bfloat16()
    model.head.codes = nn.Parameter(torch.arange(35, dtype=torch.uint8).view(5, 7), requires_grad=False)
    shard(ctx, model, STACK_UNITS, ignored_params={model.norm.weight})
    options = {"names": "model", "transport": transport, "bucket_bytes": 300}
    store, twin = Store(), Store()
    inner = InProcess(twin.load, apply_delta=twin.apply_delta)
    with peer(ctx, store, over=over) as (target, served), contextlib.ExitStack() as stack:
        syncs = [
            stack.enter_context(fsdp2x.sync.connect(model, one, deltas=True, **options)) for one in (target, inner)
        ]
        for sync in syncs:
            sync.push(version=0)
        for version, fraction in enumerate((0.0, 0.02, 0.2, 0.0, 0.6, 1.0, 0.05), start=1):
            change(model, fraction, seed=10 * version + ctx.rank)
            reports = [sync.push(version=version, mode="delta") for sync in syncs]
            expected = bits(wire(model, names="model"))
            same(bits(twin.weights), expected)
            if served:
                same(bits(store.weights), expected)
            assert (reports[0].bytes_sent, reports[0].num_changed) == (reports[1].bytes_sent, reports[1].num_changed)
            assert reports[0].num_buckets == 0 or fraction > 0


@distributed(world_sizes=(2,))
def test_deltas_of_several_buckets_go_at_once(ctx):
    """As many as have room in one: 100 changes of each shard are 2,464 bytes a layer, of the 8,192 that there are."""
    torch.manual_seed(0)
    model = shard(ctx, nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))))
    store = Store()
    with peer(ctx, store) as (target, served):
        options = {"names": "model", "deltas": True, "bucket_bytes": 64 * 64 * 4}
        with fsdp2x.sync.connect(model, target, **options) as sync:
            assert sync.push(version=0).num_buckets == 8
            for version, (num, num_buckets) in enumerate({1: 1, 100: 3, 300: 8}.items(), start=1):
                with torch.no_grad():
                    for param in model.parameters():
                        param.to_local().view(-1)[:num] += 1
                report = sync.push(version=version, mode="delta")
                expected = bits(wire(model, names="model"))
                assert (report.num_buckets, report.num_changed) == (num_buckets, 8 * 2 * num)
                if served:
                    same(bits(store.weights), expected)


@distributed(world_sizes=(3,))
def test_deltas_of_converted_weights(ctx):
    """Fused experts go whole where they changed; nothing is sent of what did not; the dtype of the wire decides."""
    model = fsdp2x.fully_shard(build("qwen3_moe"))
    store = Store()
    with peer(ctx, store) as (target, served):
        with fsdp2x.sync.connect(model, target, dtype=torch.bfloat16, deltas=True, bucket_bytes=3000) as sync:
            sync.push(version=0)
            with torch.no_grad():
                for param in model.parameters():
                    param.to_local().mul_(1 + 1e-6)  # less than bfloat16 tells, nearly everywhere
            tiny = sync.push(version=1, mode="delta")
            change(model, 0.03, seed=ctx.rank)
            sync.push(version=2, mode="delta")
            expected = wire(model, dtype=torch.bfloat16)
            if served:
                same(bits(store.weights), bits(expected))
            assert tiny.num_changed < 100


@distributed(world_sizes=(4,))
def test_two_axes_and_tensor_parallel_parameters(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    parallel = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    for model in (Stack(), parallel):
        expected = params(model)
        if model is parallel:
            parallelize_module(model, mesh["shard"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        shard(ctx, model, mesh=mesh["replicate"] if model is parallel else mesh)
        store = Store()
        with peer(ctx, store, rank=3) as (target, served):
            with fsdp2x.sync.connect(model, target, bucket_bytes=200, deltas=True) as sync:
                sync.push(version=0)
                if served:
                    same(store.weights, expected)
                with torch.no_grad():
                    for param in model.parameters():
                        param.add_(1)
                sync.push(version=1, mode="delta")
                expected = wire(model)
                if served:
                    same(store.weights, expected)


@distributed(world_sizes=(2,))
def test_adapters_alone(ctx):
    from peft import get_peft_model_state_dict

    model = tiny_lora()
    adapter = get_peft_model_state_dict(model)
    fsdp2x.fully_shard(model)
    engine = Layerwise()
    target = InProcess(engine.load, finish=engine.finish)
    with pytest.raises(NotImplementedError, match="base weights and adapters .*lora_.* Use merge_adapters=True"):
        fsdp2x.sync.connect(model, target)
    with fsdp2x.sync.connect(model, target, params=lambda name, param: "lora_" in name) as sync:
        sync.push(version=1)
    same(dict(sorted(engine.weights.items())), dict(sorted(adapter.items())))


@distributed(world_sizes=(2,))
def test_engines_that_keep_what_they_are_given_need_copies(ctx):
    """The trap that copies are for: without them the memory is used again, and the engine's weights are wrong."""
    model = Stack()
    expected = params(model)
    shard(ctx, model, STACK_UNITS)
    wrong = 0
    for copies in (True, False):
        engine = Layerwise()
        target = InProcess(engine.load, finish=engine.finish, copies=copies)
        with fsdp2x.sync.connect(model, target, names="model", bucket_bytes=100) as sync:
            sync.push(version=1)
        if copies:
            same(engine.weights, expected)
        else:
            wrong = sum(not torch.equal(engine.weights[name], value) for name, value in expected.items())
    assert wrong


@distributed(world_sizes=(3,))
def test_slots_wait_for_a_slow_engine(ctx):
    """Ranks that do not talk to the engine are fast: they must not fill a slot that it still reads."""

    class Slow(Store):
        def load(self, items):
            time.sleep(0.02)
            super().load(items)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(12)))
    expected = params(model)
    shard(ctx, model)
    store = Slow()
    with peer(ctx, store) as (target, served), fsdp2x.sync.connect(model, target, bucket_bytes=1024) as sync:
        report = sync.push(version=1)
        assert report.num_buckets == 12
        if served:
            same(store.weights, expected)
            assert report.waited_s > 0


@distributed(world_sizes=(2,))
def test_refusals(ctx):
    model = shard(ctx, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    engine = Layerwise()
    target = InProcess(engine.load, finish=engine.finish)
    connect = fsdp2x.sync.connect
    with pytest.raises(ValueError, match="keep: no parameter matches 'gate.*Names look like 0.bias"):
        connect(model, target, keep={"gate*": torch.float32})
    with pytest.raises(ValueError, match="'0.weight' is .*float32 by '0.*', but .*bfloat16 by '.*weight'"):
        connect(model, target, keep={"0.*": torch.float32, "*weight": torch.bfloat16})
    with pytest.raises(ValueError, match="timeout_s must be positive, got 0"):
        connect(model, target, timeout_s=0)
    with pytest.raises(ValueError, match="params selects no parameter"):
        connect(model, target, params=lambda name, param: False)
    with pytest.raises(NotImplementedError, match="apply_delta=.*or Connect with deltas=False|deltas=False"):
        connect(model, target, deltas=True)
    with pytest.raises(ValueError, match="rank 1 has other names, shapes or dtypes than rank 0"):
        connect(model, target, dtype=torch.float16 if ctx.rank else torch.bfloat16)
    sync = connect(model, target)
    with pytest.raises(ValueError, match="Connect with deltas=True"):
        sync.push(version=1, mode="delta")
    with pytest.raises(ValueError, match='mode must be "full" or "delta", got .half.'):
        sync.push(version=1, mode="half")
    with pytest.raises(ValueError, match="rank 0 pushes version 0 as 'full', but rank 1 version 1 as 'full'"):
        sync.push(version=ctx.rank)

    def push_inside(*_):
        with pytest.raises(RuntimeError, match="a forward of the model is running. Push between two steps"):
            sync.push(version=1)
        refused.append("forward")

    refused = []
    handle = model[1].register_forward_hook(push_inside)
    loss = model(torch.ones(2, 4)).sum()
    handle.remove()

    def push_in_backward(gradient):
        with pytest.raises(RuntimeError, match="a backward of the model is running. Push between two steps"):
            sync.push(version=1)
        refused.append("backward")

    handle = model[0].register_forward_hook(
        lambda module, args, output: output.register_hook(push_in_backward) and None
    )
    (model(torch.ones(2, 4)).sum() + loss).backward()
    handle.remove()
    assert len(refused) == 2
    model.zero_grad()
    fsdp2x.sleep(model)
    with pytest.raises(RuntimeError, match="parameter '0.weight' cannot be read: .*asleep"):
        sync.push(version=1)
    fsdp2x.wake(model)
    assert sync.version is None and not sync.is_torn
    sync.push(version=2)
    assert sync.version == 2 and set(engine.weights) == {name for name, _ in model.named_parameters()}
    sync.close()
    with pytest.raises(RuntimeError, match="the session is closed. Connect again"):
        sync.push(version=3)


@distributed(world_sizes=(2,))
def test_what_one_rank_refuses_is_raised_on_all(ctx):
    model = shard(ctx, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(NotImplementedError, match="connect with deltas=False"):
        fsdp2x.sync.connect(model, InProcess(Layerwise().load if ctx.rank == 0 else None), deltas=True)
    for nobody in (InProcess(None), Peer("@nobody", rank=2), Peer("@nobody", rank=-1)):
        with pytest.raises(ValueError, match="no rank has an engine"):
            fsdp2x.sync.connect(model, nobody)


@distributed(world_sizes=(2,))
def test_one_peer_for_two_sessions(ctx):
    """The engine reads the memory of the session that pushes, and no session changes what the other one left there."""
    model = Stack()
    expected = params(model)
    shard(ctx, model, STACK_UNITS)
    store = Store()
    with peer(ctx, store) as (target, served):
        first = fsdp2x.sync.connect(model, target, names="model", deltas=True)
        first.push(version=1)
        second = fsdp2x.sync.connect(model, target, names="model", deltas=True, bucket_bytes=300)
        for factor, session in ((2.0, second), (4.0, first), (8.0, second)):
            with torch.no_grad():
                for param in model.parameters():
                    param.to_local().mul_(2)
            session.push(version=1)
            if served:
                same(store.weights, {name: value * factor for name, value in expected.items()})
        with pytest.raises(SyncError, match="holds 1 of another session"):
            first.push(version=2, mode="delta")
        assert first.is_torn
        first.push(version=2)
        first.close()
        second.close()


@distributed(world_sizes=(3,))
def test_ranks_that_train_something_else(ctx):
    """A group of its own: rank 0 has no part of the model, and is not waited for."""
    group = dist.new_group([1, 2])
    alone = dist.new_group([ctx.rank], use_local_synchronization=True)
    if ctx.rank == 0:
        return
    model = Stack()
    expected = params(model)
    mesh = DeviceMesh.from_group(group, "cpu")
    shard(ctx, model, STACK_UNITS, mesh=mesh)
    store = Store()
    target = InProcess(store.load if ctx.rank == 2 else None, apply_delta=store.apply_delta)
    with fsdp2x.sync.connect(model, target, names="model", bucket_bytes=300, deltas=True, group=group) as sync:
        sync.push(version=1)
        same(store.weights, expected if ctx.rank == 2 else {})
        change(model, 0.1, seed=ctx.rank)
        sync.push(version=2, mode="delta")
        expected = bits(wire(model, names="model"))
        same(bits(store.weights), expected if ctx.rank == 2 else {})
    with pytest.raises(ValueError, match="ranks .[12]. have parts of the model, but are not in group"):
        fsdp2x.sync.connect(model, target, deltas=True, group=alone)


class Made(nn.Module):
    """Parameters of any shape and dtype, in modules of their own."""

    def __init__(self, choose):
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.complex64)
        self.dims = {}
        for index in range(choose.randint(2, 6)):
            shape = [choose.randint(1, 9) for _ in range(choose.randint(1, 3))]
            dtype = choose.choice(dtypes)
            if len(shape) > 1 and choose.random() < 0.5:
                shape[1] *= 6  # even on 2 and 3 ranks: cut along dim 1
            is_trained = dtype.is_floating_point
            value = torch.randint(0, 9, shape).to(dtype)
            module = nn.Module()
            module.weight = nn.Parameter(value, requires_grad=is_trained)
            self.dims[module.weight] = int(len(shape) > 1 and shape[1] % 6 == 0)
            self.add_module(f"layer{index}", module)


@pytest.mark.parametrize("seed", range(4))
@distributed(world_sizes=(2, 3))
def test_made_up_models(ctx, seed):
    """Any shapes, dtypes, shard dims and bucket sizes: full pushes, and deltas of any sparsity, in two buckets."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    model = Made(choose)
    expected = params(model)
    dims = dict(model.dims)
    units = [name for name, _ in model.named_children() if choose.random() < 0.7]
    shard(ctx, model, units, shard_placement_fn=lambda param: Shard(dims[param]))
    store = Store()
    bucket_bytes = choose.choice((1, 200, 1000, 1 << 20))
    dtype = choose.choice((None, torch.bfloat16, torch.float32))
    options = {"names": "model", "bucket_bytes": bucket_bytes, "dtype": dtype}
    with peer(ctx, store) as (target, served), fsdp2x.sync.connect(model, target, deltas=True, **options) as sync:
        for version, fraction in enumerate((None, 0.0, 0.03, 0.3, 1.0, 0.1)):
            if fraction is not None:
                change(model, fraction, seed=100 * seed + 10 * version + ctx.rank)
            sync.push(version=version, mode="full" if version in (0, 4) else "delta")
            now = wire(model, names="model", dtype=dtype)
            if version == 0:
                cast = {n: v.to(dtype) if dtype and v.is_floating_point() else v for n, v in expected.items()}
                same(bits(now), bits(cast))
            if served:
                same(bits(store.weights), bits(now))
        largest = max(value.nbytes for value in now.values())
        taken = sum(num_bytes for _, num_bytes in sync._layout.files)
        assert taken <= 2 * (max(bucket_bytes, largest) + 64 * len(now) + mmap.PAGESIZE)
