"""fsdp2x.full_tensors: the same bytes as full_tensor() of each parameter, in few gathers of bounded size."""

import copy
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
from models import STACK_UNITS, Stack, build, inputs, tiny_lora
from reference import full, same, shard

KIB = 1 << 10


def whole(model, **options):
    found = list(fsdp2x.full_tensors(model, **options))
    assert len(dict(found)) == len(found)
    return dict(found)


def one_by_one(model):
    return {name: full(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("bucket_bytes", [1, 300, 64 << 20])
@distributed(world_sizes=(1, 2, 3, 4))
@pytest.mark.each_value
def test_equals_full_tensor(ctx, bucket_bytes):
    model = Stack()
    plain = dict(copy.deepcopy(model).named_parameters())
    shard(ctx, model, STACK_UNITS)
    got = whole(model, bucket_bytes=bucket_bytes)
    same(got, {name: param.detach() for name, param in plain.items()})
    same(got, one_by_one(model))
    assert not any(value.requires_grad or isinstance(value, nn.Parameter) for value in got.values())


@distributed(world_sizes=(2,))
def test_any_state_of_the_units(ctx):
    """Values are those of the sharded parameters, in their dtype, also while the unsharded ones are registered."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(ctx, Stack(), STACK_UNITS, mp_policy=policy)
    expected = one_by_one(model)
    loss = model(inputs(ctx.rank)).sum()
    assert fsdp2x.describe(model).units[0].param_state == "UNSHARDED", "the root keeps its parameters for backward"
    same(whole(model), expected)
    with fsdp2x.unsharded(model):
        same(whole(model), expected)
        assert {unit.param_state for unit in fsdp2x.describe(model).units} == {"UNSHARDED"}
    loss.backward()


@distributed(world_sizes=(2,))
def test_tensors_are_copies(ctx):
    model = shard(ctx, Stack(), STACK_UNITS)
    before = one_by_one(model)
    for value in whole(model).values():
        value.zero_()
    same(one_by_one(model), before)


@distributed(world_sizes=(2,))
@mock.patch.dict("os.environ", {"FSDP2X_TRANSPORT": "process_group"})
def test_one_gather_for_many_parameters(ctx):
    model = shard(ctx, build("qwen3"), ("model.layers.0", "model.layers.1"))
    total_bytes = sum(param.numel() * 4 for param in model.parameters())
    assert 16 * KIB < total_bytes < 64 * KIB
    real = dist.all_gather_into_tensor
    for bucket_bytes, most in ((64 * KIB, 1), (16 * KIB, -(-total_bytes // (8 * KIB)))):
        with mock.patch.object(dist, "all_gather_into_tensor", side_effect=real) as gather:
            whole(model, bucket_bytes=bucket_bytes)
        sizes = [call.args[0].numel() for call in gather.call_args_list]
        assert 1 <= len(sizes) <= most
        padding = 2 * 16 * len(list(model.parameters()))
        assert max(sizes) <= bucket_bytes + padding, "a bucket is larger than asked for"


@distributed(world_sizes=(2,))
def test_predicate_dtype_and_ties(ctx):
    model = fsdp2x.fully_shard(build("qwen3"))
    tied = [name for name, _ in model.named_parameters()]
    assert list(whole(model)) == tied and "lm_head.weight" not in tied
    some = whole(model, params=lambda name, param: name.endswith("q_proj.weight") and param.dim() == 2)
    assert list(some) == [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)]
    same(
        whole(model, dtype=torch.bfloat16, device="cpu"),
        {name: value.bfloat16() for name, value in one_by_one(model).items()},
    )


@distributed(world_sizes=(2, 3))
def test_mixed_dtypes_frozen_bytes_and_unsharded_parameters(ctx):
    model = Stack()
    model.blocks[0].bfloat16()
    model.head.codes = nn.Parameter(torch.arange(35, dtype=torch.uint8).view(5, 7), requires_grad=False)
    ignored = model.norm.weight
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    shard(ctx, model, STACK_UNITS, ignored_params={ignored})
    got = whole(model)
    same(got, expected)
    assert got["norm.weight"].data_ptr() != ignored.data_ptr()
    assert whole(model, dtype=torch.float16)["head.codes"].dtype == torch.uint8


@distributed(world_sizes=(2,))
def test_shard_of_another_dim(ctx):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8))
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    shard(ctx, model, shard_placement_fn=lambda param: Shard(param.dim() - 1))
    same(whole(model), expected)


@distributed(world_sizes=(4,))
@mock.patch.dict("os.environ", {"FSDP2X_TRANSPORT": "process_group"})
def test_two_axes(ctx):
    """HSDP: gathered over the shards only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(ctx, Stack(), STACK_UNITS, mesh=mesh)
    with mock.patch.object(dist, "all_gather_into_tensor", side_effect=dist.all_gather_into_tensor) as gather:
        same(whole(model), {name: param.detach() for name, param in Stack().named_parameters()})
    assert {dist.get_world_size(call.kwargs["group"]) for call in gather.call_args_list} == {2}


@pytest.mark.parametrize("stock", [False, True])
@distributed(world_sizes=(4,))
def test_tensor_parallel_parameters(ctx, stock):
    """Cut twice, also along one dim: redistributed one by one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    if stock:
        fully_shard(model, mesh=mesh["dp"])
    else:
        shard(ctx, model, mesh=mesh["dp"])
    same(whole(model), expected)


@distributed(world_sizes=(2,))
def test_lora_adapter_only(ctx):
    model = fsdp2x.fully_shard(tiny_lora())
    adapter = whole(model, params=lambda name, param: "lora_" in name)
    assert len(adapter) == 8 and all("lora_" in name for name in adapter)


@distributed(world_sizes=(2,))
def test_models_of_upstreams_fully_shard(ctx):
    model = fully_shard(Stack())
    same(whole(model), one_by_one(model))


@distributed(world_sizes=(2,))
def test_refusals(ctx):
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    shard(ctx, model)
    with pytest.raises(RuntimeError, match="no values yet: \\['weight', 'bias'\\]"):
        fsdp2x.full_tensors(model)
    with pytest.raises(ValueError, match="bucket_bytes must be positive, got 0"):
        fsdp2x.full_tensors(model, bucket_bytes=0)
