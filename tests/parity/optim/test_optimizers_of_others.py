"""torch's optimizers that look at more than one element: over our parameters as over stock's, or refused alike.

`docs/optimizers-of-others.md` has a row for each of them, held here to what happens.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import full, only_fsdp2x, params, same, shard, shard_stock

PAGE = Path(__file__).parents[3] / "docs" / "optimizers-of-others.md"


def matrices(model):
    return [param for param in model.parameters() if param.ndim == 2]


def even() -> nn.Module:
    """Whose parameters two ranks shard evenly."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))


# The models, with their units; what the page says of an optimizer -> those that it trains on several ranks.
MODELS = {"uneven": (Stack, STACK_UNITS), "even": (even, ())}
TRAINS = {"as on stock": ("uneven", "even"), "torch wants even shards": ("even",), "torch refuses DTensors": ()}

# Name -> the optimizer; what the page says of it over FSDP2, and of `local_optimizer`.
OPTIMIZERS = {
    "torch.optim.Adafactor": (
        lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
        "torch refuses DTensors",
        "refused",
    ),
    "torch.optim.Adagrad": (
        lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
        "as on stock",
        "as on stock",
    ),
    "torch.optim.LBFGS": (
        lambda model: torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=3),
        "torch wants even shards",
        "refused",
    ),
    "torch.optim.Muon": (lambda model: torch.optim.Muon(matrices(model), lr=1e-2), "as on stock", "refused"),
    "torch.optim.NAdam": (lambda model: torch.optim.NAdam(model.parameters(), lr=1e-2), "as on stock", "as on stock"),
}


def trained(model, optimizer, rank) -> tuple[list[torch.Tensor], dict, dict]:
    """Losses, parameters and states."""
    losses = []
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(inputs(rank, step)).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())
    return losses, params(model), full(optimizer.state_dict()["state"])


def outcome(run) -> tuple[str, object]:
    """What a run gives, or the kind of its error."""
    try:
        return "trained", run()
    except (RuntimeError, NotImplementedError, AssertionError, TypeError, ValueError, IndexError) as error:
        return type(error).__name__, None


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if hasattr(torch.optim, name.rpartition(".")[2])])
def test_over_our_parameters_as_over_stocks(ctx, name, kind):
    only_fsdp2x(ctx)
    optimizer_of, over, local = OPTIMIZERS[name]
    make, units = MODELS[kind]
    found, expected = (
        outcome(lambda model=model: trained(model, optimizer_of(model), ctx.rank))
        for model in (shard(ctx, make(), units), shard_stock(make(), units))
    )
    assert found[0] == expected[0]
    same(found[1], expected[1], name)
    if not torch.__version__.startswith("2.15"):  # what the page says is of this one
        pass
    elif kind in TRAINS[over]:
        assert found[0] == "trained"
    elif over == "torch refuses DTensors" or ctx.world > 1:
        assert found[0] == "RuntimeError"
    model = shard(ctx, make(), units)
    if local == "refused":
        with pytest.raises(NotImplementedError, match="element-wise"):
            fsdp2x.local_optimizer(optimizer_of(model))
    else:
        same(trained(model, fsdp2x.local_optimizer(optimizer_of(model)), ctx.rank), found[1], "local_optimizer")


def test_the_page_has_them():
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| `torch.optim.")]
    said = {row[0].strip(" `"): tuple(cell.strip() for cell in row[1:3]) for row in rows}
    assert said == {name: (over, local) for name, (_, over, local) in OPTIMIZERS.items()}
