"""Settings: every mistake is one sentence with the dotted path, YAML is read with limits, and idle keys are named."""

import logging
import os
import random
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import damage
import fsdp2x
import fsdp2x.sharding.wrap
from fsdp2x.train import ConfigError, TrainConfig, load_config, parse, parse_config
from fsdp2x.train.config import SECTIONS, ParallelConfig, known_keys
from fsdp2x.train.config_file import IDLE, ConfigFile
from fsdp2x.train.model import build_on_meta, idle_expert_units, sharding, unit_policy
from fsdp2x.train.parse import MOST_BYTES, apply_overrides, load_yaml, read_yaml
from fsdp2x.train.translate import translate
from training import MODEL, settings

GOOD = {"model": {"config": {"model_type": "qwen3"}}, "data": {"files": ["a.txt"]}}
EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples").glob("*.yaml"))


def with_settings(**sections):
    return {**GOOD, **sections}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 3}, "unknown key steps. Did you mean train.steps?"),
        ({"checkpoint": {"lr": 3}}, "unknown key checkpoint.lr. Did you mean optimizer.lr?"),
        ({"train": 3}, "train: got 3 (int), expected a mapping"),
        ({"train": {"steps": True}}, "train.steps: got True (bool), expected int above 0 or null"),
        ({"data": {"block_size": 1}}, "data.block_size: got 1 (int), expected int at least 2"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr: got nan (float), expected float above 0"),
        ({"optimizer": {"betas": [0.9, 1.5]}}, "expected list of 2 float at least 0 and below 1"),
        ({"checkpoint": {"resume_from": ""}}, "checkpoint.resume_from: got '' (str), expected nonempty str or null"),
        ({"parallel": {"sequence_parallel": {"ring": 2}}}, "expected int at least 1 or mapping from one of ulysses, "),
        ({"logging": {"profile_start": 3, "profile_end": 2}}, "logging.profile_end: got 2, expected 3 or more"),
        ({"optimizer": {"name": "sgd", "adamw_lr": 1.0}}, "optimizer.adamw_lr: got 1.0, expected null"),
        ({"optimizer": {"stochastic_rounding": True}}, "expected false, since optimizer.moments_dtype is null"),
        (
            {"parallel": {"offload": "optimizer"}, "optimizer": {"name": "sgd", "momentum": 0.9}},
            "parallel.offload: got 'optimizer', expected gradients, all or none with this optimizer",
        ),
        (
            {"parallel": {"offload": True, "expert_parallel": 2}},
            "got True, expected none with parallel.expert_parallel",
        ),
        ({"model": {"path": "x", "config": {"model_type": "qwen3"}}}, "model: got both of model.config and model.path"),
        (
            {"model": {"config": {"hidden_size": 3}}},
            "model.config: got {'hidden_size': 3}, expected a mapping with the",
        ),
    ],
)
def test_each_mistake_is_named(settings, message):
    with pytest.raises(ConfigError) as error:
        parse_config(with_settings(**settings))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_every_key_refuses_other_types_and_takes_its_default():
    wrong: dict = {}
    for key, known in known_keys().items():
        section, name = key.split(".")
        wrong.setdefault(section, {})[name] = [[3]]
        assert getattr(getattr(parse_config({section: {name: known.default}}), section), name) == known.default
    with pytest.raises(ConfigError) as error:
        parse_config(wrong)
    said = [f"{key}: got a list ([[3]]), expected {known.type}" for key, known in known_keys().items()]
    assert sorted(str(error.value).split("\n")) == sorted(said)


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
    assert load_yaml("[1e-3, 2E5, +1e3, 1e, e3, 1.5]", "here") == [1e-3, 2e5, 1e3, "1e", "e3", 1.5]


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


def test_resume_from_replaces_the_setting(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {config: {model_type: qwen3}}\ndata: {files: a}\ncheckpoint: {resume_from: b}")
    assert load_config(path).checkpoint.resume_from == "b"
    assert load_config(path, resume_from="c").checkpoint.resume_from == "c"


def test_config_survives_a_round_trip():
    config = parse_config(with_settings(optimizer={"betas": [0.8, 0.9]}))
    assert parse_config(config.model_dump()) == config
    assert isinstance(config, TrainConfig)


# ---- YAML

LIST = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
BOMB = LIST + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
MERGES = "a0: &a0 {k: v}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12))

MISTAKES = [
    (BOMB, "line .+: with its aliases the text has more than 20000 values"),
    (MERGES, "line .+: with its aliases the text has more than 20000 values"),
    ("a: &a [*a]", "line 1 is nested deeper than 64 levels"),
    ("a: &a\n  b: {c: *a}", "line . is nested deeper than 64 levels"),
    ("[" * 300 + "]" * 300, "(line 1|the text) is nested deeper than 64 levels"),
    ("[" * 100_000, "the text is nested deeper than 64 levels"),
    ("{a: " * 3000, "the text is nested deeper than 64 levels"),
    ("- " * 5000, "the text is nested deeper than 64 levels"),
    ("? " * 5000, "the text is nested deeper than 64 levels"),
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
    ("a: 1\nb: {c: 1, c: 2}", "c is set twice, in lines 2 and 2. Keep one"),
    ("\0", "not valid YAML"),
]


@pytest.mark.parametrize(("text", "reason"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_one_sentence_and_soon(tmp_path, text, reason):
    begun = time.process_time()
    with pytest.raises(ConfigError, match=rf"here(:\d+)?: {reason}") as error:
        load_yaml(text, "here")
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    assert time.process_time() - begun < 20
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"config file .*x.yaml(:\d+)?: {reason}"):
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
    monkeypatch.setattr(parse, "MOST_VALUES", 300)
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
    (tmp_path / "list").write_text("- 1")
    for name, reason in (
        ("large", "it has more than"),
        ("bytes", "not UTF-8 text"),
        ("gone", "No such file"),
        ("list", "expected a mapping of sections"),
        (".", ""),
    ):
        with pytest.raises(ConfigError, match=f"config file .*: .*{reason}"):
            read_yaml(tmp_path / name)
    with pytest.raises(ConfigError, match="it has more than"):
        read_yaml("/dev/zero")


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 1000), marks=pytest.mark.full)], ids=["60", "1000"]
)
def test_a_changed_config_is_read_or_refused_with_a_sentence(tmp_path, seeds):
    path = tmp_path / "x.yaml"
    read = 0
    for seed in seeds:
        rng = random.Random(seed)
        example = rng.choice(EXAMPLES)
        tree, change = damage.change(rng, yaml.safe_load(example.read_text()), json_only=True)
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
            if example.stem == "demo":
                load_config(path, ["data.files=text"])
            else:
                translate(ConfigFile.read_any(path, ()).settings)
            read += 1
        except ConfigError as error:
            lines = str(error).splitlines()  # one for each unknown key
            assert len(lines) == 1 or all(re.search("unknown key |: got ", line) for line in lines), (seed, change.what)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {change.what}: {error!r}") from error
    assert read > len(seeds) // 20


# ---- settings that mean nothing next to the others

# Settings -> those that are named as without effect.
IDLE_SETTINGS = [
    ({}, []),
    ({"lora.alpha": 3.0, "lora.dropout": 0.5}, ["lora.alpha", "lora.dropout"]),
    ({"lora.rank": 2, "lora.alpha": 3.0}, []),
    ({"lora.alpha": 16.0}, []),  # the default
    ({"data.max_tokens": 32, "logging.wandb_options": {"project": "x"}}, ["data.max_tokens", "logging.wandb_options"]),
    ({"optimizer.name": "sgd", "optimizer.betas": [0.5, 0.5]}, ["optimizer.betas"]),
    ({"optimizer.name": "muon", "optimizer.muon_split": "heads", "lora.rank": 2},
     ["optimizer.name", "optimizer.muon_split"]),
    ({"model.config": {"model_type": "qwen3_moe", "router_aux_loss_coef": 0.001}},
     ["model.config.router_aux_loss_coef"]),
    ({"model.config": {"model_type": "qwen3_moe", "router_aux_loss_coef": 1.0, "output_router_logits": True}}, []),
    ({"schedule.warmup_steps": 2, "schedule.warmup_ratio": 0.5}, ["schedule.warmup_ratio"]),
    ({"schedule.kind": "constant", "schedule.min_lr": 1e-4, "schedule.wsd_decay_steps": 3},
     ["schedule.min_lr", "schedule.wsd_decay_steps"]),
    ({"scaler.enabled": False, "scaler.init_scale": 2.0}, ["scaler.init_scale"]),
    ({"train.eval_blocks": 1, "parallel.expert_fsdp_size": 1}, ["train.eval_blocks", "parallel.expert_fsdp_size"]),
    ({"train.eval_every": 1, "train.eval_blocks": 1}, []),
    ({"train.compile": True, "train.compile_backend": "eager"}, []),
    ({"train.mode": "evaluate", "optimizer.lr": 0.5, "train.clip": 0.5, "parallel.offload": "gradients"},
     ["optimizer.lr", "train.clip", "parallel.offload"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "named"), IDLE_SETTINGS, ids=range(len(IDLE_SETTINGS)))
def test_settings_without_effect_are_named_in_the_log(tmp_path, caplog, changes, named):
    config = settings(tmp_path / "text", tmp_path / "run", schedule={"warmup_steps": 0}, optimizer={"lr": 3e-4})
    config["train"].pop("steps")
    for key, value in changes.items():
        section, name = key.split(".")
        config.setdefault(section, {})[name] = value
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with caplog.at_level(logging.WARNING):
        load_config(tmp_path / "config.yaml")
    said = [re.findall(r"([a-z_.]+)=.* has no effect: ", record.getMessage()) for record in caplog.records]
    assert sorted(key for keys in said for key in keys) == sorted(named)


def test_keys_that_may_be_without_effect_are_known():
    known = {*known_keys(), *SECTIONS}
    assert {key for keys in IDLE for key in keys if not key.startswith("model.config.")} <= known


FUSED = {"qwen3_moe": "Qwen3MoeMLP", "qwen2_moe": "Qwen2MoeExpert", "mixtral": "MixtralBlockSparseTop2MLP"}


@pytest.mark.parametrize("model_type", FUSED)
def test_experts_that_transformers_has_fused_need_no_units(model_type):
    """fsdp2x reports that their former class has no effect. Existing classes stay units, and typos raise."""
    sizes = {**MODEL, "model_type": model_type, "num_hidden_layers": 1, "vocab_size": 16}
    if model_type == "mixtral":
        sizes["num_local_experts"] = 4
    else:
        sizes.update(num_experts=4, moe_intermediate_size=12)
    config = parse_config({"model": {"config": sizes}, "data": {"files": ["text"]}})
    model = build_on_meta(config.model, torch.float32)
    named = ParallelConfig(expert_units=[FUSED[model_type]])
    assert unit_policy(model, named) == unit_policy(model, ParallelConfig())
    assert "fused" in idle_expert_units(model, named)[FUSED[model_type]]
    present = type(next(m for n, m in model.named_modules() if n.endswith("experts"))).__name__
    both = ParallelConfig(expert_units=[FUSED[model_type], present])
    assert unit_policy(model, both)[-1] == present and list(idle_expert_units(model, both)) == [FUSED[model_type]]


def test_units_of_experts_in_a_model_without_any_are_refused():
    config = parse_config({"model": {"config": {**MODEL, "vocab_size": 16}}, "data": {"files": ["text"]}})
    model = build_on_meta(config.model, torch.float32)
    named = ParallelConfig(expert_units=["Qwen3MoeMLP"])
    assert idle_expert_units(model, named) == {}
    with pytest.raises(ValueError, match="Qwen3MoeMLP"):
        fsdp2x.sharding.wrap.plan_units(model, unit_policy(model, named))
