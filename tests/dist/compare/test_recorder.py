"""What a recorder sees of a model that torch compiles, and of one that raises."""

import pytest
import torch
from torch import nn

from fsdp2x.compare.recorder import Recorder
from harness import distributed


def names(recorder):
    return [f"{event.key.phase} {event.key.name}" for event in recorder.finish().events]


def train(model, call, num_steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        call(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@distributed(world_sizes=(1,))
@pytest.mark.parametrize("how", ["method", "function"])
def test_compiled_models_stay_whole(ctx, how):
    from torch._dynamo.utils import counters  # in the ranks: it starts triton

    torch.compiler.reset()
    counters.clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    call = torch.compile(model, backend="aot_eager") if how == "function" else model
    if how == "method":
        model.compile(backend="aot_eager")
    with Recorder() as recorder:
        train(model, call)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    seen = names(recorder)
    assert seen.count("forward output ") == 2 and "weight after optimizer step 2.weight" in seen
    assert not any("GraphModule" in name for name in seen)


@distributed(world_sizes=(1,))
def test_a_forward_that_raises_leaves_nothing(ctx):
    class Raises(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    model = nn.Sequential(nn.Linear(4, 4), Raises())
    with Recorder() as recorder:
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                model(torch.randn(2, 4))
        train(model[0], model[0], 1)
    seen = names(recorder)
    assert seen.count("input [0]") == 2 and seen.count("loss ") == 1
