"""Shared code of the offload tests: policies, the loss, and the unsharded model with the expected results."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fsdp2x
from models import STACK_UNITS, inputs
from reference import grads, mean_of_ranks, same, shard
from streams import WIDTH

MODES = ("none", "optimizer", "gradients", "all")
OURS = fsdp2x.optim.AdamW
OPTIMIZERS = {  # that do not know the host's state
    "torch's AdamW": torch.optim.AdamW,
    "torch's SGD": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "local RMSprop": lambda params, lr: fsdp2x.local_optimizer(torch.optim.RMSprop(params, lr=lr)),
}
OFFLOAD = CPUOffloadPolicy(pin_memory=False)  # pinning asks a driver
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 sums": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}
# Both ways to have the gradients on the host.
host_modes = pytest.mark.parametrize(
    "offload", [OFFLOAD, fsdp2x.HostOffloadPolicy("gradients", pin_memory=False)], ids=["all", "gradients"]
)
CLOSE = {"fp32": {"rtol": 1e-4, "atol": 1e-6}}
LOOSE = {"rtol": 0.2, "atol": 2e-2}


def loss_of(model, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step, width=WIDTH)).square().mean()


def expect(reference, ctx, step: int) -> None:
    mean_of_ranks(reference, lambda m, rank: loss_of(m, rank, step), ctx.world)


def agree(ctx, reference, model, step: int) -> None:
    """A backward of both: the gradients are the same."""
    expect(reference, ctx, step)
    loss_of(model, ctx.rank, step).backward()
    same(grads(model), grads(reference), "gradients", rtol=1e-4, atol=1e-6)


def num_of(entries: list[tuple], operation: str, lane: str) -> int:
    return sum(entry[:2] == (operation, lane) for entry in entries)


def policy(mode: str) -> fsdp2x.HostOffloadPolicy:
    return fsdp2x.HostOffloadPolicy(mode, pin_memory=False)  # pinning asks a driver


def sharded(ctx, model, mode: str, **options) -> nn.Module:
    options = {"transport": "streams", "offload_policy": policy(mode), **options}
    return shard(ctx, copy.deepcopy(model), STACK_UNITS, **options)


def train(model, optimizer, ctx, steps, max_norm: float | None = 0.1) -> None:
    for step in steps:
        loss_of(model, ctx.rank, step).backward()
        if max_norm is not None:
            fsdp2x.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()


def moments(optimizer) -> dict:
    return {
        f"{number}.{name}": (value.to_local() if isinstance(value, DTensor) else value).clone()
        for number, state in enumerate(optimizer.state.values())
        for name, value in state.items()
        if name != "step"
    }


def transfers(entries: list[tuple], lane: str = "copy_in") -> list[tuple]:
    return [entry for entry in entries if entry[:2] == ("transfer", lane)]
