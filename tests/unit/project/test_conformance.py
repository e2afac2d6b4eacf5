"""The conformance suite finds engines wrong, in one line, and goes on after a rank has died."""

import contextlib

import pytest

from fsdp2x.conformance.behavior import BEHAVIORS, cases
from fsdp2x.conformance.ranks import Ranks

FIRST_ROWS = {(module.rpartition(".")[2], name): (module, name, row) for module, name, row in reversed(list(cases()))}


def outcomes(engine, *names):
    with contextlib.closing(Ranks(2, f"wrong_engines:{engine}")) as ranks:
        return [ranks.run(*FIRST_ROWS[tuple(name.split("."))]) for name in names]


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (
            "does_nothing",
            {"wrapping.makes_dtensors": "DTensor", "training.frozen_parameters": "", "control.setters_refuse": ""},
        ),
        ("dies", {"wrapping.lists_are_one_unit": "died", "wrapping.keeps_values": None}),
        ("forgets_the_mean", {"wrapping.keeps_values": None, "training.equals_unsharded_training": "gradient of"}),
    ],
)
def test_wrong_engines(engine, expected):
    for outcome, text in zip(outcomes(engine, *expected), expected.values(), strict=True):
        assert outcome.status == ("passed" if text is None else "failed"), outcome
        assert "\n" not in outcome.reason and (text or "") in outcome.reason and len(outcome.reason) < 500


def test_an_engine_that_is_not_there():
    with pytest.raises(RuntimeError, match="2 ranks of wrong_engines:absent did not start. .*absent"):
        outcomes("absent", "wrapping.keeps_values")


def test_each_behavior_has_a_sentence():
    assert all(behavior.contract.endswith(".") for behavior in BEHAVIORS.values())
