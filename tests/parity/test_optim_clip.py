"""Steps that clip by themselves (``max_grad_norm``) against clipping first and stepping then."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import fsdp2x
from device_twins import Operations, clip_by_twins, step_by_twins
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import full, only_fsdp2x, params, same, shard

KINDS = {
    "adamw": (fsdp2x.optim.AdamW, {"lr": 1e-2}),
    "adamw maximize": (fsdp2x.optim.AdamW, {"lr": 1e-2, "maximize": True, "amsgrad": True}),
    "sgd nesterov": (fsdp2x.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


def gradients(model):
    return {name: param.grad.to_local().clone() for name, param in model.named_parameters() if param.grad is not None}


@distributed(world_sizes=(1, 2, 3))
@pytest.mark.parametrize("by_twins", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_clipping_first(ctx, kind, by_twins):
    """Uneven and empty shards at three ranks, a parameter without a gradient, a norm that is small enough."""
    only_fsdp2x(ctx)
    make, options = KINDS[kind]
    model = Stack()
    models = [shard(ctx, copy.deepcopy(model), STACK_UNITS) for _ in range(2)]
    first = make(models[0].parameters(), **options)
    fused = make(models[1].parameters(), **options, max_grad_norm=0.1)
    assert fused.grad_norm is None
    if by_twins:
        step_by_twins(fused)
    for step, max_norm in enumerate((0.1, 1e9, 0.1)):
        fused.max_grad_norm = max_norm
        for one in models:
            one(inputs(ctx.rank, step)).square().mean().backward()
            if step == 1:
                one.blocks[1].up.weight.grad = None
        before = gradients(models[1])
        norm = fsdp2x.clip_grad_norm_(models[0].parameters(), max_norm)
        first.step()
        if by_twins:
            with clip_by_twins():
                fused.step()
        else:
            fused.step()
        same(fused.grad_norm, norm, "norm", rtol=0.0, atol=0.0)
        same(gradients(models[1]), before, "gradients, which stay as they are")
        same(params(models[1]), params(models[0]), "parameters")
        for optimizer in (first, fused):
            optimizer.zero_grad()
    same(full(fused.state_dict()), full(first.state_dict()), "states")


@distributed(world_sizes=(2,))
def test_gradients_that_torch_steps(ctx):
    """Of a parameter in f64 and of one whose gradient is cut otherwise: the norm is over both and a plain one."""
    mesh = init_device_mesh("cpu", (ctx.world,))
    torch.manual_seed(0)
    values = [torch.randn(4, 6), torch.randn(5, dtype=torch.float64), torch.randn(3)]
    results = []
    for fuses in (False, True):
        whole = nn.Parameter(distribute_tensor(values[0].clone(), mesh, [Replicate()]))
        wide, plain = (nn.Parameter(value.clone()) for value in values[1:])
        every = [whole, wide, plain]
        optimizer = fsdp2x.optim.AdamW(every, lr=1e-2, max_grad_norm=0.5 if fuses else None)
        whole.grad = DTensor.from_local(torch.full((4, 6), float(ctx.rank + 1)), mesh, [Partial()])
        wide.grad, plain.grad = torch.full((5,), 2.0, dtype=torch.float64), torch.full((3,), -1.0)
        norm = None if fuses else fsdp2x.clip_grad_norm_(every, 0.5)
        optimizer.step()
        norm = optimizer.grad_norm if fuses else norm
        same(norm, torch.tensor(24 * 9.0 + 5 * 4.0 + 3.0, dtype=torch.float64).sqrt(), "norm", rtol=1e-12, atol=0.0)
        results.append((full(every), full(optimizer.state_dict()["state"])))
    same(results[1], results[0], rtol=1e-6, atol=1e-7)


def plain_params(*dtypes):
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(37).to(dtype)) for dtype in dtypes]
    for param in made:
        param.grad = torch.randn(37).to(param.dtype)
    return made


def test_half_precision_gradients_are_not_rounded_again():
    """Clipped gradients in bf16 would lose bits: the step is that of their product with the factor in float32."""
    (param,) = plain_params(torch.bfloat16)
    wide = nn.Parameter(param.detach().float())
    wide.grad = param.grad.float()
    fused = fsdp2x.optim.AdamW([param], lr=1e-2, moments_dtype=torch.float32, max_grad_norm=0.3)
    first = fsdp2x.optim.AdamW([wide], lr=1e-2)
    norm = fsdp2x.clip_grad_norm_([wide], 0.3)
    fused.step()
    first.step()
    assert torch.equal(fused.grad_norm, norm)
    assert torch.equal(param, wide.to(torch.bfloat16))
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(fused.state[param][name], first.state[wide][name]), name


@pytest.mark.parametrize("make", [fsdp2x.optim.AdamW, fsdp2x.optim.SGD])
def test_the_host_does_not_read_a_devices_factor(make):
    every = plain_params(torch.float32, torch.float32)
    optimizer = step_by_twins(make(every, lr=1e-2, max_grad_norm=0.1))
    with clip_by_twins():
        optimizer.step()  # makes the state
        with Operations() as operations:
            optimizer.step()
    assert operations.counts.get("_local_scalar_dense", 0) == 0, operations.counts


@pytest.mark.parametrize("make", [fsdp2x.optim.AdamW, fsdp2x.optim.SGD])
def test_settings(make):
    every = plain_params(torch.float32)
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"{make.__name__}: max_grad_norm is {wrong}"):
            make(every, lr=1e-2, max_grad_norm=wrong)
    optimizer = make(every, lr=1e-2, max_grad_norm=0.1)
    optimizer.step()
    copied = pickle.loads(pickle.dumps(optimizer))
    assert copied.max_grad_norm == 0.1
    copied.load_state_dict(optimizer.state_dict())
    assert copied.max_grad_norm == 0.1
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.grad_norm == 0.0
    measures = make(every, lr=1e-2, max_grad_norm=math.inf)
    every[0].grad = torch.full((37,), 2.0)
    measures.step()
    same(measures.grad_norm, torch.tensor(2.0 * math.sqrt(37)), rtol=1e-6, atol=0.0)
    every[0].grad = torch.ones(37).to_sparse()
    with pytest.raises(RuntimeError, match="layout"):
        optimizer.step()


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("in_step", [True, False])
def test_a_clipped_model_can_move(ctx, in_step):
    """torch exchanges parameters on the way, which it can only where nobody refers to them weakly."""
    only_fsdp2x(ctx)
    model = shard(ctx, Stack(), STACK_UNITS)
    optimizer = fsdp2x.optim.AdamW(model.parameters(), max_grad_norm=0.1 if in_step else None)
    model(inputs(ctx.rank)).square().mean().backward()
    if in_step:
        optimizer.step()
    else:
        fsdp2x.clip_grad_norm_(model.parameters(), 0.1)
    before = params(model)
    model.to("cpu").float()
    same(params(model), before)
