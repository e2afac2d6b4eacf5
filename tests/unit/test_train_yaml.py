"""YAML that lies in wait: aliases without an end, thousands of brackets, tags, dates; and changed configs."""

import os
import random
import time
from pathlib import Path

import pytest
import yaml

import damage
from fsdp2x.train import ConfigError, load_config, safe_yaml
from fsdp2x.train.dialects.interpolate import interpolate
from fsdp2x.train.parse import apply_overrides, read_yaml
from fsdp2x.train.safe_yaml import MOST_BYTES, load_yaml

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))
LIST = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
BOMB = LIST + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
MERGES = "a0: &a0 {k: v}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12))

MISTAKES = [
    (BOMB, "with its aliases line . stands for more than 20000 values"),
    (MERGES, "with its aliases line . stands for more than 20000 values"),
    ("a: &a [*a]", "the alias of line 1 stands for what it is in"),
    ("a: &a\n  b: {c: *a}", "the alias of line . stands for what it is in"),
    ("[" * 3000 + "]" * 3000, "line 1 is nested deeper than 64 levels"),
    ("[" * 100_000, "line 1 is nested deeper than 64 levels"),
    ("{a: " * 3000, "line 1 is nested deeper than 64 levels"),
    ("- " * 5000, "line 1 is nested deeper than 64 levels"),
    ("? " * 5000, "line 1 is nested deeper than 64 levels"),
    ("a: " + "9" * 5000, "a value cannot be read"),
    ("a: 0x" + "f" * 5000, "a number has more than 64 bits"),
    ("a: 2001-99-99", "a value cannot be read: month must be in 1..12"),
    ("a: !!int ''", "a value cannot be read"),
    ("a: !!timestamp x", "a value cannot be read"),
    ("a: !!bool maybe", "a value cannot be read"),
    ("a: !!python/object/apply:os.mkdir [x]", "not valid YAML: could not determine a constructor"),
    ("? [1]\n: 2", "not valid YAML"),
    ("a: *b", "not valid YAML: found undefined alias"),
    ("--- 1\n--- 2", "not valid YAML: expected a single document"),
    ("a: 1\nb: {c: 1, c: 2}", "c is set twice, in lines 2 and 2; keep one"),
    ("\0", "not valid YAML"),
]


@pytest.mark.parametrize(("text", "reason"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_one_sentence_and_soon(tmp_path, text, reason):
    begun = time.process_time()
    with pytest.raises(ConfigError, match=f"here: {reason}") as error:
        load_yaml(text, "here")
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert time.process_time() - begun < 20
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"config file .*x.yaml: {reason}"):
        read_yaml(tmp_path / "x.yaml")
    if len(text) < 10_000:
        with pytest.raises(ConfigError, match=r"override train\.x="):
            apply_overrides({}, [f"train.x={text}"])


def test_aliases_that_end_are_followed(monkeypatch):
    assert load_yaml("a: &a {x: [1, 2]}\nb: *a\nc: {<<: *a, y: 3}", "here") == {
        "a": {"x": [1, 2]},
        "b": {"x": [1, 2]},
        "c": {"x": [1, 2], "y": 3},
    }
    assert load_yaml("", "here") is None
    monkeypatch.setattr(safe_yaml, "MOST_VALUES", 300)
    assert len(load_yaml("a: [" + "x, " * 290 + "]", "here")["a"]) == 290
    with pytest.raises(ConfigError, match="more than 300 values"):
        load_yaml(LIST + "b: [" + "*a0, " * 30 + "]", "here")


def test_files_of_every_kind(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    if os.fork() == 0:
        pipe.write_text("train: {steps: 3}\n")
        os._exit(0)
    assert read_yaml(pipe) == {"train": {"steps": 3}}  # as a shell hands over what a command writes
    os.wait()
    (tmp_path / "large").write_text("# " + "x" * MOST_BYTES)
    (tmp_path / "bytes").write_bytes(b"\xff\xfea")
    for name, reason in (
        ("large", "it has more than"),
        ("bytes", "not UTF-8 text"),
        ("gone", "No such file"),
        (".", ""),
    ):
        with pytest.raises(ConfigError, match=f"config file .*: .*{reason}"):
            read_yaml(tmp_path / name)
    with pytest.raises(ConfigError, match="it has more than"):
        read_yaml("/dev/zero")


def test_references_that_multiply_end():
    for value in ("${b}" * 50, ["${b}"] * 50):
        settings: dict = {"a": value}
        for one, other in zip("bcdefgh", "cdefghi", strict=True):
            settings[one] = [f"${{{other}}}"] * 50 if isinstance(value, list) else f"${{{other}}}" * 50
        settings["i"] = "x"
        with pytest.raises(ConfigError, match="its references lead to more"):
            interpolate(settings)


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 1000), marks=pytest.mark.full)], ids=["60", "1000"]
)
def test_a_changed_config_is_read_or_refused_with_a_sentence(tmp_path, seeds):
    path = tmp_path / "x.yaml"
    read = 0
    for seed in seeds:
        rng = random.Random(seed)
        tree, change = damage.change(rng, yaml.safe_load(rng.choice(EXAMPLES).read_text()), json_only=True)
        try:
            text = yaml.safe_dump(tree)
        except RecursionError:
            text = "a: " + "[" * 3000
        if rng.random() < 0.2:
            lines = text.splitlines()
            place = rng.randrange(len(lines))
            lines[place] = rng.choice(
                ["&a " + lines[place], "*a", lines[place] * 2, "\t" + lines[place], "%" + lines[place]]
            )
            text = "\n".join(lines)
        path.write_text(text)
        try:
            load_config(path)
            read += 1
        except ConfigError as error:
            assert "\n" not in str(error), (seed, change.what)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {change.what}: {error!r}") from error
    assert read > len(seeds) // 20
