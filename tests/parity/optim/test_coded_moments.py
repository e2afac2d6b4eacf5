"""8-bit moments: blocks that end with a rank's shard, states that load at other world sizes and dtypes, and losses."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import fsdp2x
from fsdp2x.plan.plan import plan_memory
from harness import distributed
from models import STACK_UNITS, Stack, inputs, train
from reference import changes, full, same, shard

INT8 = {"lr": 1e-2, "moments_dtype": "int8"}


def make(ctx, dtype=torch.float32, **options):
    model = shard(ctx, Stack().to(dtype), STACK_UNITS)
    return model, fsdp2x.optim.AdamW(model.parameters(), **{**INT8, **options})


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def step_of_code(value: torch.Tensor, largest: float) -> torch.Tensor:
    """How far apart codes are at most around values of a block with this largest magnitude."""
    root = (value.abs() / largest) ** 0.25
    return largest * ((root + 1 / 127) ** 4 - (root - 1 / 127).clamp(min=0) ** 4)


@distributed(world_sizes=(1, 2, 3, 4), only_fsdp2x=True)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "max_grad_norm": 0.3}])
def test_blocks_end_with_the_shard(ctx, options):
    """A rank steps like an optimizer over its local tensors alone, also with short and empty shards."""
    model, optimizer = make(ctx, **options)
    alone = [nn.Parameter(param.to_local().clone()) for param in model.parameters()]
    other = fsdp2x.optim.AdamW(alone, **{**INT8, **options, "max_grad_norm": None})
    for number in range(4):
        model(inputs(ctx.rank, number)).square().mean().backward()
        grads = [param.grad.to_local().clone() for param in model.parameters()]
        optimizer.step()
        scale = 1.0
        if optimizer.grad_norm is not None:
            scale = torch.clamp(0.3 / (optimizer.grad_norm + 1e-6), max=1.0)
        for param, grad in zip(alone, grads, strict=True):
            param.grad = grad * scale
        other.step()
        optimizer.zero_grad()
    for param, plain in zip(model.parameters(), alone, strict=True):
        same(param.to_local(), plain.detach(), "parameters")
        state = optimizer.state[param]
        assert state.keys() == other.state[plain].keys()
        for name, value in state.items():
            same(local(value), other.state[plain][name], name)
        assert state["exp_avg_codes"].dtype is torch.uint8 and local(state["exp_avg_codes"]).shape == plain.shape
        assert state["exp_avg_sq_scales"].numel() == math.ceil(plain.numel() / 256)


@distributed(world_sizes=(1, 2, 3), only_fsdp2x=True)
def test_states_go_to_other_worlds_and_dtypes(ctx):
    """Full states load into an unsharded model, where blocks begin elsewhere, and into float32 unchanged."""
    model, optimizer = make(ctx)
    train(ctx, model, optimizer)
    options = StateDictOptions(full_state_dict=True)
    whole = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    alone = Stack()
    for moments_dtype in (None, torch.float32, "int8"):
        other = fsdp2x.optim.AdamW(alone.parameters(), lr=1e-2, moments_dtype=moments_dtype)
        names = [name for name, _ in alone.named_parameters()]
        groups = [{**other.state_dict()["param_groups"][0], "params": list(range(len(names)))}]
        state = {number: copy.deepcopy(whole[name]) for number, name in enumerate(names)}
        other.load_state_dict({"state": state, "param_groups": groups})
        found = other.state_dict()["state"]
        for number, name in enumerate(names):
            for moment in ("exp_avg", "exp_avg_sq"):
                value, expected = found[number][moment], whole[name][moment]
                assert value.dtype is torch.float32
                if moments_dtype == "int8":
                    most = step_of_code(expected, expected.abs().max().item())
                    assert ((value - expected).abs() <= most).all(), f"{name}: {moment}"
                    assert ((value > 0) == (expected > 0)).all() or moment == "exp_avg", "no square becomes zero"
                else:
                    same(value, expected, f"{name}: {moment}")
    same(get_optimizer_state_dict(model, optimizer, options=options)["state"], whole, "saving changes nothing")


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_an_optimizer_from_before_sharding(ctx):
    plain = Stack()
    optimizer = fsdp2x.optim.AdamW(plain.parameters(), **INT8)
    plain(inputs(0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    model = shard(ctx, plain, STACK_UNITS)
    fsdp2x.rebind_optimizer(optimizer, model)
    for number, (name, param) in enumerate(model.named_parameters()):
        assert optimizer.state[param]["exp_avg_codes"].placements == param.placements
        value, expected = full(optimizer.state_dict()["state"][number]["exp_avg"]), before[number]["exp_avg"]
        assert ((value - expected).abs() <= step_of_code(expected, expected.abs().max().item())).all(), name
    assert changes(train(ctx, model, optimizer))


@distributed(world_sizes=(2, 3), only_fsdp2x=True)
def test_reports_and_plans_count_their_bytes(ctx):
    model, optimizer = make(ctx)
    expected = sum(
        2 * (param.to_local().numel() + 4 * math.ceil(param.to_local().numel() / 256)) + 4
        for param in model.parameters()
    )
    for _ in range(2):  # before the first step, and after it
        assert fsdp2x.memory_report(model, optimizer).optimizer_bytes == expected
        train(ctx, model, optimizer, range(1))
    held = {
        tensor.data_ptr(): tensor.numel() * tensor.itemsize
        for state in optimizer.state.values()
        for tensor in map(local, state.values())
        if tensor.numel()
    }
    assert sum(held.values()) == expected
    if ctx.rank == 0:
        plan = plan_memory(Stack(), ctx.world, transport="shm", auto_wrap=False, optimizer="adamw_int8")
        assert plan.optimizer_bytes == expected


def test_a_state_of_another_shape_is_refused():
    param = nn.Parameter(torch.zeros(3))
    optimizer = fsdp2x.optim.AdamW([param], **INT8)
    param.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(5)
    with pytest.raises(ValueError, match="local shape"):
        optimizer.load_state_dict(state)
