"""What the tests of offloading share: policies, the loss, and the unsharded model that says what is expected."""

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fsdp2x
from models import inputs
from reference import grads, mean_of_ranks, same
from streams import WIDTH

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
