"""Every option of a command that is a dtype takes the short names and the long ones."""

import pytest

from fsdp2x.cli import make_parser

REQUIRED = {
    "plan": ["plan", "config.json", "--world-size", "2"],
    "convert": ["convert", "--input-dir", "a", "--output-dir", "b"],
    "rollout": ["rollout", "folder", "--address", "@here"],
}
OPTIONS = [
    ("plan", "dtype"),
    ("plan", "param-dtype"),
    ("plan", "reduce-dtype"),
    ("convert", "dtype"),
    ("rollout", "dtype"),
]


@pytest.mark.parametrize(("command", "option"), OPTIONS)
@pytest.mark.parametrize(("said", "meant"), [("bf16", "bfloat16"), ("fp32", "float32"), ("torch.float16", "float16")])
def test_short_names(command, option, said, meant):
    found = make_parser().parse_args([*REQUIRED[command], f"--{option}", said])
    assert getattr(found, option.replace("-", "_")) == meant


def test_none_is_left_out():
    commands = next(action for action in make_parser()._actions if action.dest == "command").choices
    found = [
        (name, text.removeprefix("--"))
        for name, command in commands.items()
        for action in command._actions
        for text in action.option_strings[:1]
        if text.endswith("dtype")
    ]
    assert sorted(found) == sorted(OPTIONS)
