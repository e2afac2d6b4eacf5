"""``load_state_dict(assign=True)`` gives tied parameters one object each: they are one again, as with upstream."""

import warnings

import pytest
import torch
from torch import nn

from harness import distributed
from reference import both_transports, full, parity


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


@distributed(world_sizes=(1, 2, 3))
@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("equal", [True, False])
@both_transports
def test_one_object_each(ctx, when, equal, transport):
    x = torch.arange(8).view(2, 4)

    def run(model):
        if when == "later":
            model(x).sum().backward()
            model.zero_grad()
        state = {name: nn.Parameter(value.detach().clone() * 2) for name, value in model.state_dict().items()}
        if not equal:
            state["head.weight"] = nn.Parameter(state["head.weight"].detach() + 1)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model.load_state_dict(state, assign=True)
        told = [str(one.message) for one in seen if "is tied to" in str(one.message)]
        loss = model(x).square().mean()
        loss.backward()
        assert model.embed.weight is model.head.weight
        run.told = told
        return full(loss), full([param.grad for param in model.parameters()])

    torch.manual_seed(0)
    parity(ctx, Tied(), run, transport=transport)
    assert bool(run.told) != equal
