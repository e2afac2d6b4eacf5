"""Config: every mistake gets one sentence with the dotted path; overrides and YAML are read safely."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import fsdp2x
from fsdp2x.train import ConfigError, TrainConfig, load_config, parse_config
from fsdp2x.train.model import sharding
from fsdp2x.train.parse import apply_overrides, known_keys

GOOD = {"model": {"config": {"model_type": "qwen3"}}, "data": {"files": ["a.txt"]}}


def with_settings(**sections):
    return {**GOOD, **sections}


def test_defaults_and_values():
    config = parse_config(with_settings(train={"steps": 7}, optimizer={"betas": [0.8, 0.9]}))
    assert config.train.steps == 7
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.data.files == ["a.txt"]
    assert config.parallel.transport == "auto"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": {"stepz": 3}}, "unknown key train.stepz; the nearest known one is train.steps"),
        ({"trian": {"steps": 3}}, "unknown key trian.steps; the nearest known one is train.steps"),
        ({"steps": 3}, "unknown key steps; the nearest known one is train.steps"),
        ({"checkpoint": {"lr": 3}}, "unknown key checkpoint.lr; the nearest known one is optimizer.lr"),
        ({"train": {"steps": "ten"}}, "train.steps: got 'ten' (str), expected int"),
        ({"train": {"steps": 2.5}}, "train.steps: got 2.5 (float), expected int"),
        ({"train": {"steps": True}}, "train.steps: got True (bool), expected int"),
        ({"logging": {"every": None}}, "logging.every: got None (null), expected int"),
        ({"train": {"activation_checkpointing": 1}}, "train.activation_checkpointing: got 1 (int), expected bool"),
        ({"train": 3}, "train: got 3 (int), expected a mapping"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr: got nan (float), expected float"),
        (
            {"parallel": {"offload": "half"}},
            "got 'half' (str), expected bool or one of none, optimizer, gradients, all",
        ),
        (
            {"parallel": {"offload": "optimizer"}, "optimizer": {"name": "sgd", "momentum": 0.9}},
            "parallel.offload: got 'optimizer', expected gradients, all or none with this optimizer",
        ),
        (
            {"parallel": {"offload": "optimizer"}, "optimizer": {"implementation": "foreach"}},
            "parallel.offload: got 'optimizer', expected gradients, all or none with this optimizer",
        ),
        (
            {"parallel": {"offload": True, "expert_parallel": 2}},
            "parallel.offload: got True, expected none with parallel.expert_parallel",
        ),
        ({"train": {"clip": [1]}}, "train.clip: got a list ([1]), expected float or null"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas: got a list ([0.9]), expected list of 2 float"),
        ({"optimizer": {"betas": [0.9, 1.5]}}, "optimizer.betas: got (0.9, 1.5), expected two numbers in [0, 1)"),
        ({"train": {"batch_size": 0}}, "train.batch_size: got 0, expected a positive number"),
        (
            {"schedule": {"kind": "cosin"}},
            "expected one of cosine, linear, constant, inverse_sqrt, wsd; did you mean cosine?",
        ),
        ({"data": {"files": ["a", 3]}}, "data.files[1]: got 3 (int), expected str"),
        ({"data": {}}, "data.files: got [], expected at least one file"),
        ({"model": {}}, "model: got neither of model.config and model.path"),
        ({"model": {"path": "x", "config": {"model_type": "qwen3"}}}, "model: got both of model.config and model.path"),
        (
            {"model": {"config": {"hidden_size": 3}}},
            "model.config: got ['hidden_size'], expected a mapping with the key",
        ),
    ],
)
def test_each_mistake_is_named(settings, message):
    with pytest.raises(ConfigError) as error:
        parse_config(with_settings(**settings))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("setting", "mode"),
    [(False, "none"), (True, "all"), *((mode, mode) for mode in ("none", "optimizer", "gradients", "all"))],
)
def test_what_is_offloaded(setting, mode):
    parallel = parse_config(with_settings(parallel={"offload": setting})).parallel
    plan = SimpleNamespace(make=lambda device: None, reshard_after_forward=None)
    policy = sharding(parallel, plan, torch.device("cpu"), None)["offload_policy"]
    assert policy == fsdp2x.HostOffloadPolicy(mode, pin_memory=False)


@pytest.mark.parametrize("name", ["bf16", "torch.bfloat16", "bfloat16"])
def test_a_dtype_goes_by_every_name_it_has(name):
    """Where a setting takes it: int8 and fp8 go by one name, and float16 is no dtype of moments."""
    config = parse_config(
        with_settings(
            model={"dtype": name, "config": {"model_type": "qwen3"}},
            parallel={"param_dtype": name, "wire_gradients": name},
            optimizer={"moments_dtype": name},
        )
    )
    parallel = config.parallel
    assert {config.model.dtype, parallel.param_dtype, parallel.wire_gradients, config.optimizer.moments_dtype} == {
        "bfloat16"
    }
    with pytest.raises(ConfigError, match="optimizer.moments_dtype: got 'fp16'"):
        parse_config(with_settings(optimizer={"moments_dtype": "fp16"}))


def test_scientific_numbers_without_a_dot_are_numbers():
    assert parse_config(with_settings(optimizer={"lr": "1e-3"})).optimizer.lr == 1e-3


def test_on_and_off_are_words_though_yaml_reads_booleans():
    for word in ("on", "off", "auto"):
        settings = apply_overrides(GOOD, [f"logging.progress={word}"])
        assert parse_config(settings).logging.progress == word


def test_one_string_is_a_list_of_one():
    assert parse_config(with_settings(data={"files": "a.txt", "pattern": "*.py"})).data.pattern == ["*.py"]


def test_overrides_are_yaml_and_leave_the_original_alone():
    base = {"train": {"steps": 1}}
    changed = apply_overrides(base, ["train.steps=5", "optimizer.lr=1e-4", "data.files=[a, b]", "train.clip=null"])
    assert changed["train"] == {"steps": 5, "clip": None}
    assert changed["data"] == {"files": ["a", "b"]}
    assert base == {"train": {"steps": 1}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "override 'train.steps': expected key=value"),
        ("=3", "override '=3': expected key=value"),
        ("train..steps=3", "override 'train..steps=3': expected key=value"),
        ("train.steps.deep=3", "override train.steps.deep: train.steps is 1 (int), expected a mapping"),
        ("train.steps=[1", "override train.steps=[1: not valid YAML"),
    ],
)
def test_bad_overrides(override, message):
    with pytest.raises(ConfigError) as error:
        apply_overrides({"train": {"steps": 1}}, [override])
    assert message in str(error.value)


def test_files_that_are_no_config(tmp_path):
    for text, message in (
        (None, "No such file"),
        ("a: [", "not valid YAML"),
        ("- 1", "expected a mapping of sections"),
    ):
        path = tmp_path / "c.yaml"
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=message) as error:
            load_config(path)
        assert str(path) in str(error.value)


def test_yaml_cannot_execute(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(f"train: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(path)
    with pytest.raises(ConfigError, match="not valid YAML"):
        apply_overrides({}, [f"train.steps=!!python/object/apply:os.mkdir ['{tmp_path / 'made'}']"])
    assert not (tmp_path / "made").exists()


def test_resume_from_replaces_the_setting(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {config: {model_type: qwen3}}\ndata: {files: a}\ncheckpoint: {resume_from: b}")
    assert load_config(path).checkpoint.resume_from == "b"
    assert load_config(path, resume_from="c").checkpoint.resume_from == "c"


def test_every_setting_has_a_help_text():
    keys = known_keys()
    assert "train.steps" in keys and "optimizer.lr" in keys
    for name, setting in keys.items():
        assert setting.help, name


def test_config_survives_a_round_trip():
    config = parse_config(with_settings(optimizer={"betas": [0.8, 0.9]}))
    assert parse_config(dataclasses.asdict(config)) == config
    assert isinstance(config, TrainConfig)
