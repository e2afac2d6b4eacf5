"""fsdp2x.export.stream: buckets of whole tensors, bit for bit, in the same order everywhere, under the files' names.

And `full_tensors`, which gives them one by one, in memory of their own.
"""

import contextlib
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, build, inputs, mixed_stack, tiny_lora, tiny_vlm
from reference import params, same, shard

TRANSPORTS = ("shm", "process_group")
KIB = 1 << 10
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def collect(model, **options):
    """All tensors, cloned, by name; checks what every bucket promises."""
    found = {}
    limit = options.get("bucket_bytes", 64 << 20)
    for index, bucket in enumerate(fsdp2x.export.stream(model, **options)):
        assert bucket.index == index
        for spec, (name, tensor) in zip(bucket.specs, bucket.items(), strict=True):
            assert (spec.name, spec.shape, spec.dtype) == (name, tensor.shape, tensor.dtype)
            assert name not in found and tensor.is_contiguous() and not tensor.requires_grad
            found[name] = tensor.clone()
        parts = {name.partition(".experts.")[0] for name in bucket.names}
        assert bucket.num_bytes <= limit or len(parts) == 1, "only what cannot be split exceeds the limit"
    return found


def whole(model, **options):
    found = list(fsdp2x.full_tensors(model, **options))
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(1, 2, 3, 4))
def test_equals_the_unsharded_model(ctx, transport):
    model = mixed_stack()
    expected = params(model)
    shard(ctx, model, STACK_UNITS, ignored_params={model.norm.weight})
    for bucket_bytes in (100, 64 << 20):
        got = collect(model, names="model", transport=transport, bucket_bytes=bucket_bytes)
        assert list(got) == list(expected), "not in the order of named_parameters()"
        same(got, expected)
        got = whole(model, bucket_bytes=bucket_bytes)
        same(got, expected)
        for value in got.values():
            assert not value.requires_grad and not isinstance(value, nn.Parameter)
            value.zero_()  # a copy
    cast = {name: value.to(torch.float16) if value.is_floating_point() else value for name, value in expected.items()}
    same(collect(model, names="model", transport=transport, dtype=torch.float16), cast)
    if transport == "process_group":
        # Large tensors are gathered alone, with or without a cast, also next to packed ones.
        for direct_bytes, bucket_bytes in ((0, 100), (0, 64 << 20), (150, 64 << 20)):
            with mock.patch("fsdp2x.io.export.rings._DIRECT_BYTES", direct_bytes):
                same(collect(model, names="model", transport=transport, bucket_bytes=bucket_bytes), expected)
                same(collect(model, names="model", transport=transport, dtype=torch.float16), cast)


@pytest.mark.parametrize("name", ["qwen3", "llama", "mixtral", "qwen3_moe", "gpt2", "vlm"])
@distributed(world_sizes=(2, 3))
def test_names_and_layout_of_the_files(ctx, name):
    """Tied, untied, fused, and renamed weights come out as transformers itself would write them."""
    from transformers.core_model_loading import revert_weight_conversion

    model = tiny_vlm() if name == "vlm" else build(name)
    expected = revert_weight_conversion(model, params(model))
    fused = [key for key in dict(model.named_parameters()) if "experts." in key]
    fsdp2x.fully_shard(model)
    got = collect(model, bucket_bytes=3000)
    same(dict(sorted(got.items())), {key: value.contiguous() for key, value in sorted(expected.items())})
    assert bool(fused) == (name in ("mixtral", "qwen3_moe")) and not set(fused) & set(got)
    everywhere = [None] * ctx.world
    dist.all_gather_object(everywhere, list(got))
    assert all(names == everywhere[0] for names in everywhere)


@pytest.mark.parametrize("over_gloo", [True, False])
@pytest.mark.parametrize("direct_bytes", [150, 1 << 20])
@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(3,))
def test_ranks_may_decline_to_receive(ctx, transport, direct_bytes, over_gloo):
    """By messages from rank to rank, and by the collectives of other backends."""
    expected = params(Stack())
    model = shard(ctx, Stack(), STACK_UNITS)
    patches = contextlib.ExitStack()
    if transport == "process_group":
        patches.enter_context(mock.patch("fsdp2x.io.export.rings._DIRECT_BYTES", direct_bytes))
        patches.enter_context(mock.patch("fsdp2x.io.export.rings.Ring._is_over_gloo", over_gloo))
    with patches:
        decline(ctx, model, transport, expected)


def decline(ctx, model, transport, expected):
    for receivers in ({0}, {1, 2}, {0, 1, 2}, set()):
        options = {"names": "model", "bucket_bytes": 300, "transport": transport, "receive": ctx.rank in receivers}
        buckets = []
        got = {}
        for bucket in fsdp2x.export.stream(model, **options):
            assert (bucket.tensors is not None) == (ctx.rank in receivers)
            buckets.append(bucket.names)
            got.update((name, tensor.clone()) for name, tensor in bucket.items())
        assert sum(buckets, []) == list(expected) and len(buckets) > 2
        same(got, expected if ctx.rank in receivers else {})


@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(2,))
def test_memory_is_used_again_and_writes_stay_with_their_rank(ctx, transport):
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    expected = params(model)
    shard(ctx, model)
    places = []
    for bucket in fsdp2x.export.stream(model, bucket_bytes=256, transport=transport):
        ((name, tensor),) = bucket.items()
        torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0)
        places.append(tensor.data_ptr())
        if ctx.rank == 0:
            tensor.zero_()
        dist.barrier()
    assert len(set(places)) == 2 and places[:2] * 3 == places
    with torch.inference_mode():
        same(collect(model, transport=transport), expected)


@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(2, 3), fresh=True)
def test_ranks_may_end_a_pass_early(ctx, transport):
    """The messages of the bucket that was on its way do not meet those of the next pass."""
    model = nn.Sequential(*(nn.Linear(600, 600, bias=False) for _ in range(3)))
    expected = params(model)
    shard(ctx, model)
    for _ in range(3):
        next(fsdp2x.export.stream(model, bucket_bytes=1 << 20, transport=transport))
        if ctx.rank == 0:
            time.sleep(0.1)  # the others are ahead
        same(collect(model, bucket_bytes=1 << 20, transport=transport), expected)


@distributed(world_sizes=(4,))
def test_two_axes_and_tensor_parallel_parameters(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    expected = params(Stack())
    model = shard(ctx, Stack(), STACK_UNITS, mesh=mesh)
    for transport in TRANSPORTS:
        with mock.patch.object(dist, GATHER, side_effect=getattr(dist, GATHER)) as gather:
            same(collect(model, transport=transport, bucket_bytes=200), expected)
        # Other dtypes are not weights: what ranks compare at each bucket.
        calls = [call for call in gather.call_args_list if call.args[0].dtype == torch.uint8]
        sizes = {dist.get_world_size(call.kwargs["group"]) for call in calls}
        assert sizes == ({2} if transport == "process_group" else set()), "gathered over the shards only"
    for apply in (lambda *args, **options: shard(ctx, *args, **options), fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        expected = params(model)
        parallelize_module(model, mesh["shard"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        same(collect(apply(model, mesh=mesh["replicate"]), bucket_bytes=50), expected)


@distributed(world_sizes=(2,))
def test_shards_of_another_dim_and_of_stock(ctx):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8))
    expected = params(model)
    same(whole(shard(ctx, model, shard_placement_fn=lambda param: Shard(param.dim() - 1))), expected)
    same(whole(fully_shard(Stack())), params(Stack()))


@distributed(world_sizes=(2,))
def test_any_state_of_the_units(ctx):
    """Values are those of the sharded parameters, in their dtype, also while the unsharded ones are registered."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(ctx, Stack(), STACK_UNITS, mp_policy=policy)
    loss = model(inputs(ctx.rank)).sum()
    assert fsdp2x.describe(model).units[0].param_state == "UNSHARDED", "the root keeps its parameters for backward"
    same(whole(model), params(Stack()))
    with fsdp2x.unsharded(model):
        same(whole(model), params(Stack()))
        assert {unit.param_state for unit in fsdp2x.describe(model).units} == {"UNSHARDED"}
    loss.backward()


@distributed(world_sizes=(2,))
@mock.patch.dict("os.environ", {"FSDP2X_TRANSPORT": "process_group"})
def test_one_gather_for_many_parameters(ctx):
    model = shard(ctx, build("qwen3"), ("model.layers.0", "model.layers.1"))
    total_bytes = sum(param.numel() * 4 for param in model.parameters())
    assert 16 * KIB < total_bytes < 64 * KIB
    for bucket_bytes, most in ((64 * KIB, 1), (16 * KIB, -(-total_bytes // (8 * KIB)))):
        with mock.patch.object(dist, GATHER, side_effect=getattr(dist, GATHER)) as gather:
            whole(model, bucket_bytes=bucket_bytes)
        sizes = [call.args[0].numel() for call in gather.call_args_list]
        assert 1 <= len(sizes) <= most
        padding = 2 * 16 * len(list(model.parameters()))
        assert max(sizes) <= bucket_bytes + padding, "a bucket is larger than asked for"


@distributed(world_sizes=(2,))
def test_predicate_dtype_and_ties(ctx):
    expected = params(build("qwen3"))
    model = fsdp2x.fully_shard(build("qwen3"))
    assert list(whole(model)) == list(expected) and "lm_head.weight" not in expected
    some = whole(model, params=lambda name, param: name.endswith("q_proj.weight") and param.dim() == 2)
    assert list(some) == [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)]
    cast = whole(model, dtype=torch.bfloat16, device="cpu")
    same(cast, {name: value.bfloat16() for name, value in expected.items()})


@distributed(world_sizes=(2,))
def test_adapter_weights_have_the_names_of_adapter_files(ctx):
    from peft import get_peft_model_state_dict

    model = tiny_lora()
    adapter = get_peft_model_state_dict(model)
    base = {key for key, _ in build("llama").named_parameters()}
    fsdp2x.fully_shard(model)
    got = collect(model, params=lambda name, param: "lora_" in name)
    same(dict(sorted(got.items())), dict(sorted(adapter.items())))
    assert set(collect(model)) == set(adapter) | base


@distributed(world_sizes=(2,))
def test_refusals(ctx):
    model = shard(ctx, nn.Linear(4, 4))
    with pytest.raises(ValueError, match="names must be .*got 'x'"):
        fsdp2x.export.stream(model, names="x")
    with pytest.raises(ValueError, match="transport must be one of"):
        fsdp2x.export.stream(model, transport="carrier pigeon")
    with torch.device("meta"):
        meta = shard(ctx, nn.Linear(4, 4))
    for function in (fsdp2x.export.stream, fsdp2x.full_tensors):
        with pytest.raises(ValueError, match="bucket_bytes must be positive, got -1"):
            function(model, bucket_bytes=-1)
        with pytest.raises(RuntimeError, match="no values yet: \\['weight', 'bias'\\]"):
            function(meta)
