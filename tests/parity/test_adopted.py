"""What modules register after `fully_shard` trains as in the unsharded model, from the values of the first rank."""

import pytest
import torch
from torch import nn

import fsdp2x
from harness import distributed
from models import inputs
from reference import adamw_of, both_transports, only_fsdp2x, same, shard, train_alike

EXACT = {"rtol": 1e-5, "atol": 1e-6}
UNITS = ("parts.0", "parts.1")


class Part(nn.Module):
    """A layer that uses what it is given later: a bias, a scale, adapters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)
        self.adapters = nn.ModuleDict()

    def forward(self, x):
        y = self.layer(x)
        for adapter in self.adapters.values():
            y = y + adapter(x)
        return torch.tanh(y * self.scale if hasattr(self, "scale") else y)


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.extra = nn.ModuleList()

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.head(x) + sum(head(x) for head in self.extra)


def a_head(model):
    model.extra.append(nn.Linear(6, 3))


def parameters_of_a_unit_below(model):
    model.parts[1].scale = nn.Parameter(torch.randn(6))
    model.parts[0].layer.bias = nn.Parameter(torch.randn(6))


def adapters(model, name="first"):
    for part in model.parts:
        part.adapters[name] = nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False))


def a_head_in_place_of_another(model):
    model.head = nn.Linear(6, 3)


def a_frozen_adapter(model):
    adapters(model)
    model.parts[0].adapters.requires_grad_(False)


def one_adapter_in_two_units(model):
    adapters(model)
    model.parts[1].adapters = model.parts[0].adapters


def a_head_with_a_units_weight(model):
    a_head(model)
    model.extra[0].weight = model.head.weight


ATTACH = [
    a_head,
    parameters_of_a_unit_below,
    adapters,
    a_head_in_place_of_another,
    a_frozen_adapter,
    one_adapter_in_two_units,
    a_head_with_a_units_weight,
]


def loss_of(model, rank, step):
    return model(inputs(rank, step)).square().mean()


def grow(ctx, attach, twin, model):
    """Attaches to both; each rank of the sharded model draws other values, and the first one's count."""
    torch.manual_seed(0)
    attach(twin)
    torch.manual_seed(ctx.rank)
    attach(model)


@distributed(world_sizes=(2, 3))
@both_transports
@pytest.mark.parametrize("when", ["first forward", "between steps"])
@pytest.mark.parametrize("attach", ATTACH)
def test_trains_as_unsharded(ctx, attach, when, transport):
    only_fsdp2x(ctx)
    model, twin = Growing(), Growing()
    shard(ctx, model, UNITS, transport=transport)
    if when == "between steps":
        train_alike(ctx, twin, model, loss_of, num_steps=1, **EXACT)
    grow(ctx, attach, twin, model)
    optimizers = adamw_of(twin, model)

    def clip():
        norms = [fsdp2x.clip_grad_norm_(one.parameters(), 0.05) for one in (model, twin)]
        assert norms[1] > 0.05
        same(*norms, **EXACT)

    train_alike(ctx, twin, model, loss_of, optimizers, before_step=clip, **EXACT)
    held = {id(param) for param in optimizers[1].param_groups[0]["params"]}
    assert held == {id(param) for param in model.parameters() if param.requires_grad}
