"""Every row of every dialect's table: it sets what it says it sets, or it says why it has no effect, or it refuses."""

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union

import pytest

from fsdp2x.train import ConfigError
from fsdp2x.train.dialects import DIALECTS, translate
from fsdp2x.train.dialects.rules import Dialect, Rule, becomes, no_effect
from fsdp2x.train.parse import known_keys

ROWS = [(dialect, key) for dialect in DIALECTS for key in dialect.keys]
SAMPLES = {
    bool: [True, False], int: [2, 1, 0], float: [0.5, 0.0], type(None): [None], Any: [[0, 1], "list(range(0,4))", "x"],
    str: ["bf16", "fsdp", ""],
}  # fmt: skip


def samples(kind: Any) -> list:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return [value for option in args for value in samples(option)]
    if origin is Literal:
        return list(args)
    return [["x"]] if origin is list else SAMPLES[kind]


def nested(values: dict[str, Any]) -> dict:
    result: dict = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
    return result


def companions(dialect: Dialect) -> dict[str, Any]:
    """A file with as many of the dialect's keys as go together; some rows have an effect only beside others."""
    file: dict[str, Any] = {}
    for key, rule in dialect.keys.items():
        for value in samples(rule.kind)[:1]:
            try:
                for role in [(), ["role=ref_policy"]] if dialect.name == "nested" else [()]:
                    translate(nested({**file, key: value}), role)
            except ConfigError:
                continue
            file[key] = value
    return file


def wrongs_of(dialect: Dialect, key: str, beside: dict[str, Any]) -> Iterator[str]:
    """What the row does not do as it says."""
    rule, reached, fates = dialect.keys[key], set(), []
    for path in rule.to:
        if path not in known_keys() and path.rpartition(".")[0] not in known_keys():
            yield f"{key}: {path} is no setting of ours"
    for others in ({}, beside, nothing_of(rule, dialect, beside)):
        for value in samples(rule.kind) if not fates or set(rule.to) - reached else ():
            file = {**others, key: value}
            try:
                translation = translate(
                    nested(file), ["role=ref_policy"] if key.startswith("models.ref_policy.") else ()
                )
            except ConfigError as error:
                if not str(error).startswith(f"{key}: ") and "it means" not in str(error):
                    yield f"{key}={value!r} is refused without its name: {error}"
                continue
            (fate,) = (fate for fate in translation.fates if fate.key == key)
            fates.append(fate)
            reached |= set(fate.became)
            for path, setting in fate.became.items():
                section, _, name = path.partition(".")
                held = translation.settings.get(section, {})
                # Sizes of a model that is not there are left out with it.
                if name in held and held[name] != setting:
                    yield f"{key}={value!r}: {path} is {held[name]!r}, told as {setting!r}"
            if not fate.became and not fate.remark:
                yield f"{key}={value!r}: neither a setting nor a reason"
    if not fates:
        yield f"{key}: no value of {rule.kind} is taken"
    for path in set(rule.to) - reached:
        yield f"{key}: {path} is never set"
    for path in reached - set(rule.to):
        if path.rpartition(".")[2] not in rule.help:
            yield f"{key}: {path} is set, and is not told in the list of keys"


def nothing_of(rule: Rule, dialect: Dialect, beside: dict[str, Any]) -> dict[str, Any]:
    """The companions that set none of the row's own settings."""
    return {other: value for other, value in beside.items() if not set(dialect.keys[other].to) & set(rule.to)}


@pytest.fixture(scope="module", params=DIALECTS, ids=lambda dialect: dialect.name)
def whole(request):
    return request.param, companions(request.param)


def test_every_row_has_its_effect_or_its_refusal(whole):
    dialect, beside = whole
    assert [wrong for key in dialect.keys for wrong in wrongs_of(dialect, key, beside)] == []


@pytest.mark.parametrize(("dialect", "key"), ROWS, ids=[f"{dialect.name}-{key}" for dialect, key in ROWS])
def test_a_value_of_another_type_is_refused_by_name(dialect, key):
    if dialect.keys[key].kind is not Any:
        with pytest.raises(ConfigError) as error:
            translate(nested({key: [[{"not": "this"}]]}))
        assert str(error.value).startswith(f"{key}") and "expected" in str(error.value)


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        (becomes(int, "train.sead"), "train.sead is no setting of ours"),
        (becomes(int, "train.seed", "train.epochs", by=lambda value, _: no_effect("why").fate("", 1, {})), "never set"),
        (Rule(int), "neither a setting nor a reason"),
    ],
)
def test_a_planted_row_that_does_not_as_it_says_is_found(monkeypatch, rule, wrong):
    flat = DIALECTS[0]
    monkeypatch.setitem(flat.keys, "seed", rule)
    assert any(wrong in found for found in wrongs_of(flat, "seed", {}))


@pytest.mark.parametrize("ids", ["list(range(0,4,0))", f"range({10**20})", "range(4,0)", "range()"])
def test_ids_that_are_no_list_of_devices_are_one_sentence(ids):
    with pytest.raises(ConfigError, match="device_mapping: got .* expected device ids"):
        translate({"device_mapping": ids, "model_args": {"dtype": "bf16"}})


def test_a_section_of_the_command_line_that_is_no_mapping_is_left_to_its_check():
    assert translate({"seed": 1}, ["model=3"]).settings["model"] == 3
