"""A model's forward writes the shards of its units, as momentum encoders do: each unit computes with the new values."""

import copy

import pytest
import torch
from torch import nn

from harness import distributed
from models import inputs
from offloading import OFFLOAD
from reference import grads, only_fsdp2x, params, same, shard

PLACES = {"shm": {}, "process_group": {}, "streams": {}, "streams, offloaded": {"offload_policy": OFFLOAD}}
WIDE = 528  # over gloo, a square matrix of this width is gathered in place


def write_in_place(param):
    param.add_(0.01)


def write_local(param):
    local = param.to_local() if hasattr(param, "to_local") else param
    local.mul_(0.5)


WRITES = {"in place": write_in_place, "local": write_local}


class Momentum(nn.Module):
    """Writes weights at the start, or like MoCo after the query's forward."""

    def __init__(self, write, at_start: bool):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(6, WIDE), nn.Linear(6, WIDE, bias=False)
        self.last = nn.Linear(WIDE, WIDE, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.write, self.at_start = write, at_start

    def follow(self):
        with torch.no_grad():
            for unit in (self.key, self.last, *([self.query] if self.at_start else [])):
                for param in unit.parameters():
                    self.write(param)

    def forward(self, x):
        if self.at_start:
            self.follow()
        query = self.query(x)
        if not self.at_start:
            self.follow()
        with torch.no_grad():
            key = self.key(x)
        return (self.last(query * self.scale) * key).mean()


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize("transport", PLACES)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("at_start", [False, True])
def test_units_compute_with_what_the_forward_wrote(ctx, transport, write, at_start):
    only_fsdp2x(ctx)
    reference = Momentum(WRITES[write], at_start)
    kind = transport.partition(",")[0]
    model = shard(ctx, copy.deepcopy(reference), ("query", "key", "last"), transport=kind, **PLACES[transport])
    for step in range(5):
        x = inputs(0, step)
        with torch.set_grad_enabled(step != 3):
            losses = [one(x) for one in (model, reference)]
        same(losses[0].detach().cpu(), losses[1].detach(), f"loss of step {step}", rtol=1e-5, atol=1e-7)
        if step != 3:
            for loss in losses:
                loss.backward()
            same(grads(model), grads(reference), f"gradients of step {step}", rtol=1e-4, atol=1e-6)
            for one in (model, reference):
                one.zero_grad()
    same(params(model), params(reference), "parameters")
