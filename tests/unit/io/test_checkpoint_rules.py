"""A checkpoint of one optimizer is none of another's: its settings would be taken over without a word."""

import itertools

import pytest
import torch

import fsdp2x
from fsdp2x.base.failures import CheckpointError
from fsdp2x.io.checkpoint.optimizer import Restore, named_state

KINDS = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "ASGD": torch.optim.ASGD,
    "Adamax": torch.optim.Adamax,
    "Lion": fsdp2x.optim.Lion,
    "NAdam": torch.optim.NAdam,
    "RMSprop": torch.optim.RMSprop,
    "Rprop": torch.optim.Rprop,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "ours": fsdp2x.optim.AdamW,
}
SAME = [{"AdamW", "ours"}, {"SGD", "SGD with momentum"}]


def stepped(model, kind):
    """With what schedulers and users add to groups."""
    optimizer = KINDS[kind](model.parameters())
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4, cycle_momentum=False)
    optimizer.param_groups[0]["layer"] = 3
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("saved", "here"), list(itertools.product(KINDS, KINDS)))
def test_only_the_same_rule_takes_a_state_over(saved, here):
    model = torch.nn.Linear(3, 4)
    state, _ = named_state(model, [stepped(model, saved)])
    described = {
        name: {key: (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for key, v in of.items()}
        for name, of in state["state"].items()
    }
    restore = Restore(model, [KINDS[here](model.parameters())])
    found = {"state": described, "param_groups": state["param_groups"]}
    if saved == here or {saved, here} in SAME:
        restore.check(found)
        return
    before = {key: value for key, value in restore.groups[0].settings.items() if key != "params"}
    with pytest.raises(CheckpointError, match="another optimizer was saved: its groups have .*build the one that was"):
        restore.check(found)
    assert {key: value for key, value in restore.groups[0].settings.items() if key != "params"} == before
