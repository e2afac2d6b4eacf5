"""Lion over shards: bit for bit a plain loop over the unsharded model."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import fsdp2x
from fsdp2x.optim import Lion
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import both_transports, changes, full, only_fsdp2x, params, same, shard

SETTINGS = {
    "plain": {},
    "decay": {"weight_decay": 0.3, "betas": (0.95, 0.98)},
    "maximize": {"maximize": True, "lr": torch.tensor(3e-3)},
}


class PlainLion:
    """Written from the paper's algorithm 2, over whole tensors."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        self.params, self.lr, self.betas = list(params), float(lr), betas
        self.weight_decay, self.maximize = weight_decay, maximize
        self.averages = [torch.zeros_like(param) for param in self.params]

    @torch.no_grad()
    def step(self, grads) -> None:
        for stored in zip(self.params, self.averages, grads, strict=True):
            param, average, grad = (tensor.float() for tensor in stored)
            grad = -grad if self.maximize else grad
            param.mul_(1 - self.lr * self.weight_decay)
            direction = average.mul(self.betas[0]).add_(grad, alpha=1 - self.betas[0])
            param.add_(direction.sign_(), alpha=-self.lr)
            average.mul_(self.betas[1]).add_(grad, alpha=1 - self.betas[1])
            stored[0].copy_(param)
            stored[1].copy_(average)


def loss_of(model, rank, step=0):
    return model(inputs(rank, step).to(next(model.parameters()).dtype)).square().mean()


@distributed(world_sizes=(1, 2, 3, 4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETTINGS)
@both_transports
def test_steps_are_the_plain_ones(ctx, dtype, name, transport):
    only_fsdp2x(ctx)
    options = {"lr": 1e-2, **SETTINGS[name]}
    reference = Stack().to(dtype)
    model = shard(ctx, copy.deepcopy(reference), STACK_UNITS, transport=transport)
    optimizer, plain = Lion(model.parameters(), **options), PlainLion(reference.parameters(), **options)
    losses = []
    for step in range(4):
        loss = loss_of(model, ctx.rank, step)
        loss.backward()
        losses.append(loss.detach())
        plain.step([full(param.grad) for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        same(params(model), params(reference), f"step {step}")
    averages = [full(optimizer.state[param]["exp_avg"]) for param in model.parameters()]
    same(averages, plain.averages, "averages")
    assert changes(losses)


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("placement", [0, 1])
def test_columns_clipping_and_reports(ctx, placement):
    only_fsdp2x(ctx)

    def cut(param):  # FSDP2 shards dims after the first only if they are even
        return Shard(placement if param.ndim > 1 and param.shape[placement] % ctx.world == 0 else 0)

    models = [shard(ctx, Stack(), STACK_UNITS, shard_placement_fn=cut) for _ in range(2)]
    inside, outside = Lion(models[0].parameters(), lr=1e-2, max_grad_norm=0.3), Lion(models[1].parameters(), lr=1e-2)
    expected = sum(param.to_local().numel() * 4 for param in models[0].parameters())
    assert fsdp2x.memory_report(models[0], inside).optimizer_bytes == expected
    for step in range(3):
        for model in models:
            loss_of(model, ctx.rank, step).backward()
        norm = fsdp2x.clip_grad_norm_(models[1].parameters(), 0.3)
        for optimizer in (inside, outside):
            optimizer.step()
            optimizer.zero_grad()
        same(inside.grad_norm, norm, "norm")
        same(params(models[0]), params(models[1]), f"step {step}")
    assert fsdp2x.memory_report(models[0], inside).optimizer_bytes == expected


@distributed(world_sizes=(2,))
def test_an_optimizer_from_before_sharding(ctx):
    only_fsdp2x(ctx)
    plain = Stack()
    optimizer = Lion(plain.parameters(), lr=1e-2)
    twin = copy.deepcopy(plain)
    reference = PlainLion(twin.parameters(), lr=1e-2)
    loss_of(plain, 0).backward()
    reference.step([param.grad for param in plain.parameters()])
    optimizer.step()
    optimizer.zero_grad()
    model = shard(ctx, plain, STACK_UNITS)
    with pytest.raises(RuntimeError, match="rebind_optimizer"):
        loss_of(model, ctx.rank, 1).backward()
        optimizer.step()
    fsdp2x.rebind_optimizer(optimizer, model)
    reference.step([full(param.grad) for param in model.parameters()])
    optimizer.step()
    same(params(model), params(twin), "parameters")


def test_what_is_refused_and_what_is_lost():
    param = nn.Parameter(torch.ones(5))
    with pytest.raises(ValueError, match="optim.Lion: lr and weight_decay must be at least 0, got -1"):
        Lion([param], lr=-1.0)
    with pytest.raises(ValueError, match=r"optim.Lion: betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"):
        Lion([param], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="weight_decay must be at least 0, got .* -0.1"):
        Lion([param], weight_decay=-0.1)
    with pytest.raises(
        NotImplementedError, match=r"optim.Lion: capturable=True is not supported. Pass capturable=False\.$"
    ):
        Lion([{"params": [param], "capturable": True}])
    for dtype in (torch.float32, torch.float64):
        lost = nn.Parameter(torch.ones(5, dtype=dtype))
        optimizer = Lion([lost], lr=0.1)
        lost.grad = torch.tensor([1.0, -1.0, 0.0, float("nan"), float("inf")], dtype=dtype)
        optimizer.step()
        expected = torch.tensor([0.9, 1.1, 1.0, float("nan"), 0.9], dtype=dtype)
        torch.testing.assert_close(lost.detach(), expected, equal_nan=True)
