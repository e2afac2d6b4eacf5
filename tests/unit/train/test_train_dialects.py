"""Configs of other trainers: each key becomes a setting or is reported as without effect. Every typo gets a message."""

import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union

import pytest
import yaml

import snippets
from fsdp2x.train import ConfigError, load_config
from fsdp2x.train.cli import main
from fsdp2x.train.config import TrainConfig
from fsdp2x.train.dialects import DIALECTS
from fsdp2x.train.explain_config import explain
from fsdp2x.train.load_config import translate
from fsdp2x.train.parse import known_keys
from fsdp2x.train.translate import Dialect, KeyResult, Row, Translation, becomes, interpolate

EXAMPLES = Path(__file__).parents[3] / "examples"
TINY = "model.config={model_type: qwen3, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2}"


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def settings_of(text: str, *overrides: str) -> dict:
    return translate(yaml.safe_load(text), overrides).settings


# ---- the snippets of the documents


@pytest.mark.parametrize(
    ("name", "world_size", "dialect", "line"),
    [
        ("FLAT_KEYS", None, "flat", "4 rank(s)  FULL_SHARD: mesh (4,) [fsdp], 4 shards"),
        ("FLAT_BATCH", 2, "flat", "64 sequences (32 per rank x 1 micro-batches x 2 data-parallel ranks)"),
        ("STRATEGY_TRAIN", None, "strategy", "16 rank(s)  FSDP: mesh (16,) [fsdp]"),
        ("STRATEGY_INFER", None, "strategy", "8 rank(s)  HSDP: mesh (2, 4) [ddp, fsdp]"),
        (
            "STRATEGY_ULYSSES",
            None,
            "strategy",
            "mesh (2, 4) [ddp, fsdp], 2 copies of 4 shards, reshard after forward; seq",
        ),
        ("STRATEGY_ONE_AXIS", 16, "strategy", "FSDP: mesh (16,) [fsdp]"),
        ("STRATEGY_TWO_AXES", 16, "strategy", "HSDP: mesh (2, 8) [ddp, fsdp]"),
        ("STRATEGY_TWO_AXES_ULYSSES", 8, "strategy", "HSDP: mesh (2, 4) [ddp, fsdp]"),
        ("STRATEGY_TEXT_MODEL", 16, "strategy", "parallel.auto_wrap=[Qwen3DecoderLayer]"),
        ("STRATEGY_VISION", 4, "strategy", "model.freeze=[vision_model]"),
        ("STRATEGY_EXPERTS", 16, "strategy", "parallel.expert_units=[Qwen3MoeMLP]"),
        ("STRATEGY_ALL", None, "strategy", "2 rank(s)  FSDP: mesh (2,) [fsdp]"),
        ("NESTED_ALL", None, "nested", "2 rank(s)  FSDP: mesh (2,) [fsdp]"),
    ],
)
def test_snippets_are_explained(write, name, world_size, dialect, line):
    overrides = ["role=actor_train"] if name == "STRATEGY_ALL" else []
    found = explain(write(getattr(snippets, name)), overrides, world_size=world_size)
    assert found.translation.dialect == dialect
    assert line in str(found)
    if name != "NESTED_ALL":  # it names a folder and a text
        assert any("the model" in need for need in found.translation.needs)
        assert any("the text" in need for need in found.translation.needs)


def test_one_snippet_shows_two_choices_at_once(write):
    with pytest.raises(ConfigError, match=r"sharding_strategy is set twice, in lines 2 and 4. Keep one"):
        explain(write(snippets.FLAT_TWO_STRATEGIES))


def test_a_config_of_overrides_alone(write):
    found = explain(write(""), list(snippets.NESTED_OVERRIDES), world_size=2)
    model, data = found.translation.settings["model"], found.translation.settings["data"]
    assert found.translation.dialect == "nested"
    assert (model["grouped_gemm"], model["load"]) == (True, "rows")
    assert (data["packing"], data["max_tokens"]) == (True, 4096)
    assert found.translation.settings["logging"]["wandb_options"] == {"project": "Your-Wandb-Project-Name"}
    assert "models.policy.enforce_eager" in str(found).partition("no effect")[2]
    assert found.plan.sequence_ranks == (2, 1)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_explained(path, capsys):
    assert main(["config", "explain", str(path)]) == 0
    assert "rank(s)" in capsys.readouterr().out


def test_the_command_says_what_a_run_needs(write, capsys):
    path = write(snippets.STRATEGY_TRAIN)
    assert main(["config", "explain", str(path)]) == 0
    assert "To run it needs:\n  model.path=FOLDER" in capsys.readouterr().out
    assert main(["train", str(path)]) == 2
    assert "lacks settings. To run it needs model.path=FOLDER" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"it needs data.files=FILES: the text\.$"):
        load_config(path, [TINY])


def test_as_json(write, capsys):
    assert main(["config", "explain", str(write(snippets.STRATEGY_INFER)), TINY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"shape": [2, 4], "axes": ["ddp", "fsdp"], "strategy": "HSDP"}
    assert [unit["count"] for unit in found["units"] if unit["modules"] == "Qwen3DecoderLayer"] == [2]


def test_memory_is_planned_for_the_mesh_of_any_dialect(write, capsys):
    assert main(["plan", str(EXAMPLES / "gpt_flat_small.yaml"), "--world-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_parameters"] == 689_728
    sizes = []
    for overrides in (["strategy_config.fsdp_size=4"], ["strategy_config.fsdp_size=2"]):
        text = write(snippets.STRATEGY_TEXT_MODEL)
        assert main(["plan", str(text), TINY, *overrides, "--world-size", "4", "--json"]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["report"]["resting_bytes"])
    assert 1.5 * sizes[0] < sizes[1] <= 2.1 * sizes[0]  # two copies of two shards, against four shards


# ---- what keys become


def test_flat_keys():
    text = (EXAMPLES / "gpt_flat_small.yaml").read_text()
    got = settings_of(text)
    assert got["model"]["config"]["model_type"] == "gpt2" and got["model"]["config"]["attn_pdrop"] == 0.05
    assert got["data"] == {
        "files": ["data/train.txt"],
        "held_out": 0.2,
        "block_size": 64,
    }
    assert got["train"]["global_batch_size"] == 48 and got["train"]["eval_blocks"] == 20 * 16
    assert got["optimizer"] == {"lr": 2e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]}
    assert got["checkpoint"]["resume_from"] is None
    assert settings_of(text, "grad_clip=0")["train"]["clip"] is None
    assert settings_of(text, "fsdp=False")["parallel"]["strategy"] == "NO_SHARD"
    assert settings_of(text, "sharding_strategy=HYBRID_SHARD")["parallel"]["strategy"] == "HYBRID_SHARD"
    assert settings_of(text, "optimizer.lr=1")["optimizer"]["lr"] == 1  # our own key wins


def test_roles():
    training = settings_of(snippets.STRATEGY_ALL, "role=actor_train")
    assert training["parallel"]["param_dtype"] == "bfloat16" and "dtype" not in training["model"]
    reference = settings_of(snippets.STRATEGY_ALL, "role=reference")
    assert reference["train"]["mode"] == "evaluate" and reference["model"]["dtype"] == "bfloat16"
    assert "param_dtype" not in reference["parallel"]
    evaluated = settings_of(snippets.NESTED_ALL, "role=ref_policy")
    assert evaluated["train"]["mode"] == "evaluate"


def test_nested_keys():
    got = settings_of(snippets.NESTED_ALL)
    assert got["train"] == {
        "steps": 3,
        "batch_size": 2,
        "global_batch_size": 8,
        "eval_every": 3,
        "mode": "train",
        "eval_batch_size": 8,
        "clip": 1.0,
        "activation_checkpointing": True,
    }
    assert got["parallel"]["fsdp_size"] == 2 and got["logging"]["output"] == "some_output_dir"
    assert got["logging"]["wandb_options"]["name"] == "demo"


def test_tiled_mlp_and_accumulation():
    base = "strategy_config: {apply_tiled_mlp: %s, tiled_num_shards: 8, reduce_scatter_during_grad_accumulation: true}"
    assert settings_of(base % "true")["model"]["tiled_mlp"] == 8
    assert settings_of(base % "true")["parallel"]["accumulate"] == "reduce_scatter"
    off = translate(yaml.safe_load(base % "false"))
    assert off.settings["model"]["tiled_mlp"] == 0 and "tiled_num_shards" in " ".join(off.without_effect())
    assert settings_of("strategy_config: {apply_tiled_mlp: true}")["model"]["tiled_mlp"] == 4


def test_lists_of_keys(capsys):
    for dialect in ("sections", "flat", "strategy", "nested", "all"):
        assert main(["config", "list", "--dialect", dialect]) == 0
        text = capsys.readouterr().out
        assert ("optimizer.lr: float = 0.0003" in text) == (dialect in ("sections", "all"))
    for other in DIALECTS:
        for key in other.rows:
            assert key in text


# ---- slips: one sentence each

FLAT = (EXAMPLES / "gpt_flat_small.yaml").read_text()
TRAIN = snippets.STRATEGY_TRAIN
NESTED = snippets.NESTED_ALL
MUTATIONS = [
    # key, spelling, value
    (FLAT, "sharding_strategy:", "shardng_strategy:",
     "unknown key shardng_strategy. Did you mean sharding_strategy?"),
    (FLAT, "FULL_SHARD", "FULL_SHARDS", "NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 or null; did you mean FULL_SHARD?"),
    (FLAT, "n_embd:", "n_embed:", "unknown key n_embed. Did you mean n_embd?"),
    (FLAT, "train_batch: 48", "train_batch: 47", "train_batch: got 47, expected a multiple of 2 ranks"),
    (FLAT, "bias: True", "bias: False", "bias: got false; GPT-2 of transformers always has them"),
    (FLAT, "lr: 2e-3", "lr: fast", "lr: got 'fast' (str), expected float"),
    (FLAT, "train_percent: 0.8", "train_percent: 80", "train_percent: got 80.0, expected a fraction in (0, 1]"),
    (FLAT, "device: cuda", "device: gpu", "device: got 'gpu' (str), expected one of cuda, cpu"),
    (FLAT, "seed: 114514", "seed: 1\nseed: 2", "seed is set twice, in lines"),
    (FLAT, "seed: 114514", "train: {seed: 1}",
     "mixes data_path of the flat training keys and train of fsdp2x's own sections"),
    (TRAIN, "fsdp_size:", "fsdp_sise:",
     "config.fsdp_sise. Did you mean actor_train.strategy_args.strategy_config.fsdp_size?"),
    (TRAIN, "fsdp_size: 16", "fsdp_size: 5", "strategy_config.fsdp_size: got 5, expected a divisor of the 16 ranks"),
    (TRAIN, "fsdp2_train", "fsdp_train", "expected one of fsdp2_train, fsdp2_infer; did you mean fsdp2_train?"),
    (TRAIN, "param_dtype: bf16", "param_dtype: bf17",
     "param_dtype: got 'bf17' (str), expected one of float32, bfloat16, float16; did you mean bf16?"),
    (TRAIN, "model_type: ~", "model_type: trl", "model_type: got trl; heads for values are not built here"),
    (TRAIN, "list(range(0,16))", "list(range(0,__import__('os').cpu_count()))", "device_mapping: got"),
    (TRAIN, "strategy_args:", "strategy_argz:", "unknown key actor_train.strategy_argz.strategy_name. Did you mean"),
    (TRAIN, "actor_train:", "models: {policy_trainer: {packing: true}}\nactor_train:",
     "mixes models of models.* and runtime_args.* and actor_train of model_args"),
    (TRAIN, "    dtype: bf16\n", "    dtype: bf16\n    ulysses_size: 3\n",
     "actor_train.model_args.ulysses_size: got 3, expected a divisor of the 16"),
    (NESTED, "packing: False", "packng: False",
     "unknown key models.policy_trainer.packng. Did you mean models.policy_trainer.packing?"),
    (NESTED, "policy_trainer:\n    use", "policy_trainr:\n    use",
     "unknown key models.policy_trainr.use_expandable_segments. Did you mean models.policy_trainer.use"),
    (NESTED, "gpu_per_process: 1\n    num_gpu: 2", "gpu_per_process: 2\n    num_gpu: 2",
     "gpu_per_process: got 2; a rank has one GPU"),
    (NESTED, "train_backend: fsdp", "train_backend: megatron",
     "train_backend: got megatron; only fsdp is trained here"),
    (NESTED, "${runtime_args.exp_name}", "${oc.env:HOME}", "${oc.env:HOME} would have to be computed. Write its value"),
    (NESTED, "exp_name: demo", "exp_name: ${runtime_args.exp_name}", "its references lead in a circle"),
    (NESTED, "output_dir: some", "#", "${runtime_args.output_dir} refers to a key that is not in the file"),
    (NESTED, "optimizer: {lr: 2e-6, clip_grad: 1}", "optimizer: 3",
     "policy_trainer.optimizer: got 3 (int), expected a mapping"),
]  # fmt: skip


OVERRIDES = [
    (snippets.STRATEGY_ALL, [], "the file has the roles actor_train, reference; say which one with role=NAME"),
    (snippets.STRATEGY_ALL, ["role=critic"], "role=critic: the file has actor_train, reference"),
    (FLAT, ["role=actor_train"], "role=actor_train: the flat training keys describe one model"),
    (NESTED, ["role=reward"], "role=reward: expected one of policy_trainer, ref_policy"),
    (NESTED, ["models.policy_trainer.packin=1"], "unknown key models.policy_trainer.packin. Did you mean"),
    (TRAIN, ["optimizer.lrr=1"], "unknown key optimizer.lrr. Did you mean optimizer.lr?"),
    (TRAIN, ["optimzer.lr=1"], "unknown key optimzer.lr. Did you mean"),
    ("learning_rate: 3", [], "config.yaml:1: unknown key learning_rate. Did you mean optimizer.lr?"),
    ("strategy_config: {fsdp_size: 2, reshard_after_forward: sometimes}", [], "expected bool or int or null"),
    ("strategy_config: 3", [], "strategy_config: got 3 (int), expected a mapping"),
    ("actor_train: 3", [], "actor_train: got 3, expected a mapping with model_args"),
    ("training_args: {seed: 3}\nseed: 4", [], "it means train.seed=4, but training_args.seed means train.seed=3"),
    ("a.b: 1\na: {b: 2}", [], "it is set twice"),
]
SLIPS = [(text.replace(old, new, 1), [], sentence) for text, old, new, sentence in MUTATIONS] + OVERRIDES


@pytest.mark.parametrize(("text", "overrides", "sentence"), SLIPS, ids=range(len(SLIPS)))
def test_a_slip_gets_its_sentence(write, text, overrides, sentence):
    with pytest.raises(ConfigError) as error:
        explain(write(text), overrides)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


# ---- every row of every table


SAMPLES = {
    bool: [True, False], int: [2, 1, 0], float: [0.5, 0.0], type(None): [None], Any: [[0, 1], "list(range(0,4))", "x"],
    str: ["bf16", "fsdp", "fsdp2_train", "fsdp2_infer", "adam", "a.check_reward_nonzero_std", ""],
    dict: [{"output_dir": "a", "log_dir": "b"}, {"math": {"worker_cls": "a.MathRuleRewardWorker"}}],
}  # fmt: skip


def samples(kind: Any) -> list:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return [value for option in args for value in samples(option)]
    if origin is Literal:
        return list(args)
    return [samples(args[0])[:2]] if origin is list else SAMPLES[kind]


def nested(values: dict[str, Any]) -> dict:
    result: dict = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
    return result


def translated(dialect: Dialect, values: dict[str, Any], role: str = "") -> Translation:
    role = "ref_policy" if dialect.name == "nested" and role.startswith("models.ref_policy.") else ""
    return translate(nested(values), [f"role={role}"] if role else ())


def companions(dialect: Dialect) -> dict[str, Any]:
    """Returns a file with as many compatible keys as possible, because some rows only have an effect with others."""
    file: dict[str, Any] = {}
    for key, row in dialect.rows.items():
        for value in samples(row.kind)[:1]:
            try:
                for role in ("", "models.ref_policy."):
                    translated(dialect, {**file, key: value}, role)
            except ConfigError:
                continue
            file[key] = value
    return file


def wrongs_of(dialect: Dialect, key: str, beside: dict[str, Any]) -> Iterator[str]:
    """Yields the effects of the row that differ from its description."""
    row, reached, results = dialect.rows[key], set(), []
    known = known_keys(TrainConfig)
    for path in row.to:
        if path not in known and path.rpartition(".")[0] not in known:
            yield f"{key}: {path} is no setting of ours"
    nothing = nothing_of(row, dialect, beside)
    for others in ({}, beside, nothing, {other: value for other, value in nothing.items() if value is not True}):
        for value in samples(row.kind) if not results or set(row.to) - reached else ():
            file = {**others, key: value}
            try:
                translation = translated(dialect, file, key)
            except ConfigError as error:
                if not str(error).startswith(f"{key}: ") and "it means" not in str(error):
                    yield f"{key}={value!r} is refused without its name: {error}"
                continue
            (result,) = (result for result in translation.results if result.key == key)
            results.append(result)
            reached |= set(result.became)
            for path, setting in result.became.items():
                section, _, name = path.partition(".")
                held = translation.settings.get(section, {})
                # Sizes of a model that is not there are left out with it.
                if name in held and held[name] != setting:
                    yield f"{key}={value!r}: {path} is {held[name]!r}, told as {setting!r}"
            if not result.became and not result.remark:
                yield f"{key}={value!r}: neither a setting nor a reason"
    if not results:
        yield f"{key}: no value of {row.kind} is taken"
    for path in set(row.to) - reached:
        yield f"{key}: {path} is never set"
    for path in reached - set(row.to):
        if path.rpartition(".")[2] not in row.help:
            yield f"{key}: {path} is set, and is not told in the list of keys"


def nothing_of(row: Row, dialect: Dialect, beside: dict[str, Any]) -> dict[str, Any]:
    """The companions that set none of the row's own settings."""
    return {other: value for other, value in beside.items() if not set(dialect.rows[other].to) & set(row.to)}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_every_row_has_its_effect_or_its_refusal(dialect):
    """A row sets what it says it sets, or says why it has no effect, or refuses the value by the key's name."""
    beside = companions(dialect)
    assert [wrong for key in dialect.rows for wrong in wrongs_of(dialect, key, beside)] == []
    for key, row in dialect.rows.items():
        if row.kind is not Any:
            with pytest.raises(ConfigError, match=f"^{key}: got .*, expected"):
                translated(dialect, {key: [[{"not": "this"}]]})


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        (becomes("train.sead", kind=int), "train.sead is no setting of ours"),
        (becomes("train.seed", "train.epochs", kind=int, by=lambda value, _: KeyResult(remark="why")), "never set"),
        (Row(kind=int), "neither a setting nor a reason"),
    ],
)
def test_a_planted_row_that_does_not_do_as_it_says_is_found(monkeypatch, row, wrong):
    flat = DIALECTS[0]
    monkeypatch.setitem(flat.rows, "seed", row)
    assert any(wrong in found for found in wrongs_of(flat, "seed", {}))


@pytest.mark.parametrize("text", ["list(range(0,4,0))", f"range({10**20})", "range(4,0)", "__import__('os').abort()"])
def test_devices_are_never_computed(text):
    with pytest.raises(ConfigError, match="device_mapping: got .* expected device ids"):
        translate({"device_mapping": text, "model_args": {"dtype": "bf16"}})


def test_references_that_multiply_end():
    for value in ("${b}" * 50, ["${b}"] * 50):
        settings: dict = {"a": value}
        for one, other in zip("bcdefgh", "cdefghi", strict=True):
            settings[one] = [f"${{{other}}}"] * 50 if isinstance(value, list) else f"${{{other}}}" * 50
        settings["i"] = "x"
        with pytest.raises(ConfigError, match="its references lead to more"):
            interpolate(settings)
