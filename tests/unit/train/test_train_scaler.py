"""The scaler follows torch's rule, keeps its state, and knows infinities and NaN wherever they are."""

import math

import pytest
import torch

from fsdp2x.train.config import ConfigError, ScalerConfig
from fsdp2x.train.schedule import SMALLEST_SCALE, GradScaler


def make(**settings):
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
    scaler, made = make(), parameters(*values)
    assert scaler.unscale(made) is good
    for parameter, value in zip(made, values, strict=True):
        if value is not None and math.isfinite(value):
            assert parameter.grad.tolist() == [1 / 64, value / 64]


def test_the_rule_is_that_of_torch():
    """The same good and bad steps as torch's scaler on one parameter."""
    goods = [True, True, True, False, True, True, False, False, True, True, True, True]
    ours = make()
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


def test_state_goes_through_a_checkpoint():
    scaler = make()
    scaler.update(False)
    scaler.update(True)
    other = make()
    other.load_state_dict(scaler.state_dict())
    assert (other.scale, other.num_good_steps) == (32.0, 1)
    other.update(True)
    assert other.scale == 64.0


def test_a_scale_that_never_comes_back_is_an_error():
    scaler = make(init_scale=SMALLEST_SCALE)
    with pytest.raises(RuntimeError, match="overflow float16 at every scale"):
        scaler.update(False)


def test_settings():
    for wrong, sentence in (
        ({"init_scale": 0.0}, "scaler.init_scale: got 0.0, expected a positive number"),
        ({"growth_factor": 1.0}, "scaler.growth_factor: got 1.0, expected more than 1"),
        ({"backoff_factor": 1.0}, "scaler.backoff_factor: got 1.0, expected a fraction in (0, 1)"),
        ({"growth_interval": 0}, "scaler.growth_interval: got 0, expected at least 1"),
    ):
        with pytest.raises(ConfigError) as error:
            ScalerConfig(**wrong)
        assert str(error.value) == sentence
