"""Typical first mistakes: other trainers' key names, several typos, broken YAML. Each message has the line."""

import json
import re

import pytest

import fsdp2x
from fsdp2x.train import ConfigError, parse_config
from fsdp2x.train.cli import main
from fsdp2x.train.config import known_keys
from fsdp2x.train.parse import foreign_keys
from training import MODEL, settings, write_model, write_text

OWN = f"model: {{config: {json.dumps(MODEL)}}}\ndata: {{files: [text]}}\n"


@pytest.fixture
def said(tmp_path, capsys, monkeypatch):
    """Returns a function that runs `fsdp2x train run.yaml` on a text and returns its error lines."""
    monkeypatch.chdir(tmp_path)

    def run(text, *words, command=("train",), status=2):
        (tmp_path / "run.yaml").write_text(text)
        (tmp_path / "text").write_text("some text " * 400)
        assert main([*command, "run.yaml", *words]) == status
        lines = capsys.readouterr().err.splitlines()
        return [line.removeprefix("fsdp2x: error: ") for line in lines if line.startswith("fsdp2x: error: ")]

    return run


def test_other_trainers_words_are_known():
    """Each means one setting, at the top of a file or in another section."""
    names = foreign_keys()["names"]
    assert {setting.partition("=")[0] for setting in names} <= known_keys().keys()
    elsewhere = [word for row in foreign_keys()["elsewhere"] for word in row["names"].split()]
    settings_of = [(word, setting) for setting, words in names.items() for word in words.split()]
    assert len({*elsewhere, *dict(settings_of)}) == len(elsewhere) + len(settings_of)
    for word, setting in settings_of:
        for given, key in (({word: 1}, word), ({"lora": {word: 1}}, f"lora.{word}")):
            with pytest.raises(ConfigError) as error:
                parse_config(given)
            assert str(error.value) == f"unknown key {key}. Did you mean {setting}?"


@pytest.mark.parametrize("key", ["data.format", "data.columns", "data.dataset_format", "data.streaming"])
def test_keys_of_rows_name_the_command_for_them(said, key):
    (line,) = said(OWN.replace("data: {", f"data: {{{key.removeprefix('data.')}: jsonl, "))
    assert line.startswith(f"run.yaml:2: unknown key {key}. ") and "`fsdp2x trl sft --config FILE`" in line


@pytest.mark.parametrize("word", ["patience", "min_delta", "early_stopping_patience"])
def test_keys_of_early_stopping_name_what_does_it(said, word):
    (line,) = said(OWN + f"train: {{{word}: 1}}\n")
    assert line.startswith(f"run.yaml:3: unknown key train.{word}. ") and "metrics.jsonl" in line


def test_all_mistakes_are_told_with_their_lines(said):
    text = OWN + "optimizer:\n  lr: -1.0\n  betaz: [0, 0]\ntrain:\n  stepz: 3\n  zzzzzz: 3\n"
    assert said(text, "train.clipp=3") == [
        "run.yaml:4: optimizer.lr: got -1.0 (float), expected float above 0",
        "run.yaml:5: unknown key optimizer.betaz. Did you mean optimizer.betas?",
        "run.yaml:7: unknown key train.stepz. Did you mean train.steps?",
        "run.yaml:8: unknown key train.zzzzzz. See fsdp2x config list.",
        "unknown key train.clipp. Did you mean train.clip?",
    ]
    assert said(OWN.replace("model_type", 'hidden_sizes": 3, "model_type')) == [
        "run.yaml:1: unknown key model.config.hidden_sizes. Did you mean model.config.hidden_size?"
    ]


@pytest.mark.parametrize("command", [("train",), ("config", "explain"), ("plan", "--world-size", "2")], ids=" ".join)
def test_values_have_their_line_in_every_command(said, command):
    assert said(OWN + "train:\n  steps: ten\n", command=command) == [
        "run.yaml:4: train.steps: got 'ten' (str), expected int above 0 or null"
    ]
    assert said(OWN + "train: {clip: 1.0}\n", "train.clip=-1", command=command) == [
        "train.clip: got -1 (int), expected float above 0 or null"
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model:\n  path: [x\ndata: 1\n", "config file run.yaml:3: not valid YAML: while parsing a flow sequence "),
        ("model:\n path: x\n  load: rows\n", "config file run.yaml:3: not valid YAML: "),
        ("a: 'x\n", "config file run.yaml:2: not valid YAML: while scanning a quoted scalar"),
    ],
)
def test_broken_yaml_names_its_file_and_line(said, text, sentence):
    (line,) = said(text)
    assert line.startswith(sentence) and "unicode string" not in line


@pytest.mark.parametrize(
    "words",
    [
        ["--resume_from", "gone"],
        ["--resume-from=gone"],
        ["checkpoint.resume_from=gone"],
    ],
    ids=" ".join,
)
def test_every_spelling_of_resuming_reaches_the_run(said, words):
    (line,) = said(OWN, *words)
    assert line.count("gone") == 1
    assert line.endswith("gone: no such checkpoint. Pass a checkpoint folder or its parent.")


@pytest.mark.parametrize(
    "overrides",
    [(), ("parallel.device=cpu", "--device", "cuda"), ("parallel.device=cpu",), ("parallel.transport=shm",)],
)
def test_a_plan_is_for_the_device_of_the_run(capsys, tmp_path, monkeypatch, overrides):
    (tmp_path / "run.yaml").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "run.yaml", *overrides, "--world-size", "2"]) == 0
    output = capsys.readouterr().out
    assert ("on cpu" if len(overrides) == 1 else "on cuda") in output.splitlines()[0]
    assert ("CUDA and NCCL" in output) == (len(overrides) != 1), output


HUB = {
    "train": ["train", "run.yaml", "model.config=null", "model.path=Some/Model-0.6B"],
    "plan": ["plan", "Some/Model-0.6B"],
    "plan yaml": ["plan", "run.yaml", "model.config=null", "model.path=Some/Model-0.6B"],
    "export": ["export", "Some/Model-0.6B", "out"],
    "convert": ["convert", "--to", "dcp", "--input-dir", "Some/Model-0.6B", "--output-dir", "out"],
    "from_pretrained": [],
}


@pytest.mark.parametrize("case", HUB)
def test_a_name_of_the_hub_gets_the_command_that_downloads_it(capsys, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(OWN)
    (tmp_path / "text").write_text("some text " * 400)
    download = "fsdp2x downloads nothing. Run `hf download Some/Model-0.6B --local-dir Model-0.6B`, and pass the folder"
    if HUB[case]:
        assert main(HUB[case]) == 2
        assert download in capsys.readouterr().err
        assert main([word.replace("Some/Model-0.6B", "/Some/Model-0.6B") for word in HUB[case]]) == 2
        assert "hf download" not in capsys.readouterr().err
    else:
        with pytest.raises(fsdp2x.checkpoint.CheckpointError, match=re.escape(download)):
            fsdp2x.from_pretrained("Some/Model-0.6B")


def test_explain_shows_meanings_and_defaults_in_effect(capsys, tmp_path):
    (tmp_path / "run.yaml").write_text(OWN + "train: {global_batch_size: 32}\noptimizer: {lr: 1.0e-2}\n")
    assert main(["config", "explain", str(tmp_path / "run.yaml"), "--world-size", "2"]) == 0
    own, _, defaults = capsys.readouterr().out.partition("Defaults in effect:")
    for place, key, value in (
        (own, "optimizer.lr", "0.01"), (own, "train.global_batch_size", "32"), (defaults, "train.epochs", "1"),
        (defaults, "train.batch_size", "16"), (defaults, "checkpoint.save_minutes", "30"),
    ):  # fmt: skip
        assert f"  {key} = {value}\n      {known_keys()[key].help}\n" in place
    assert "optimizer.lr =" not in defaults and "train.steps =" not in defaults


def test_logs_have_no_loading_bars(tmp_path, capfd):
    """transformers draws one on every rank, also into files."""
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path / "hf", vocab_size=257)
    AutoModelForCausalLM.from_pretrained(folder)
    assert "Loading weights" in capfd.readouterr().err
    config = settings(write_text(tmp_path / "text"), tmp_path / "run", train={"steps": 1})
    (tmp_path / "run.yaml").write_text(json.dumps({**config, "model": {"path": str(folder)}}))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert "Loading weights" not in capfd.readouterr().err
    AutoModelForCausalLM.from_pretrained(folder)
    assert "Loading weights" in capfd.readouterr().err
