"""fsdp2x.optim against torch's on the same sharded model, and on plain tensors."""

import copy

import pytest
import torch
from torch import nn

import fsdp2x
import models
from harness import distributed
from models import STACK_UNITS, Stack, train
from reference import TORCH_MINOR, full, only_fsdp2x, params, same, shard

CLOSE = {"rtol": 1e-6, "atol": 1e-6}
# Which multiply-adds torch rounds once differs between its versions; the kernels follow 2.15.
EXACT = {} if TORCH_MINOR == 15 and torch.backends.cpu.get_cpu_capability() != "DEFAULT" else CLOSE

ADAMW = {
    "default": {},
    "decay": {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6},
    "no_decay": {"weight_decay": 0.0},
    "amsgrad": {"amsgrad": True, "lr": 0.05},
    "maximize": {"maximize": True, "weight_decay": 0.2},
    "slow_beta": {"betas": (0.2, 0.9)},
    "lr_tensor": {"lr": torch.tensor(0.013)},
}


def snapshot(model, optimizer):
    return params(model), full(optimizer.state_dict())


def twins_of(ctx):
    only_fsdp2x(ctx)
    return [shard(ctx, Stack(), STACK_UNITS) for _ in range(2)]


@distributed(world_sizes=(1, 2, 3, 4))
@pytest.mark.parametrize("name", ADAMW)
def test_steps_are_torchs(ctx, name):
    """States to the bit; torch's square root is not correctly rounded, so parameters are within 1e-6.

    Four ranks leave a shard of the head empty.
    """
    ours, theirs = twins_of(ctx)
    options = {"lr": 1e-2, **copy.deepcopy(ADAMW[name])}
    optimizer = fsdp2x.optim.AdamW(ours.parameters(), **options)
    reference = torch.optim.AdamW(theirs.parameters(), **copy.deepcopy(options))
    before = params(ours)
    for number in range(4):
        models.step(ctx, theirs, None, number)
        for param, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            param.grad = other.grad
        optimizer.step()
        reference.step()
        theirs.zero_grad()
    same(full(optimizer.state_dict()), full(reference.state_dict()), **EXACT)
    same(params(ours), params(theirs), **CLOSE)
    assert all(not torch.equal(before[name], value) for name, value in params(ours).items())


@distributed(world_sizes=(2,))
def test_groups_frozen_parameters_and_missing_gradients(ctx):
    ours, theirs = twins_of(ctx)
    snapshots = []
    for model, optimizer_class in ((ours, fsdp2x.optim.AdamW), (theirs, torch.optim.AdamW)):
        model.norm.requires_grad_(False)
        biases = [param for param in model.parameters() if param.ndim == 1]
        weights = [param for param in model.parameters() if param.ndim > 1]
        groups = [{"params": biases, "weight_decay": 0.0, "lr": 0.03}, {"params": weights, "amsgrad": True}]
        optimizer = optimizer_class(groups, lr=1e-2)
        for number in range(4):
            models.step(ctx, model, None, number)
            if number % 2 == 0:
                model.blocks[1].up.weight.grad = None  # so that it has fewer steps
            optimizer.step()
            optimizer.zero_grad()
        snapshots.append(snapshot(model, optimizer))
    same(snapshots[0], snapshots[1], **CLOSE)
    counts = {state["step"].item() for state in snapshots[0][1]["state"].values()}
    assert counts == {2.0, 4.0}


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_closure_and_copies(ctx):
    model = shard(ctx, Stack(), STACK_UNITS)
    optimizer = fsdp2x.optim.AdamW(model.parameters(), lr=1e-2, moments_dtype=torch.float32)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        return models.step(ctx, model)

    losses = [optimizer.step(closure) for _ in range(3)]
    assert losses[2] < losses[0]
    assert copy.copy(optimizer).moments_dtype is torch.float32


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_the_kernel_steps_every_shard(ctx):
    """Nothing falls to torch's functions on a sharded float32 model, and autograd sees the change."""
    model = shard(ctx, Stack(), STACK_UNITS)
    optimizer = fsdp2x.optim.AdamW(model.parameters())
    optimizer._step_by_torch = None
    versions = [param._version for param in model.parameters()]
    train(ctx, model, optimizer)
    assert all(param._version > version for param, version in zip(model.parameters(), versions, strict=True))


# --- plain tensors ---------------------------------------------------------------------------------------------------


def plain_pair(dtype=torch.float32, sizes=((5, 7), (0, 3), (33,), ())):
    torch.manual_seed(0)
    first = [nn.Parameter(torch.randn(size, dtype=torch.float32).to(dtype)) for size in sizes]
    return first, [nn.Parameter(param.detach().clone()) for param in first]


def set_grads(*lists, step):
    for tensors in lists:
        torch.manual_seed(100 + step)
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape).to(tensor.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_plain_parameters(dtype):
    """Other dtypes are torch's own computation."""
    ours, theirs = plain_pair(dtype)
    optimizer = fsdp2x.optim.AdamW(ours, lr=1e-2, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    for step in range(4):
        set_grads(ours, theirs, step=step)
        optimizer.step()
        reference.step()
    exact, close = (EXACT, CLOSE) if dtype is torch.float32 else ({}, {})
    same([param.detach() for param in ours], [param.detach() for param in theirs], **close)
    same(optimizer.state_dict(), reference.state_dict(), **exact)


@pytest.mark.parametrize("name", ["capturable", "differentiable"])
def test_unsupported_arguments_are_refused(name):
    param = nn.Parameter(torch.ones(3))
    with pytest.raises(NotImplementedError, match=name):
        fsdp2x.optim.AdamW([param], **{name: True})
    with pytest.raises(NotImplementedError, match=name):
        fsdp2x.optim.AdamW([{"params": [param], name: True}])
    state = torch.optim.AdamW([param]).state_dict()
    state["param_groups"][0][name] = True
    with pytest.raises(NotImplementedError, match=name):
        fsdp2x.optim.AdamW([param]).load_state_dict(state)
