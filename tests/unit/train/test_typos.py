"""A misspelled command, option, section, key, or value names what was meant. Cases are drawn from all names."""

import re
import typing

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fsdp2x.train.cli import main, make_parser
from fsdp2x.train.config import SECTIONS, ConfigError, known_keys
from fsdp2x.train.config_file import parse_config

SUB = {"config": ("explain", "list", "translate")}
COMMANDS = ("train", "trl", "config", "plan", "export", "convert", "compare", "selftest", "doctor")
VALUES = [
    (section, name, value)
    for section, cls in SECTIONS.items()
    for name, field in cls.model_fields.items()
    if typing.get_origin(field.annotation) is typing.Literal
    for value in typing.get_args(field.annotation)
    if isinstance(value, str) and len(value) > 4
]


@st.composite
def typo(draw, name):
    """A letter of a name is lost, doubled, or swapped with the next one."""
    place = draw(st.integers(1, len(name) - 2))
    middle = draw(st.sampled_from(["", name[place] * 2, name[place + 1] + name[place]]))
    wrong = name[:place] + middle + name[place + 1 + (len(middle) == 2 and middle[0] != middle[1]) :]
    assume(wrong != name)
    return wrong


def said(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def options_of(*words):
    """The options that the help of a command lists."""
    parser = make_parser()
    for word in words:
        (inner,) = (action for action in parser._actions if action.dest in ("command", "action"))
        parser = inner.choices[word]
    return sorted({one for one in re.findall(r"--[a-z][a-z-]+", parser.format_usage()) if len(one) > 5})


OPTIONS = [
    (words, option)
    for words in (("train", "x"), ("plan", "x"), ("export", "x", "y"), ("convert",), ("selftest",), ("doctor",))
    for option in options_of(words[0])
]
each = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.fixture
def in_one_parser(monkeypatch):
    """Half of a short command is the making of its parser."""
    parser = make_parser()
    monkeypatch.setattr("fsdp2x.train.cli.make_parser", lambda: parser)


def test_commands(capsys, in_one_parser):
    @each
    @given(st.data(), st.sampled_from([*((one,) for one in COMMANDS), *(("config", one) for one in SUB["config"])]))
    def check(data, words):
        wrong = data.draw(typo(words[-1]))
        line = said(capsys, *words[:-1], wrong)
        assert line.startswith("fsdp2x: error: ") and f". Did you mean {words[-1]}?" in line, line

    check()


def test_options(capsys, in_one_parser):
    @each
    @given(st.data(), st.sampled_from(OPTIONS))
    def check(data, case):
        words, option = case
        wrong = "--" + data.draw(typo(option[2:]))
        assume(not any(known.startswith(wrong) for known in options_of(words[0])))  # abbreviations are taken
        line = said(capsys, *words, wrong)
        assert line.endswith(f"unrecognized arguments: {wrong}. Did you mean {option}? See fsdp2x {words[0]} --help.")

    check()
    line = said(capsys, "train", "x.yaml", "--train.steps", "8")
    assert "Write settings without dashes: train.steps=VALUE." in line
    assert main([]) == 2 and "fsdp2x train run.yaml --nproc auto" in capsys.readouterr().err


@each
@given(st.data(), st.sampled_from(sorted(known_keys())))
def test_sections_and_keys(data, key):
    section, _, name = key.partition(".")
    for wrong in (f"{data.draw(typo(section))}.{name}", f"{section}.{data.draw(typo(name))}" if len(name) > 4 else ""):
        assume(wrong not in known_keys())
        if wrong:
            with pytest.raises(ConfigError) as error:
                parse_config({wrong.partition(".")[0]: {wrong.partition(".")[2]: None}})
            assert f"unknown key {wrong}. Did you mean {section}." in str(error.value)


@each
@given(st.data(), st.sampled_from(VALUES))
def test_values(data, case):
    section, name, value = case
    wrong = data.draw(typo(value))
    with pytest.raises(ConfigError) as error:
        parse_config({section: {name: wrong}})
    assert str(error.value).endswith(f"; did you mean {value}?"), str(error.value)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_is_listed_alone(capsys, section):
    assert main(["config", "list", section]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines[::2]] == [one for one in known_keys() if one.startswith(section)]
    assert main(["config", "list", f"{section}z"]) == 2
    assert f"unknown key {section}z. Did you mean {section}?" in capsys.readouterr().err
