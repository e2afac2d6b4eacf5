"""Learning rates by the step, which parameters decay, and the scaler of the loss, which follows torch's rule."""

import math

import pytest
import torch

import fsdp2x
from fsdp2x.train.config import ConfigError, OptimizerConfig, ScalerConfig, ScheduleConfig
from fsdp2x.train.schedule import (
    SMALLEST_SCALE,
    GradScaler,
    Schedule,
    decay_groups,
    lr_factor,
    make_optimizer,
    make_shape,
)
from models import build

SHAPE = ScheduleConfig(kind="cosine", warmup_steps=10, decay_steps=110, min_lr_ratio=0.1, wsd_decay_steps=40)


def shape(**changes):
    return SHAPE.model_copy(update=changes)


# Settings -> step -> rate as a fraction of the peak.
RATES = [
    ({}, {1: 0.1, 5: 0.5, 10: 1.0, 35: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)), 60: 0.55, 110: 0.1, 1000: 0.1}),
    ({"warmup_steps": 3, "decay_steps": 3, "min_lr_ratio": 0.2}, {3: 0.2}),
    ({"kind": "constant", "warmup_steps": 0, "decay_steps": 10}, {500: 1.0}),
    ({"kind": "linear"}, {10: 1.0, 35: 0.1 + 0.9 * 0.75, 60: 0.55, 110: 0.1, 111: 0.1}),
    ({"kind": "inverse_sqrt", "decay_steps": 10000}, {10: 1.0, 40: 0.5, 90: 1 / 3, 1000: 0.1, 9999: 0.1, 10001: 0.1}),
    ({"kind": "inverse_sqrt", "warmup_steps": 0}, {16: 0.25}),
    ({"kind": "wsd"}, {5: 0.5, 10: 1.0, 70: 1.0, 90: 0.1 + 0.9 * 0.5, 110: 0.1, 111: 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "rates"), RATES)
def test_rates_are_those_of_the_formulas(changes, rates):
    assert {step: lr_factor(step, shape(**changes)) for step in rates} == pytest.approx(rates)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_against_the_schedulers_of_transformers(kind):
    """Theirs count from 0 and end at 0; the rate of our step s is theirs after s calls."""
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if kind == "wsd":
        theirs = transformers.get_wsd_schedule(
            optimizer, num_warmup_steps=10, num_decay_steps=40, num_stable_steps=60, decay_type="linear"
        )
    else:
        make = getattr(transformers, f"get_{kind}_schedule_with_warmup")
        theirs = make(optimizer, num_warmup_steps=10, num_training_steps=110)
    ours = shape(kind=kind, min_lr_ratio=0.0, wsd_decay_steps=40)
    for step in range(1, 111):
        optimizer.step()
        theirs.step()
        assert lr_factor(step, ours) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), step


def test_the_shape_of_a_run():
    config = ScheduleConfig(kind="wsd", warmup_ratio=0.1, min_lr=0.05)
    made = make_shape(config, 0.5, 200)
    assert (made.warmup_steps, made.decay_steps, made.wsd_decay_steps) == (20, 200, 20)
    assert made.min_lr_ratio == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="schedule.min_lr: got 0.9, expected .*0.5"):
        make_shape(ScheduleConfig(min_lr=0.9), 0.5, 10)
    with pytest.raises(ConfigError, match="schedule.wsd_decay_steps: got 8, expected .*7"):
        make_shape(ScheduleConfig(kind="wsd", warmup_steps=3, wsd_decay_steps=8), 0.5, 10)


def test_matrices_decay_and_vectors_do_not():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.3), decay_groups(model))
    decay, plain = optimizer.param_groups
    assert decay["weight_decay"] == 0.3 and plain["weight_decay"] == 0.0
    assert [p is model[0].weight for p in decay["params"]] == [True]
    assert {id(p) for p in plain["params"]} == {id(model[0].bias), id(model[1].weight), id(model[1].bias)}


def test_stacked_biases_do_not_decay():
    model = torch.nn.Module()
    model.down_proj, model.down_proj_bias = (torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3, 4), (2, 4)))
    assert decay_groups(model) == {"down_proj": True, "down_proj_bias": False}


def test_frozen_parameters_are_left_out_and_a_frozen_model_is_an_error():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerConfig(), decay_groups(model))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    model.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        make_optimizer(model, OptimizerConfig(), decay_groups(model))


def test_which_optimizer():
    model = torch.nn.Linear(3, 4)
    decays = decay_groups(model)
    assert type(make_optimizer(model, OptimizerConfig(), decays)) is fsdp2x.optim.AdamW
    sgd = make_optimizer(model, OptimizerConfig(name="sgd", momentum=0.9), decays)
    assert isinstance(sgd, torch.optim.SGD) and sgd.param_groups[0]["momentum"] == 0.9
    with pytest.raises(ValueError, match="optimizer.momentum: got 0.9, expected 0"):
        OptimizerConfig(momentum=0.9)


def test_muon_has_matrices_and_adamw_the_rest():
    model = build("llama")
    decays = decay_groups(model)
    config = OptimizerConfig(name="muon", lr=0.5, adamw_lr=0.25, weight_decay=0.3, betas=(0.8, 0.9))
    optimizer = make_optimizer(model, config, decays)
    matrices, decaying, plain = optimizer.param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(".layers." in names[id(p)] and p.ndim == 2 for p in matrices["params"])
    assert {names[id(p)] for p in decaying["params"]} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert all(p.ndim == 1 for p in plain["params"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0]
    assert matrices["momentum"] == 0.95 and matrices["adjust_lr_fn"] == "match_rms_adamw"
    assert decaying["betas"] == (0.8, 0.9) and not decaying["use_muon"]
    schedule = Schedule(optimizer, ScheduleConfig(warmup_steps=4), 0.5, 20)
    assert schedule.set_rate() == 0.5 / 4
    assert [group["lr"] for group in optimizer.param_groups] == [0.5 / 4, 0.25 / 4, 0.25 / 4]


def test_muon_settings_reach_the_optimizer():
    model = build("qwen3_moe")
    config = OptimizerConfig(name="muon", muon_ns_method="gram")
    optimizer = make_optimizer(model, config, decay_groups(model), ns_dtype=torch.float32)
    groups = optimizer.param_groups
    sizes = [group["split_sizes"] for group in groups if group["use_muon"]]
    assert sizes == [None, (12, 12)] and groups[0]["ns_method"] == "gram"
    assert optimizer.ns_dtype is torch.float32
    config = OptimizerConfig(name="muon", muon_split="none")
    whole, *rest = make_optimizer(model, config, decay_groups(model)).param_groups
    assert whole["split_sizes"] is None and not any(group["use_muon"] for group in rest)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_how_moments_are_kept(name):
    model = build("llama")
    config = OptimizerConfig(name=name, moments_dtype="int8", stochastic_rounding=True)
    optimizer = make_optimizer(model, config, decay_groups(model))
    assert (optimizer.moments_dtype, optimizer.stochastic_rounding) == ("int8", True)
    plain = make_optimizer(model, OptimizerConfig(name=name, moments_dtype="bfloat16"), decay_groups(model))
    assert (plain.moments_dtype, plain.stochastic_rounding) == (torch.bfloat16, False)


# ---- scaling of the loss


def make_scaler(**settings):
    return GradScaler(ScalerConfig(**{"init_scale": 64.0, "growth_interval": 2, **settings}))


def parameters(*values):
    """Parameters whose gradients hold the values."""
    made = [torch.nn.Parameter(torch.zeros(2)) for _ in values]
    for parameter, value in zip(made, values, strict=True):
        parameter.grad = None if value is None else torch.tensor([1.0, value])
    return made


@pytest.mark.parametrize(
    ("values", "good"),
    [((2.0, 3.0), True), ((2.0, math.inf), False), ((-math.inf, 1.0), False), ((math.nan, 1.0), False),
     ((math.inf, math.nan), False), ((None, 2.0), True), ((None,), True), ((), True)],
)  # fmt: skip
def test_unscaling_and_finding(values, good):
    scaler, made = make_scaler(), parameters(*values)
    assert scaler.unscale(made) is good
    for parameter, value in zip(made, values, strict=True):
        if value is not None and math.isfinite(value):
            assert parameter.grad.tolist() == [1 / 64, value / 64]


def test_the_rule_is_that_of_torch():
    """The same good and bad steps as torch's scaler on one parameter."""
    goods = [True, True, True, False, True, True, False, False, True, True, True, True]
    ours = make_scaler()
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for good in goods:
        theirs.scale((parameter * (1.0 if good else math.inf)).sum()).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(good)
        assert ours.state_dict() == theirs.state_dict()


def test_a_scale_that_never_comes_back_is_an_error():
    scaler = make_scaler(init_scale=SMALLEST_SCALE)
    with pytest.raises(RuntimeError, match="overflow float16 at every scale"):
        scaler.update(False)
