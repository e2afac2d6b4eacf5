"""fsdp2x's optimizers step complex weights. `fsdp2x.conformance` trains them with torch's."""

import pytest
import torch
from torch import nn

import fsdp2x
from harness import distributed
from models import inputs
from reference import shard, train_alike


class Complex(nn.Module):
    """Rows and columns that ranks do not divide."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(7, 6, dtype=torch.complex64))
        self.second = nn.Parameter(torch.randn(3, 7, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x):
        x = x.to(self.first.dtype) @ self.first.T * 1j
        return (x @ self.second.conj().T).abs() * self.phase.angle().sum()


# fsdp2x's optimizer, and torch's.
OPTIMIZERS = {
    "AdamW": (
        lambda params: fsdp2x.optim.AdamW(params, lr=1e-2),
        lambda params: torch.optim.AdamW(params, lr=1e-2),
    ),
    "SGD": (
        lambda params: fsdp2x.local_optimizer(torch.optim.SGD(params, lr=1e-2, momentum=0.9)),
        lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    ),
}


@distributed(world_sizes=(2,), only_fsdp2x=True)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_and_clipping(ctx, name):
    """As the unsharded model; torch's AdamW is wrong over DTensors whose rows the ranks do not divide."""
    ours, plain = shard(ctx, Complex()), Complex()
    optimizers = [make(model.parameters()) for make, model in zip(OPTIMIZERS[name], (ours, plain), strict=True)]

    def clip():
        fsdp2x.clip_grad_norm_(ours.parameters(), 0.1)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)

    loss_of = lambda m, *of: m(inputs(*of)).square().mean()  # noqa: E731
    train_alike(ctx, plain, ours, loss_of, optimizers, before_step=clip, rtol=1e-4, atol=1e-5)
