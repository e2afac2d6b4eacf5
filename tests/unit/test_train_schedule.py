"""Learning rate as a function of the step, and which parameters decay."""

import math

import pytest
import torch

from fsdp2x.train.config import OptimizerConfig, ScheduleConfig
from fsdp2x.train.schedule import Schedule, decay_groups, lr_factor, make_optimizer

SHAPE = {"kind": "cosine", "warmup_steps": 10, "decay_steps": 110, "min_lr_ratio": 0.1}


def test_warm_up_then_cosine_then_floor():
    assert [lr_factor(s, **SHAPE) for s in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert lr_factor(60, **SHAPE) == pytest.approx(0.1 + 0.9 * 0.5)
    assert lr_factor(35, **SHAPE) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert lr_factor(110, **SHAPE) == pytest.approx(0.1)
    assert lr_factor(1000, **SHAPE) == pytest.approx(0.1)


def test_constant_and_no_warm_up():
    assert lr_factor(500, kind="constant", warmup_steps=0, decay_steps=10, min_lr_ratio=0.0) == 1.0
    assert lr_factor(3, kind="cosine", warmup_steps=3, decay_steps=3, min_lr_ratio=0.2) == pytest.approx(0.2)


def make(num_steps=20, **shape):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    decays = decay_groups(model)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.5, weight_decay=0.3), decays)
    return model, optimizer, Schedule(optimizer, ScheduleConfig(**shape), 0.5, num_steps)


def test_matrices_decay_and_vectors_do_not():
    model, optimizer, _ = make()
    decay, plain = optimizer.param_groups
    assert decay["weight_decay"] == 0.3 and plain["weight_decay"] == 0.0
    assert [p is model[0].weight for p in decay["params"]] == [True]
    assert {id(p) for p in plain["params"]} == {id(model[0].bias), id(model[1].weight), id(model[1].bias)}


def test_frozen_parameters_are_left_out_and_a_frozen_model_is_an_error():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerConfig(), decay_groups(model))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    model.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        make_optimizer(model, OptimizerConfig(), decay_groups(model))


def test_advance_sets_every_group_and_resumes():
    _, optimizer, schedule = make(warmup_steps=4)
    rates = [schedule.advance() for _ in range(8)]
    assert rates[0] == 0.5 / 4
    assert {group["lr"] for group in optimizer.param_groups} == {rates[-1]}
    _, _, resumed = make(warmup_steps=4)
    assert resumed.load_state_dict(schedule.state_dict()) == []
    assert [resumed.advance() for _ in range(3)] == [schedule.advance() for _ in range(3)]


def test_a_changed_shape_is_told():
    _, _, schedule = make(warmup_steps=4)
    _, _, other = make(num_steps=30, warmup_steps=5)
    assert other.load_state_dict(schedule.state_dict()) == ["warmup_steps was 4, is 5", "decay_steps was 20, is 30"]
