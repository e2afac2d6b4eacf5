"""Random generators and optimizer states of a checkpoint: what each of them accepts, and what it refuses."""

import itertools
import json
import math
import random

import numpy
import pytest
import torch

import damage
import fsdp2x
from fsdp2x.base.failures import CheckpointError, CorruptFile
from fsdp2x.io.checkpoint.optimizer import Restore, named_state
from fsdp2x.io.checkpoint.rng import check_rng, rng_state, seed_all, set_rng

CPU = torch.device("cpu")


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        numpy.random.rand(3).tolist(),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    )


def test_round_trip():
    seed_all(5, 0)
    draw()
    state = json.loads(json.dumps(rng_state(CPU)))
    expected = [draw() for _ in range(3)]
    seed_all(6, 0)
    check_rng(state, CPU, "here")
    set_rng(state, CPU)
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_generators_of_any_accelerator(monkeypatch, kind):
    """They are kept under the device's type, and a run on another device leaves them alone."""
    device, words, taken = torch.device(kind, 0), torch.arange(16, dtype=torch.uint8), []
    module = getattr(torch, kind)
    monkeypatch.setattr(module, "get_rng_state", lambda of: words)
    monkeypatch.setattr(module, "set_rng_state", lambda state, of: taken.append((state, of)))
    state = rng_state(device)
    check_rng(state, CPU, "here")
    set_rng(state, CPU)
    assert taken == []
    set_rng(state, device)
    ((state, of),) = taken
    assert torch.equal(state, words) and of == device


def test_seeds_differ_by_rank_and_repeat():
    drawn = []
    for seed, rank in ((1, 0), (1, 1), (2, 0), (1, 0)):
        seed_all(seed, rank)
        drawn.append(draw())
    assert drawn[0] == drawn[3]
    assert len({repr(d) for d in drawn}) == 3


@pytest.mark.parametrize(
    ("part", "state"),
    [
        ("python", [3, [1] * 625, None, 0]),
        ("python", [3, [1] * 624, None]),
        ("python", [3, [1.0] * 625, None]),
        ("python", [3, [1] * 624 + [625], None]),
        ("python", [3, [1] * 624 + [624], "x"]),
        ("python", [9, [1] * 624 + [624], None]),
        ("torch", "zz"),
        ("cuba", "00"),
        ("torch", "00" * 16),
        ("torch", [0] * 5056),
        ("numpy", ["MT19937", [1] * 624, 10**6, 0, 0.0]),
        ("numpy", ["MT19937", [1] * 624, -1, 0, 0.0]),
        ("numpy", ["MT19937", [math.nan] * 624, 0, 0, 0.0]),
        ("numpy", ["MT19937", [2**32] * 624, 0, 0, 0.0]),
        ("numpy", ["PCG64", [1] * 624, 0, 0, 0.0]),
        ("more", 1),
    ],
)
def test_states_that_no_generator_has(part, state):
    """With these states, numpy would read after the end of its words, and Python accepts any next Gaussian."""
    with pytest.raises(CorruptFile, match="not a state of random generators"):
        check_rng({**rng_state(CPU), part: state}, CPU, "here")


def test_a_changed_state_is_refused_or_can_be_set():
    before = draw_state()
    set_ = 0
    for seed in range(150):
        state, change = damage.change(random.Random(seed), json.loads(json.dumps(rng_state(CPU))), json_only=True)
        try:
            check_rng(state, CPU, "here")
        except CorruptFile:
            assert draw_state() == before, change.what
            continue
        set_rng(state, CPU)
        draw()
        set_rng(before, CPU)
        set_ += 1
    assert set_ > 5


def draw_state():
    return json.loads(json.dumps(rng_state(CPU)))


OPTIMIZERS = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "ASGD": torch.optim.ASGD,
    "Adamax": torch.optim.Adamax,
    "Muon": lambda params: fsdp2x.optim.Muon([{"params": [p], "use_muon": p.ndim == 2} for p in params]),
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
    optimizer = OPTIMIZERS[kind](model.parameters())
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4, cycle_momentum=False)
    optimizer.param_groups[0]["layer"] = 3
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("saved", "here"), list(itertools.product(OPTIMIZERS, OPTIMIZERS)))
def test_only_the_same_rule_takes_a_state_over(saved, here):
    model = torch.nn.Linear(3, 4)
    state, _ = named_state(model, [stepped(model, saved)])
    described = {
        name: {key: (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for key, v in of.items()}
        for name, of in state["state"].items()
    }
    restore = Restore(model, [OPTIMIZERS[here](model.parameters())])
    found = {"state": described, "param_groups": state["param_groups"]}
    if saved == here or {saved, here} in SAME:
        restore.check(found)
        return
    before = {key: value for key, value in restore.groups[0].settings.items() if key != "params"}
    with pytest.raises(CheckpointError, match="another optimizer was saved: its groups have "):
        restore.check(found)
    assert {key: value for key, value in restore.groups[0].settings.items() if key != "params"} == before
