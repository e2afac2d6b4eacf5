"""Complex weights train: their gradients are summed as pairs of real numbers."""

import pytest
import torch
from torch import nn

import fsdp2x
from harness import distributed
from models import inputs
from reference import both_transports, full, grads, mean_of_ranks, only_fsdp2x, params, parity, same, shard, train_alike


class Complex(nn.Module):
    """Rows and columns that ranks do not divide."""

    def __init__(self, dtype=torch.complex64):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(7, 6, dtype=dtype))
        self.second = nn.Parameter(torch.randn(3, 7, dtype=dtype))
        self.phase = nn.Parameter(torch.randn(5, dtype=dtype))

    def forward(self, x):
        x = x.to(self.first.dtype) @ self.first.T * 1j
        return (x @ self.second.conj().T).abs() * self.phase.angle().sum()


class Spectral(nn.Module):
    """A Fourier layer between real ones, in one unit with them: upstream wants one dtype in each unit."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.complex64) * 0.1)
        self.linear = nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        spectrum = torch.fft.rfft(self.linear(x), n=6, dim=0)
        return self.out(x + torch.fft.irfft(spectrum * self.weight[: spectrum.shape[0]], n=x.shape[0], dim=0))


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}
OURS = {
    "AdamW": lambda params: fsdp2x.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: fsdp2x.local_optimizer(torch.optim.SGD(params, lr=1e-2, momentum=0.9)),
}


def train(ctx, model, make, num=4):
    optimizer = make(model.parameters())
    results = []
    for number in range(num):
        model.set_requires_gradient_sync(number != 1)
        loss = model(inputs(ctx.rank, number)).square().mean()
        loss.backward()
        results += [loss.detach(), grads(model)]
        if number != 1:
            optimizer.step()
        if number == 2:
            optimizer.zero_grad()
    return results, params(model)


@distributed(world_sizes=(1, 2, 3))
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", OPTIMIZERS)
@both_transports
def test_complex_weights_train_as_upstreams(ctx, dtype, name, transport):
    parity(ctx, Complex(dtype), lambda model: train(ctx, model, OPTIMIZERS[name]), transport=transport)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("name", OURS)
def test_our_optimizers_step_them(ctx, name):
    """As the unsharded model; torch's AdamW is wrong over DTensors whose rows the ranks do not divide."""
    only_fsdp2x(ctx)
    ours, plain = shard(ctx, Complex()), Complex()
    optimizers = OURS[name](ours.parameters()), OPTIMIZERS[name](plain.parameters())
    train_alike(ctx, plain, ours, lambda m, *of: m(inputs(*of)).square().mean(), optimizers, rtol=1e-4, atol=1e-5)


@distributed(world_sizes=(2,))
@both_transports
def test_complex_beside_real_weights(ctx, transport):
    only_fsdp2x(ctx)
    torch.manual_seed(0)
    plain, ours = Spectral(), Spectral()
    ours.load_state_dict(plain.state_dict())
    shard(ctx, ours, transport=transport)
    ours(inputs(ctx.rank)).square().mean().backward()
    mean_of_ranks(plain, lambda model, rank: model(inputs(rank)).square().mean(), ctx.world)
    same(grads(ours), grads(plain), rtol=1e-5, atol=1e-6)
    norm = fsdp2x.clip_grad_norm_(ours.parameters(), 0.1)
    same(full(norm), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1), rtol=1e-5, atol=1e-6)
    same(grads(ours), grads(plain), rtol=1e-5, atol=1e-6)
