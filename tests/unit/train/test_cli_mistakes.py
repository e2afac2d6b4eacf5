"""Every argument of every command, given wrong in every way of its kind: one sentence, a status, no traceback."""

import argparse
import functools
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from fsdp2x.train import cli, parts
from fsdp2x.train.cli import main
from mistakes import faults_of
from training import settings, write_model, write_text

OVERRIDES = (
    "nonsense", "=3", "train.steps", "train.steps=x", "train.stepz=3", "model.config.hidden_size=x", "train.steps=[",
    "logging.output=/dev/null/x", "model.config.hidden_size=-1", "model.config={}", "model.path=/missing",
    "model.config.num_attention_heads=0", "model.config.vocab_size=100", "data.files=/missing", "data.files=/dev/null",
    "data.tokenizer=/missing", "checkpoint.resume_from=/missing", "parallel.device=cuda", "parallel.fsdp_size=-3",
    "model.config.model_type=nonsense", "model.config.model_type=[1]", "model.attn_implementation=nonsense",
    "lora.target_modules=[nothing]", "model.freeze=nothing", "parallel.auto_wrap=[Nothing]", "parallel.auto_wrap=[]",
    "logging.tensorboard_dir=/dev/null/x", "checkpoint.folder=/dev/null/x", "parallel.expert_parallel=3",
    "model.dtype=float8", "parallel.expert_units=[Nothing]", "train.compile_backend=nonsense", "optimizer.lr=nan",
    "train..steps=3", "train.steps.deep=3", "model.path=empty", "checkpoint.resume_from=empty",
)  # fmt: skip
# These are found before any text is read.
EARLY = (
    "model.config.model_type=", "model.config.hidden_size=x", "model.attn_implementation=", "model.path=",
    "data.tokenizer=", "checkpoint.", "logging.output=", "parallel.device=",
)  # fmt: skip
PATHS = ("CONFIG", "CONFIG.yaml", "CKPT", "DIR", "FILE", "HF", "MODEL", "PATH")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Something right for each argument: a config, a model, checkpoints of two kinds, and files that are nothing."""
    folder = tmp_path_factory.mktemp("cli")
    write_text(folder / "text")
    write_model(folder / "hf", vocab_size=257)
    config = settings(folder / "text", folder / "run", train={"steps": 1})
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(folder / "config.yaml")]) == 0
    (folder / "ranks" / "1").mkdir(parents=True)
    torch.save(_weights(folder / "hf"), folder / "ranks/1/model_world_size_1_rank_0.pt")
    (folder / "empty").mkdir()
    (folder / "nothing").write_text("")
    (folder / "old.yaml").write_text("data_path: text\nlr: 1.0\n")
    (folder / "garbage").write_bytes(bytes(range(256)) * 4)
    (folder / "text.yaml").write_text("just a sentence")
    (folder / "list.json").write_text(json.dumps([1, 2]))
    (folder / "odd.json").write_text(json.dumps({"model_type": 3, "hidden_size": "wide"}))
    return folder


def _weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def right(folder):
    """Name -> a command that works, by words."""
    config, hf = str(folder / "config.yaml"), str(folder / "hf")
    return {
        "train": ["train", config, f"logging.output={folder / 'new'}"],
        "export": ["export", str(folder / "run"), str(folder / "out")],
        "convert hf": ["convert", "--input-dir", str(folder / "run/checkpoints/step-000001"), "--output-dir",
                       str(folder / "out"), "--origin-hf-dir", hf],
        "convert ranks": ["convert", "--hf-dir", hf, "--ckpt-dir", str(folder / "ranks"), "--save-dir",
                          str(folder / "out"), "--iter", "1"],
        "convert dcp": ["convert", "--to", "dcp", "--input-dir", hf, "--output-dir", str(folder / "out")],
        "config explain": ["config", "explain", config],
        "config list": ["config", "list"],
        "config translate": ["config", "translate", str(folder / "old.yaml")],
        "plan": ["plan", config, "--world-size", "2", "--dtype", "torch.float32", "--param-dtype", "bf16"],
        "plan json": ["plan", str(folder / "hf/config.json"), "--world-size", "2"],
        "doctor": ["doctor"],
        "selftest": ["selftest", "--world", "1", "--steps", "1"],
    }  # fmt: skip


COMMANDS = tuple(right(Path()))

make_parser = functools.cache(cli.make_parser)


@pytest.fixture(autouse=True)
def one_parser(monkeypatch):
    """Half of a short command is the making of its parser."""
    monkeypatch.setattr(cli, "make_parser", make_parser)


def parser_of(words):
    """The parser of the innermost command."""
    parser = make_parser()
    for word in words:
        inner = next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
        if inner is None:
            return parser
        parser = inner.choices[word]
    return parser


def wrong_values(action, folder):
    if action.choices:
        return ["nonsense", ""]
    if action.metavar == "OUT":
        return [str(folder / "empty"), str(folder / "nothing"), "/dev/null", "/dev/null/below", ""]
    if action.metavar in PATHS:
        names = ("missing", "empty", "nothing", "garbage", "text.yaml", "list.json", "odd.json")
        return [*(str(folder / name) for name in names), "/dev/null", "/dev/null/below", ""]
    if action.metavar == "key=value":
        return OVERRIDES
    if action.type is int or action.metavar in ("N", "R", "M", "E", "S"):
        return ["x", "-1", "0", "3.5", ""]
    return ["nonsense" * 3, *([] if "--prefix" in action.option_strings else [""])]


def cases(name, folder):
    """The right command with one argument replaced or added."""
    words = right(folder)[name]
    start = 2 if words[0] == "config" else 1
    actions = [one for one in parser_of(words[:start])._actions if one.nargs != 0 and one.help != argparse.SUPPRESS]
    positionals = [action for action in actions if not action.option_strings and action.nargs != "*"]
    for action in actions:
        for value in wrong_values(action, folder):
            if action.nargs == "*":
                yield [*words, value]
            elif not action.option_strings:
                place = start + positionals.index(action)
                yield [*words[:place], value, *words[place + 1 :]]
            else:
                option = next((o for o in action.option_strings if o in words), None)
                if option is None:
                    yield [*words, action.option_strings[0], value]
                else:
                    place = words.index(option) + 1
                    yield [*words[:place], value, *words[place + 1 :]]
    yield [*words, "--no-such-option"]
    if any(action.required for action in actions):
        yield words[:start]  # nothing of what it needs


# Settings that have no part in a command, or mean something there: no mistake.
FINE = {
    "train": ("parallel.fsdp_size=-3", "lora.target_modules=[nothing]", "train.compile_backend=nonsense"),
    "selftest": ("3.5",),  # seconds
}
# These commands do not use a run's files and devices. For a file without keys, they list the keys it needs.
FINE["plan"] = (*FINE["train"], "model.config.vocab_size=100",
                 "data.files=/missing", "data.files=/dev/null", "logging.output=/dev/null/x",
                "checkpoint.resume_from=/missing", "checkpoint.resume_from=empty", "checkpoint.folder=/dev/null/x",
                "parallel.device=cuda", "model.attn_implementation=nonsense", "data.tokenizer=/missing")  # fmt: skip
FINE["plan json"] = (*FINE["plan"], "model.config={}")
FINE["config explain"] = (*FINE["plan"][:-2], FINE["plan"][-1], "model.config={}", "/dev/null", "nothing")


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_changed_is_right(world, name, monkeypatch):
    monkeypatch.chdir(world)
    shutil.rmtree(world / "out", ignore_errors=True)
    shutil.rmtree(world / "new", ignore_errors=True)
    assert main(right(world)[name]) == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_one_argument_is_wrong(world, name, capfd, caplog, monkeypatch):
    monkeypatch.chdir(world)
    # The log handler of transformers may hold a stream that an earlier test's capture has closed.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    wrong, read_blocks = [], parts.read_blocks

    def read(*args, **options):
        assert not words[-1].startswith(EARLY), "text was read"
        return read_blocks(*args, **options)

    monkeypatch.setattr(parts, "read_blocks", read)
    for words in cases(name, world):
        if any(word.endswith(FINE.get(name, ())) for word in words[1:]) and FINE.get(name):
            continue
        shutil.rmtree(world / "out", ignore_errors=True)
        shutil.rmtree(world / "new", ignore_errors=True)
        if faults := faults_of(words, capfd, caplog):
            shown = " ".join(word.replace(str(world), "") for word in words)
            wrong.append(f"{shown}\n    {'; '.join(faults)}")
    assert not wrong, "\n".join(wrong)
