"""Weights and gradients in few bits between ranks: what arrives is what the formats say, bit for bit, everywhere."""

import copy
import datetime

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import fsdp2x
from harness import distributed
from models import Stack
from reference import grads, mesh_of, params, same, shard
from wire import UNITS, WIDTH, ErrorFeedback, gathered, loss_of, mean_of_ranks, reference, root_stats, sharded

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# The process group of a CPU, and that of an accelerator with the twins of its kernels.
over_both = pytest.mark.parametrize("transport", ["process_group", "streams"])


def as_gathered(model) -> dict[str, torch.Tensor]:
    with fsdp2x.unsharded(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@distributed(world_sizes=(1, 2, 3, 4), only_fsdp2x=True)
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@over_both
def test_every_rank_computes_with_what_the_format_says(ctx, name, compute, transport):
    whole = reference()
    policy = BF16 if compute == "bfloat16" else MixedPrecisionPolicy()
    with torch.no_grad():
        whole.blocks[0].up.weight[3:9] = 0.0  # a block without a scale
        whole.blocks[1].up.weight[0, 0] = 1e-44
    model = sharded(ctx, whole, transport, mp_policy=policy)
    model.set_wire_dtype(weights=name)
    dtype = getattr(torch, compute)
    expected = {key: gathered(param, name, ctx.world).to(dtype) for key, param in whole.named_parameters()}
    same(as_gathered(model), expected, "gathered")
    same(params(model), dict(whole.named_parameters()), "sharded")
    model.set_wire_dtype()
    same(as_gathered(model), {key: p.detach().to(dtype) for key, p in whole.named_parameters()}, "whole again")


@distributed(world_sizes=(2, 4), only_fsdp2x=True)
@over_both
def test_columns_and_replicas(ctx, transport):
    whole = Stack(num=2, width=WIDTH, hidden=64)
    place = {whole.blocks[0].up.weight.shape: Shard(1)}
    mesh = mesh_of("2d", ctx.world) if ctx.world == 4 else mesh_of("1d", ctx.world)
    options = {"mesh": mesh, "shard_placement_fn": lambda param: place.get(param.shape)}
    model = shard(ctx, copy.deepcopy(whole), transport=transport, **options)
    model.set_wire_dtype(weights="int8", gradients="int8")
    columns = {name: int(param.shape in place) for name, param in whole.named_parameters()}
    expected = {name: gathered(param, "int8", 2, columns[name]) for name, param in whole.named_parameters()}
    same(as_gathered(model), expected, "gathered")
    with torch.no_grad():
        for name, param in whole.named_parameters():
            param.copy_(expected[name])
    loss_of(whole, ctx.rank).backward()
    loss_of(model, ctx.rank).backward()
    found = grads(model)
    for name, param in whole.named_parameters():
        mean = mean_of_ranks(param.grad, ctx.world)
        peak = param.grad.abs().max()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        # Half a step of the scale on each rank.
        torch.testing.assert_close(found[name], mean, rtol=0, atol=peak.item() / 250 + 1e-6)


@distributed(world_sizes=(2, 3, 4), only_fsdp2x=True)
@pytest.mark.parametrize("name", ["int8", "bfloat16"])
@over_both
def test_gradients_are_what_the_format_says(ctx, name, transport):
    whole = reference()
    model = sharded(ctx, whole, transport)
    model.set_wire_dtype(gradients=name)
    feedback = {key: ErrorFeedback(name, ctx.world) for key, _ in whole.named_parameters()}
    for step in range(4):
        accumulates = step == 2
        if accumulates:
            model.set_requires_gradient_sync(False)
            loss_of(model, ctx.rank, 50).backward()
            loss_of(whole, ctx.rank, 50).backward()
            model.set_requires_gradient_sync(True)
        loss_of(model, ctx.rank, step).backward()
        loss_of(whole, ctx.rank, step).backward()
        expected = {
            key: mean_of_ranks(feedback[key].sent(param.grad), ctx.world) for key, param in whole.named_parameters()
        }
        same(grads(model), expected, f"step {step}")
        model.zero_grad()
        whole.zero_grad()


@distributed(world_sizes=(2, 3), only_fsdp2x=True)
def test_encoded_once_for_a_forward_and_its_backward(ctx):
    model = sharded(ctx, reference())
    model.set_wire_dtype(weights="int8")
    loss_of(model, ctx.rank).backward()
    stats = root_stats(model)
    assert stats["gathers"] == 5 and stats["wire_encodings"] == 3  # two blocks twice, and the root
    before = as_gathered(model.blocks[0])["up.weight"]
    loss = loss_of(model, ctx.rank)
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2)  # between a forward and its backward
    loss.backward()
    assert root_stats(model)["wire_encodings"] == 3 + 1 + 3 + 1
    same(as_gathered(model.blocks[0])["up.weight"], 2 * before)
    loss_of(model, ctx.rank, 1).backward()
    weight = params(model)["blocks.0.up.weight"]
    model.blocks[0].unshard()
    same(model.blocks[0].up.weight.detach().clone(), gathered(weight, "int8", ctx.world))
    model.blocks[0].reshard()
    with torch.no_grad():
        model.blocks[0].up.weight.to_local().data.mul_(3)  # no version tells of it
    model.blocks[0].unshard()
    same(model.blocks[0].up.weight.detach().clone(), gathered(params_while(model, weight), "int8", ctx.world))


def params_while(model, weight):
    model.blocks[0].reshard()
    tripled = params(model)["blocks.0.up.weight"]
    model.blocks[0].unshard()
    same(tripled, 3 * weight)
    return tripled


@distributed(world_sizes=(2, 4), only_fsdp2x=True)
@pytest.mark.parametrize("weights, gradients, most", [("int8", "int8", 0.33), ("fp8", "bfloat16", 0.45)])
@over_both
def test_bytes_are_counted(ctx, weights, gradients, most, transport):
    sent, totals = [], []

    def counted(name):
        function = getattr(dist, name)

        def call(output, source, *args, **kwargs):
            # Around a ring everybody's part but one goes through a rank; of an all-to-all all but its own.
            own = source.nbytes if "gather" in name else source.nbytes // ctx.world
            sent.append(own * (ctx.world - 1))
            return function(output, source, *args, **kwargs)

        return call

    names = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")
    with pytest.MonkeyPatch.context() as patched:
        for name in (*names, "all_to_all_single"):
            if hasattr(dist, name):
                patched.setattr(dist, name, counted(name))
        for formats in ({}, {"weights": weights, "gradients": gradients}):
            model = shard(ctx, Stack(num=2, width=64, hidden=96), UNITS, transport=transport)
            model.set_wire_dtype(**formats)
            predicted = fsdp2x.memory_report(model)
            for _ in range(2):
                sent.clear()
                model.zero_grad()
                model(torch.randn(3, 64)).square().mean().backward()
            report = fsdp2x.memory_report(model)
            assert (report.traffic, report.wire_bytes) == (predicted.traffic, predicted.wire_bytes)
            if formats or transport == "process_group":  # a device gathers whole numbers in place, in another call
                assert sum(sent) == report.traffic.total_bytes
            assert report.scratch_bytes == report.measured["scratch_bytes"]
            assert report.wire_bytes == report.measured["wire_bytes"]
            keeps = formats.get("gradients") == "int8" or formats and transport == "process_group"
            assert (report.wire_bytes > 0) == bool(keeps)
            totals.append(report.traffic.total_bytes)
    assert totals[1] < most * totals[0]


@distributed(world_sizes=(2,), only_fsdp2x=True)
@over_both
def test_errors_go_with_what_is_dropped(ctx, transport):
    model = sharded(ctx, reference(), transport)
    model.set_wire_dtype(gradients="int8")

    def gradient():
        model.zero_grad()
        loss_of(model, ctx.rank).backward()
        return grads(model)

    first, second = gradient(), gradient()
    assert any((first[key] != second[key]).any() for key in first)
    model.reset_iter_state()
    same(gradient(), first, "after reset_iter_state")
    model.zero_grad()
    fsdp2x.sleep(model)
    fsdp2x.wake(model)
    same(gradient(), first, "after sleep")
    gradient()
    model.set_wire_dtype()
    gradient()
    model.set_wire_dtype(gradients="int8")
    same(gradient(), first, "after another setting")
    gradient()
    model.blocks[0].up.weight.requires_grad_(False)
    frozen = {key: grad for key, grad in gradient().items() if key.startswith("blocks.0")}
    assert frozen.pop("blocks.0.up.weight") is None
    same(frozen, {key: first[key] for key in frozen}, "after freezing")


@distributed(world_sizes=(2,), only_fsdp2x=True)
@over_both
def test_lost_numbers_are_seen_and_do_not_stay(ctx, transport):
    model = sharded(ctx, reference(), transport)
    model.set_wire_dtype(gradients="int8")
    loss_of(model, ctx.rank).backward()
    model.zero_grad()
    (loss_of(model, ctx.rank) * float("inf")).backward()
    assert not torch.isfinite(grads(model)["blocks.0.up.weight"]).all()
    model.zero_grad()
    loss_of(model, ctx.rank).backward()
    assert all(torch.isfinite(grad).all() for grad in grads(model).values())


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_ranks_of_one_host_go_over_the_process_group(ctx):
    model = shard(ctx, reference(), UNITS)
    loss_of(model, ctx.rank).backward()
    engine = fsdp2x.fully_shard.state(model).groups[0].engine
    assert engine.transport_name == "shm"
    model.set_wire_dtype(weights="int8")
    assert engine.transport_name == "process_group"
    model.zero_grad()
    loss_of(model, ctx.rank).backward()
    assert root_stats(model)["wire_encodings"] > 0


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_refusals(ctx):
    model = sharded(ctx, reference())
    for wrong in ({"weights": "int4"}, {"weights": "bfloat16"}, {"gradients": "fp8"}):
        with pytest.raises(ValueError, match="set_wire_dtype: .* expected 'int8'"):
            model.set_wire_dtype(**wrong)
    with pytest.raises(TypeError, match="weights must be"):
        model.set_wire_dtype(weights=torch.int8)
    narrow = sharded(ctx, reference(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="torch.bfloat16.*reduce_dtype=torch.float32"):
        narrow.set_wire_dtype(gradients="int8")
    loss_of(narrow, ctx.rank).backward()  # as it was
    shared = shard(ctx, reference(), UNITS, transport="shm")
    shared.set_wire_dtype(weights="fp8")
    with pytest.raises(ValueError, match='got transport="shm"'):
        loss_of(shared, ctx.rank)
    alone = sharded(ctx, reference())
    alone.set_separate_reduce_scatter_group()
    with pytest.raises(ValueError, match="set_separate_reduce_scatter_group"):
        alone.set_wire_dtype(gradients="int8")
    alone.set_wire_dtype(weights="int8")
    loss_of(alone, ctx.rank).backward()
    loss = loss_of(model, ctx.rank)
    hook = model.blocks[0].register_forward_hook(lambda *_: model.set_wire_dtype(weights="int8"))
    with pytest.raises(RuntimeError, match="cannot be set during"):
        loss_of(model, ctx.rank)
    hook.remove()
    loss.backward()


@distributed(world_sizes=(4,), only_fsdp2x=True)
def test_fewer_ranks_keep_whole_numbers(ctx):
    model = sharded(ctx, reference(), reshard_after_forward=2)
    with pytest.raises(NotImplementedError, match="reshards to 2 ranks after forward"):
        model.set_wire_dtype(weights="int8")
    model.set_wire_dtype(gradients="int8")
    loss_of(model, ctx.rank).backward()


@distributed(world_sizes=(2,), timeout=40, only_fsdp2x=True)
def test_ranks_that_disagree_are_told(ctx):
    model = shard(ctx, reference(), UNITS, transport="process_group", timeout=datetime.timedelta(seconds=10))
    model.set_wire_dtype(weights="int8" if ctx.rank == 0 else "fp8")
    with pytest.raises(ValueError, match="int8.* fp8"):
        loss_of(model, ctx.rank)
