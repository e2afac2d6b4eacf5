"""Optimizers and clipping of sharded models by the twins of the device's kernels, against the CPU's kernels."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2x
from device_twins import clip_by_twins, step_by_twins
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import full, only_fsdp2x, params, same, shard

KINDS = {
    "adamw": (fsdp2x.optim.AdamW, {"lr": 1e-2}),
    "adamw bf16": (fsdp2x.optim.AdamW, {"lr": 1e-2, "moments_dtype": torch.bfloat16}),
    "adamw int8": (fsdp2x.optim.AdamW, {"lr": 1e-2, "moments_dtype": "int8"}),
    "lion": (fsdp2x.optim.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "sgd": (fsdp2x.optim.SGD, {"lr": 0.1}),
    "sgd nesterov": (fsdp2x.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


def loss_of(model, rank, step, width=6):
    return model(inputs(rank, step, width=width)).square().mean()


def gradients(model):
    return {name: param.grad.to_local() for name, param in model.named_parameters() if param.grad is not None}


@distributed(world_sizes=(1, 2, 3))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.each_value
def test_steps_have_the_bits_of_the_cpu(ctx, kind):
    """Uneven and empty shards at three ranks, a parameter without a gradient, clipping before every step."""
    only_fsdp2x(ctx)
    make, options = KINDS[kind]
    model = Stack()
    models = [shard(ctx, copy.deepcopy(model), STACK_UNITS) for _ in range(2)]
    here, there = (make(one.parameters(), **options) for one in models)
    step_by_twins(there)
    for step in range(4):
        for one in models:
            loss_of(one, ctx.rank, step).backward()
            if step == 1:
                one.blocks[1].up.weight.grad = None
        norm = fsdp2x.clip_grad_norm_(models[0].parameters(), 0.1)
        with clip_by_twins():
            same(fsdp2x.clip_grad_norm_(models[1].parameters(), 0.1), norm, "norm", rtol=0.0, atol=0.0)
        same(gradients(models[1]), gradients(models[0]), "clipped gradients")
        for optimizer in (here, there):
            optimizer.step()
            optimizer.zero_grad()
        same(params(models[1]), params(models[0]), "parameters")
    same(full(there.state_dict()), full(here.state_dict()), "states")
    assert there._on_device.num_plans >= 2 and here._on_device.num_plans == 0


def clip_both(model, max_norm, norm_type=2.0):
    """Clips the same gradients by the CPU's kernels and by the twins; returns the norm and the number of plans."""
    before = {name: grad.clone() for name, grad in gradients(model).items()}
    expected = fsdp2x.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    theirs = {name: grad.clone() for name, grad in gradients(model).items()}
    for name, grad in gradients(model).items():
        grad.copy_(before[name])
    with clip_by_twins() as kept:
        norm = fsdp2x.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    same(norm, expected, "norm", rtol=1e-7, atol=0.0)
    same(gradients(model), theirs, "gradients", rtol=1e-6, atol=0.0)
    return norm, kept.num_plans


@distributed(world_sizes=(4,))
def test_replicas_are_counted_once(ctx):
    only_fsdp2x(ctx)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(ctx, Stack(), STACK_UNITS, mesh=mesh)
    loss_of(model, ctx.rank, 0).backward()
    whole = torch.cat([param.grad.full_tensor().flatten() for param in model.parameters()])
    norm, _ = clip_both(model, 0.05)
    same(norm, torch.linalg.vector_norm(whole), "norm", rtol=1e-5, atol=0.0)


@distributed(world_sizes=(4,))
def test_gradients_of_several_meshes(ctx):
    """Weights cut by both axes, biases by one: a launch per set of process groups, an all-reduce per group."""
    only_fsdp2x(ctx)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Stack(width=8, hidden=12)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = shard(ctx, model, STACK_UNITS, mesh=mesh["dp"])
    loss_of(model, mesh["dp"].get_local_rank(), 0, width=8).backward()
    whole = torch.cat([param.grad.full_tensor().flatten() for param in model.parameters()])
    norm, num_plans = clip_both(model, 0.01)
    assert norm > 0.01 and num_plans >= 2
    same(norm, torch.linalg.vector_norm(whole), "norm", rtol=1e-5, atol=0.0)


@distributed(world_sizes=(2,))
def test_partial_gradients_are_scaled_where_they_lie(ctx):
    """Summed by torch after the reduction that they wait for; the plan stays the same for sum and product."""
    only_fsdp2x(ctx)
    mesh = init_device_mesh("cpu", (ctx.world,))
    torch.manual_seed(0)
    model = nn.ParameterDict()
    model["whole"] = nn.Parameter(distribute_tensor(torch.randn(4, 6), mesh, [Replicate()]))
    model["plain"] = nn.Parameter(torch.randn(5))
    model["whole"].grad = DTensor.from_local(torch.full((4, 6), float(ctx.rank + 1)), mesh, [Partial()])
    model["plain"].grad = torch.full((5,), 2.0)
    with clip_by_twins() as kept:
        norm = fsdp2x.clip_grad_norm_(list(model.parameters()), 1.0)
        assert kept.num_plans == 2
    expected = torch.tensor(24 * 9.0 + 5 * 4.0).sqrt()
    same(norm, expected, "norm", rtol=1e-6, atol=0.0)
    same(model["whole"].grad.to_local(), torch.full((4, 6), ctx.rank + 1.0) / expected, rtol=1e-5, atol=0.0)
    same(model["plain"].grad, torch.full((5,), 2.0) / expected, rtol=1e-5, atol=0.0)


@distributed(world_sizes=(2, 3))
def test_a_rank_without_gradients_takes_part(ctx):
    only_fsdp2x(ctx)
    model = shard(ctx, Stack(), STACK_UNITS)
    loss_of(model, ctx.rank, 0).backward()
    if ctx.rank == ctx.world - 1:
        model.zero_grad()
    own = sum((grad.double().square().sum() for grad in gradients(model).values()), torch.zeros(()).double())
    torch.distributed.all_reduce(own)
    with clip_by_twins():
        norm = fsdp2x.clip_grad_norm_(model.parameters(), 0.01)
    same(norm.double(), own.sqrt(), "norm", rtol=1e-6, atol=0.0)


@distributed(world_sizes=(2,))
def test_an_infinity_on_one_rank_is_an_error_on_all(ctx):
    only_fsdp2x(ctx)
    model = shard(ctx, Stack(), STACK_UNITS)
    loss_of(model, ctx.rank, 0).backward()
    if ctx.rank == 1:
        next(grad for grad in gradients(model).values() if grad.numel() > 0).view(-1)[0] = float("inf")
    before = {name: grad.clone() for name, grad in gradients(model).items()}
    with clip_by_twins(), pytest.raises(RuntimeError, match="is inf"):
        fsdp2x.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    same(gradients(model), before, "gradients")
