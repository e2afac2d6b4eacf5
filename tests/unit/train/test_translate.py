"""Configs of other trainers, translated: every row of the table, every snippet of their documents, and typos."""

import itertools
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import TypeAdapter

import snippets
from fsdp2x.train import ConfigError, load_config
from fsdp2x.train.cli import main
from fsdp2x.train.config import SECTIONS, known_keys
from fsdp2x.train.parse import apply_overrides, foreign_keys
from fsdp2x.train.translate import COLUMNS, interpolate, translate

EXAMPLES = Path(__file__).parents[3] / "examples"
TINY = "model.config={model_type: qwen3, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2}"
FORMATS = {name: form for name, form in foreign_keys()["formats"].items() if "instead" not in form}
FLAT = (EXAMPLES / "gpt_flat_small.yaml").read_text()


@pytest.fixture
def translated(tmp_path, capsys):
    """Returns a function that translates a text by the command, into a file and what standard error says."""

    def run(text: str, *words: str, status: int = 0) -> tuple[Path, list[str]]:
        (tmp_path / "old.yaml").write_text(text, encoding="utf-8")
        assert main(["config", "translate", str(tmp_path / "old.yaml"), *words]) == status
        said = capsys.readouterr()
        (tmp_path / "mine.yaml").write_text(said.out)
        return tmp_path / "mine.yaml", said.err.replace(f"{tmp_path}/", "").splitlines()

    return run


def settings_of(text: str, *overrides: str, **options: Any) -> dict:
    return translate(apply_overrides(yaml.safe_load(text), overrides), **options).settings


# ---- every row of the table


def columns_of(column: Any) -> list[dict]:
    """The columns with a setting, as mappings."""
    columns = column if isinstance(column, list) else [column]
    as_mappings = ({"to": one} if isinstance(one, str) and " " not in one else one for one in columns)
    return [one for one in as_mappings if isinstance(one, dict) and "to" in one]


def targets(form: dict, wanted: str):
    """Yields each key, column and setting of a format that a command gets, also from its defaults."""
    for key, row in form["keys"].items():
        for name in COLUMNS[wanted]:
            for column in columns_of(row.get(name)) if isinstance(row, dict) else ():
                for path in column["to"] if isinstance(column["to"], list) else [column["to"]]:
                    yield key, column, path
    for name in form.get("same", "").split() if wanted == "sft" else ():
        yield name, {}, name
    for path, default in form.get("defaults", {}).get(wanted, {}).items():
        yield path, {"value": default["value"] if isinstance(default, dict) else default}, path


@pytest.mark.parametrize("form", FORMATS)
def test_rows_make_settings_of_fsdp2x(form):
    """A row names settings that exist, and values that they take."""
    known = known_keys()
    for key, column, path in targets(FORMATS[form], "train"):
        assert path in known or path.rpartition(".")[0] in known, (key, path)
        for value in [*column.get("map", {}).values(), *([column["value"]] if "value" in column else [])]:
            is_text = isinstance(value, str)
            if path in known and not (is_text and (" " in value or "$" in value)) and "$" not in str(value):
                section, _, name = path.partition(".")
                field = SECTIONS[section].model_fields[name]
                adapter = TypeAdapter(Annotated[field.annotation, field], config=SECTIONS[section].model_config)
                adapter.validate_python(value)


@pytest.mark.parametrize("wanted", ["sft", "grpo"])
def test_rows_make_settings_of_trl(wanted):
    trl = pytest.importorskip("trl")
    from trl.scripts.grpo import GRPOScriptArguments

    own = {"sft": (trl.SFTConfig, trl.ScriptArguments), "grpo": (trl.GRPOConfig, GRPOScriptArguments)}
    classes = (*own[wanted], trl.ModelConfig, trl.DatasetMixtureConfig)
    known = {name for cls in classes for name in cls.__dataclass_fields__}
    found = {path.partition(".")[0]: key for form in FORMATS.values() for key, _, path in targets(form, wanted)}
    assert {key: path for path, key in found.items() if path not in known} == {}


WORDS = {*"to if unless neutral why map value times over plus count note".split()}


@pytest.mark.parametrize("form", FORMATS)
def test_every_row_is_a_reason_or_has_columns(form):
    """A row refers to other rows only, and a mapping has all of its parts."""
    rows = FORMATS[form]["keys"]
    for key, row in rows.items():
        if isinstance(row, str):
            assert " " in row, (key, row)
            continue
        assert row and set(row) <= {"train", "trl", "sft", "grpo"}, key
        for column in itertools.chain(*(one if isinstance(one, list) else [one] for one in row.values())):
            if not isinstance(column, dict):
                continue
            assert set(column) <= WORDS
            assert ("why" in column and " " in column["why"]) if "neutral" in column else "to" in column, key
            named = [column.get(word, []) for word in ("if", "unless", "times", "over")]
            named = [one for names in named for one in (names if isinstance(names, list) else [names])]
            named += [part[1:] for part in str(column.get("value", "")).strip("[]").split("'") if part[:1] == "$"]
            others = {name.partition("=")[0] for name in named if isinstance(name, str)} - {""}
            assert others <= rows.keys(), (key, others)


# ---- the snippets of the documents

PARSED = [
    # snippet, words, words for `config explain`, what it then says
    ("FLAT_KEYS", [], [], "4 rank(s)  FULL_SHARD: mesh (4,) [fsdp], 4 shards"),
    ("FLAT_BATCH", [], ["--world-size=2"], "64 sequences (32 per rank x 1 micro-batches x 2 data-parallel ranks)"),
    ("STRATEGY_TRAIN", [], [], "16 rank(s)  FSDP: mesh (16,) [fsdp]"),
    ("STRATEGY_INFER", [], [], "8 rank(s)  HSDP: mesh (2, 4) [ddp, fsdp]"),
    ("STRATEGY_ULYSSES", [], [], "mesh (2, 4) [ddp, fsdp], 2 copies of 4 shards, reshard after forward; seq"),
    ("STRATEGY_ONE_AXIS", [], ["--world-size=16"], "FSDP: mesh (16,) [fsdp]"),
    ("STRATEGY_TWO_AXES", [], ["--world-size=16"], "HSDP: mesh (2, 8) [ddp, fsdp]"),
    ("STRATEGY_TWO_AXES_ULYSSES", [], ["--world-size=8"], "HSDP: mesh (2, 4) [ddp, fsdp]"),
    ("STRATEGY_TEXT_MODEL", [], ["--world-size=16"], "parallel.auto_wrap = [Qwen3DecoderLayer]"),
    ("STRATEGY_VISION", [], [], "model.freeze = vision_model"),
    ("STRATEGY_EXPERTS", [], ["--world-size=16"], "parallel.expert_units = [Qwen3MoeMLP]"),
    ("STRATEGY_ALL", ["--role", "actor_train"], [], "2 rank(s)  FSDP: mesh (2,) [fsdp]"),
    ("STRATEGY_ALL", ["--role", "reference"], ["--world-size=4"], "evaluation only"),
    ("NESTED_ALL", ["--to", "train", "--role", "policy_trainer"], [], "2 rank(s)  FSDP: mesh (2,) [fsdp]"),
    ("NESTED_ALL", ["--to", "train", "--role", "models.ref_policy"], [], "model.dtype = bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words", "sizes", "line"), PARSED, ids=range(len(PARSED)))
def test_a_snippet_is_parsed_by_fsdp2x_train(translated, capsys, name, words, sizes, line):
    path, said = translated(getattr(snippets, name), *words)
    assert main(["config", "explain", str(path), *sizes]) == 0
    assert line in capsys.readouterr().out
    if not name.startswith("NESTED"):  # that one names a folder and a text
        with pytest.raises(ConfigError, match="lacks settings. To run it needs model.path=FOLDER or .*; data.files="):
            load_config(path)
        assert any(sentence.startswith("to run it needs data.files=FILES") for sentence in said)
        load_config(path, [TINY, "data.files=text"])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_configs_or_translated_to_one(translated, path):
    if path.stem != "demo":
        path, _ = translated(path.read_text())
    assert main(["config", "explain", str(path)]) == 0


def test_a_config_of_keys_alone(capsys):
    assert main(["config", "translate", "--to", "train", "--", *snippets.NESTED_OVERRIDES]) == 0
    said = capsys.readouterr()
    got = yaml.safe_load(said.out)
    assert (got["model"]["grouped_gemm"], got["model"]["load"]) == (True, "rows")
    assert got["data"] == {"packing": True, "max_tokens": 4096} and got["parallel"]["sequence_parallel"] == 2
    assert got["logging"]["wandb_options"] == {"project": "Your-Wandb-Project-Name"}
    assert "dropped models.policy.enforce_eager: it belongs to the engine" in said.err


FLAGS = (
    "train.py --actor-num-nodes 1 --actor-num-gpus-per-node 2 --colocate --hf-checkpoint Qwen3-0.6B "
    "--prompt-data a.jsonl --rm-type deepscaler --num-rollout 1000 --rollout-batch-size 8 --n-samples-per-prompt 8 "
    "--global-batch-size 32 --rollout-max-response-len 4096 --advantage-estimator gspo --eps-clip 0.2 "
    "--eps-clip-high=0.28 --lr 1e-6 --use-kl-loss --kl-loss-coef 0.01 --optimizer sgd --use-tis "
    "--sglang-log-level error"
)
PIPELINE = """
pretrain: Qwen3-0.6B
response_length: 1024
rollout_batch_size: 64
num_return_sequences_in_group: 8
max_steps: 500
dual_clip_loss: true
actor_train:
  data_args: {file_name: [train.jsonl], messages: messages}
  model_args: {disable_gradient_checkpointing: false, dtype: bf16, lora_rank: 8}
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 1, gradient_accumulation_steps: 32}
  strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 16, reshard_after_forward: true}}
actor_infer:
  generating_args: {temperature: 0.99, max_new_tokens: "${response_length}"}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8, block_size: 16}}
"""


def test_flags_become_settings_of_trl(capsys):
    assert main(["config", "translate", "--", *FLAGS.split()]) == 0
    said = capsys.readouterr()
    assert yaml.safe_load(said.out) == {
        "model_name_or_path": "Qwen3-0.6B", "dataset_name": "a.jsonl", "reward_funcs": ["accuracy_reward"],
        "max_steps": 2000, "generation_batch_size": 64, "num_generations": 8, "gradient_accumulation_steps": 16,
        "per_device_train_batch_size": 1, "max_completion_length": 4096, "importance_sampling_level": "sequence",
        "epsilon": 0.2, "epsilon_high": 0.28, "learning_rate": 1e-6, "beta": 0.01, "bf16": True, "loss_type": "grpo",
        "lr_scheduler_type": "constant", "adam_beta2": 0.95, "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
    }  # fmt: skip
    assert said.err.splitlines() == [
        "dropped actor_num_nodes: torchrun, or fsdp2x trl --nproc, starts the ranks",
        "dropped actor_num_gpus_per_node: torchrun, or fsdp2x trl --nproc, starts the ranks",
        "dropped colocate: TRL samples in the trainers' processes, or with vllm_mode set to server",
        "dropped optimizer: TRL's default is AdamW; set optim",
        "dropped sglang_log_level: it is an option of the server itself",
        "note on rm_type: accuracy_reward needs math-verify, and reads the column solution",
    ]


def test_a_pipeline_that_samples_becomes_settings_of_trl(translated):
    path, said = translated(PIPELINE)
    got = yaml.safe_load(path.read_text())
    assert got.pop("datasets") == [{"path": "json", "data_files": ["train.jsonl"]}]
    assert got == {
        "model_name_or_path": "Qwen3-0.6B", "generation_batch_size": 512, "num_generations": 8, "max_steps": 500,
        "delta": 1.4, "gradient_checkpointing": True, "bf16": True, "lora_r": 8, "use_peft": True,
        "learning_rate": 1e-6, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 32,
        "fsdp_config": {"reshard_after_forward": True}, "temperature": 0.99, "max_completion_length": 1024,
        "use_vllm": True, "vllm_gpu_memory_utilization": 0.8, "loss_type": "grpo",
    }  # fmt: skip
    assert "old.yaml:6: note on max_steps: TRL counts optimizer steps in place of rollouts" in said
    assert any(line.startswith("old.yaml:9: dropped actor_train.data_args.messages: ") for line in said)
    # Without its engine, it is a role that trains on text, or on chats.
    alone = PIPELINE.partition("actor_infer")[0].partition("actor_train")
    assert "optimizer" in settings_of(alone[1] + alone[2])
    assert settings_of(alone[1] + alone[2], to="sft")["learning_rate"] == 1e-6


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (PIPELINE, {}),
        (snippets.NESTED_ALL.replace("num_inference_per_prompt: 32", "num_inference_per_prompt: 8"), {}),
        (snippets.NESTED_ALL, {"to": "sft", "role": "policy_trainer"}),
        (snippets.STRATEGY_ALL, {"to": "sft", "role": "actor_train"}),
        (snippets.STRATEGY_TRAIN, {"to": "grpo"}),
    ],
    ids=range(5),
)
def test_trl_reads_the_result(tmp_path, text, options):
    trl = pytest.importorskip("trl")
    from trl.scripts.grpo import GRPOScriptArguments

    found = translate(yaml.safe_load(text), **options)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"output_dir": "out", **found.settings, "use_cpu": True}))
    config = trl.SFTConfig if found.to == "sft" else trl.GRPOConfig
    parser = trl.TrlParser((GRPOScriptArguments, config, trl.ModelConfig, trl.DatasetMixtureConfig))
    _, read, _, _ = parser.parse_args_and_config(["--config", str(tmp_path / "mine.yaml")])
    assert read.learning_rate == float(found.settings["learning_rate"])


# ---- conversions


def test_flat_keys():
    got = settings_of(FLAT)
    assert got["model"]["config"]["model_type"] == "gpt2" and got["model"]["config"]["attn_pdrop"] == 0.05
    assert got["data"] == {"files": "data/train.txt", "held_out": 0.2, "block_size": 64}
    assert got["train"]["global_batch_size"] == 48 and got["train"]["eval_blocks"] == 20 * 16
    assert got["optimizer"] == {"lr": "2e-3", "weight_decay": "1e-1", "betas": [0.9, 0.95]}
    assert got["checkpoint"]["resume_from"] is None and got["logging"]["tensorboard"] is True
    assert settings_of(FLAT, "grad_clip=0")["train"]["clip"] is None
    assert settings_of(FLAT, "fsdp=False")["parallel"]["strategy"] == "NO_SHARD"
    assert settings_of(FLAT, "sharding_strategy=HYBRID_SHARD")["parallel"]["strategy"] == "HYBRID_SHARD"


def test_conditions_between_keys():
    base = "strategy_config: {apply_tiled_mlp: %s, tiled_num_shards: 8, reduce_scatter_during_grad_accumulation: true}"
    assert settings_of(base % "true") == {"model": {"tiled_mlp": 8}, "parallel": {"accumulate": "reduce_scatter"}}
    off = translate(yaml.safe_load(base % "false"))
    assert off.settings["model"]["tiled_mlp"] == 0 and "strategy_config.tiled_num_shards" in off.dropped
    assert settings_of("strategy_config: {apply_tiled_mlp: true}")["model"]["tiled_mlp"] == 4
    nested = settings_of(snippets.NESTED_ALL, to="train", role="policy_trainer")
    assert nested["train"]["steps"] == 3 and nested["parallel"]["fsdp_size"] == 2
    assert nested["parallel"]["param_dtype"] == "bfloat16" and nested["logging"]["wandb_options"]["name"] == "demo"


def test_a_role_that_is_not_translated_is_one_line():
    found = translate(yaml.safe_load(snippets.STRATEGY_ALL), role="reference")
    assert found.dropped == {"actor_train": "this run is the role reference"}
    assert found.settings["train"] == {"seed": 42, "mode": "evaluate"} and found.settings["model"] == {"dtype": "bf16"}


# ---- typos and contradictions: one sentence each

TRAIN, NESTED = snippets.STRATEGY_TRAIN, snippets.NESTED_ALL
AS_TRAIN = ["--to", "train", "--role", "policy_trainer"]
MISTAKES = [
    # text, its replacement, words, the sentence
    (FLAT, ("sharding_strategy:", "shardng_strategy:"), [],
     "unknown key shardng_strategy. Did you mean sharding_strategy?"),
    (FLAT, ("FULL_SHARD", "FULL_SHARDS"), [],
     "sharding_strategy: got 'FULL_SHARDS' (str), expected one of FULL_SHARD, SHARD_GRAD_OP, "
     "NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 or null"),
    (FLAT, ("n_embd:", "n_embed:"), [], "unknown key n_embed. Did you mean n_embd?"),
    (FLAT, ("lr: 2e-3", "lr: fast"), [], "lr: got 'fast' (str), expected float"),
    (FLAT, ("train_percent: 0.8", "train_percent: 80"), [], "train_percent: got -79 (int), expected float at l"),
    (FLAT, ("device: cuda", "device: gpu"), [], "device: got 'gpu' (str), expected one of auto, cpu, cuda"),
    (FLAT, ("seed: 114514", "seed: 1\nseed: 2"), [], "seed is set twice, in lines"),
    (FLAT, ("seed: 114514", "train: {seed: 1}"), [], "the file has fsdp2x's own sections (train)"),
    (FLAT, ("test_batch: 16", "test_batch: many"), [], "eval_steps: got 'many' (str), expected a number"),
    (TRAIN, ("fsdp_size:", "fsdp_sise:"), [],
     "unknown key actor_train.strategy_args.strategy_config.fsdp_sise. Did you mean"),
    (TRAIN, ("strategy_args:", "strategy_argz:"), [],
     "old.yaml:14: unknown key actor_train.strategy_argz. Did you mean actor_train.strategy_args?"),
    (TRAIN, ("param_dtype: bf16", "param_dtype: bf17"), [], "expected one of float32, bfloat16, float16"),
    (TRAIN, ("list(range(0,16))", "list(range(0,__import__('os').cpu_count()))"), [], "device_mapping: got"),
    (TRAIN, ("list(range(0,16))", "range(4,0)"), [], "device_mapping: got 'range(4,0)', expected device ids"),
    (NESTED, ("packing: False", "packng: False"), AS_TRAIN,
     "unknown key models.policy_trainer.packng. Did you mean models.policy_trainer.packing?"),
    (NESTED, ("policy_trainer:\n    use", "policy_trainr:\n    use"), [],
     "unknown key models.policy_trainr. Did you mean"),
    (NESTED, ("${runtime_args.exp_name}", "${oc.env:HOME}"), [],
     "${oc.env:HOME} would have to be computed. Write its value"),
    (NESTED, ("exp_name: demo", "exp_name: ${runtime_args.exp_name}"), [], "its references lead in a circle"),
    (NESTED, ("output_dir: some", "#"), [], "${runtime_args.output_dir} is no key with a value"),
    (NESTED, ("optimizer: {lr: 2e-6, clip_grad: 1}", "optimizer: 3"), [],
     "policy_trainer.optimizer: got 3 (int), expected a map"),
    (NESTED, ("train_global_batch_size: 8", "train_global_batch_size: 7"), [], "num_episode: 24 is no multiple of 7 ("),
    (NESTED, (), ["--to", "train"],
     "the file has the roles models.policy_trainer, models.ref_policy. Say which one with --role"),
    (NESTED, (), ["--role", "reward"], "--role: got reward, but the file has models.policy_trainer, models.ref_policy"),
    ("training_args: {seed: 3}\nseed: 4", (), [], "it means train.seed=4, but training_args.seed means train.seed=3"),
    ("a.b: 1", (), [], "a.b: only the command line takes dotted keys. Write a: {b: ...}"),
    ("zzz: 1", (), [], "no key of a trainer that fsdp2x knows"),
    ("num_machines: 2\nfsdp_config: {fsdp_version: 2}", (), [],
     "accelerate launch --config_file FILE -m fsdp2x.run script.py"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "change", "words", "sentence"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_gets_its_sentence(translated, text, change, words, sentence):
    _, said = translated(text.replace(*change, 1) if change else text, *words, status=2)
    assert len(said) == 1 and sentence in said[0]


@pytest.mark.parametrize("command", [("train",), ("config", "explain"), ("plan", "--world-size", "2")], ids=" ".join)
@pytest.mark.parametrize(("text", "title"), [(FLAT, "flat keys"), (TRAIN, "ROLL"), (NESTED, "ChatLearn")])
def test_a_command_names_the_format_and_how_to_translate_it(tmp_path, capsys, command, text, title):
    (tmp_path / "old.yaml").write_text(text)
    assert main([*command, str(tmp_path / "old.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the file has {title}" in line and f"`fsdp2x config translate {tmp_path}/old.yaml > mine.yaml`" in line


AXOLOTL = """
base_model: Qwen/Qwen3-0.6B
adapter: qlora
load_in_4bit: true
datasets: [{path: rows.jsonl}]
sequence_len: 2048
lora_target_linear: true
micro_batch_size: 2
learning_rate: 2.0e-4
train_on_inputs: false
special_tokens: {pad_token: "<pad>"}
"""
FACTORY = """
model_name_or_path: Qwen/Qwen3-0.6B
stage: sft
finetuning_type: lora
lora_target: all
quantization_bit: 8
dataset: identity
warmup_ratio: 0.1
bf16: true
"""
AS_TRL = {
    "axolotl.cli.train": (
        AXOLOTL,
        {"model_name_or_path": "Qwen/Qwen3-0.6B", "use_peft": True, "load_in_4bit": True, "max_length": 2048,
         "datasets": [{"path": "rows.jsonl"}], "lora_target_modules": ["all-linear"], "learning_rate": 2e-4,
         "per_device_train_batch_size": 2, "assistant_only_loss": True},
        "dropped special_tokens.pad_token: it is not in fsdp2x's table.",
        "base_model is model.path, sequence_len is data.block_size",
    ),
    "llamafactory.launcher": (
        FACTORY,
        {"model_name_or_path": "Qwen/Qwen3-0.6B", "use_peft": True, "lora_target_modules": ["all-linear"],
         "load_in_8bit": True, "dataset_name": "identity", "warmup_steps": 0.1, "bf16": True},
        "note on dataset: set it to the folder or file of the rows",
        "model_name_or_path is model.path, lora_target is lora.target_modules, dataset is data.files",
    ),
}  # fmt: skip


@pytest.mark.parametrize("module", AS_TRL)
def test_files_of_tools_over_trl(translated, capsys, module):
    """A command says in one line how to run the tool, how to translate the file for TRL, and the names of the keys."""
    text, settings, note, names = AS_TRL[module]
    path, said = translated(text)
    assert yaml.safe_load(path.read_text()) == settings
    assert any(note in line for line in said)
    file = path.with_name("old.yaml")
    assert main(["config", "translate", str(file), "--to", "train"]) == 2
    assert capsys.readouterr().err.endswith(" for fsdp2x trl sft alone. Omit --to.\n")
    for command in (["train"], ["plan"], ["config", "explain"]):
        assert main([*command, str(file)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"torchrun --nproc_per_node=N -m fsdp2x.run -m {module} {file}`. Or translate it" in line
        assert "`fsdp2x trl sft --config mine.yaml`. Names in `fsdp2x train`: " + names in line


def test_a_file_of_trl(tmp_path, capsys):
    file = tmp_path / "sft.yaml"
    for text in ("learning_rate: 1.0e-4\noutput_dir: out\n", "model_name_or_path: x\nmax_steps: 3\nbf16: true\n"):
        file.write_text(text)
        for command in (["train"], ["plan"], ["config", "explain"]):
            assert main([*command, str(file)]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert (
                f"{file}: the file has TRL's arguments." in line and f"fsdp2x trl sft --config {file}, or grpo" in line
            )


def test_references_that_multiply_end():
    for value in ("${b}" * 50, ["${b}"] * 50):
        settings: dict = {"a": value}
        for one, other in zip("bcdefgh", "cdefghi", strict=True):
            settings[one] = [f"${{{other}}}"] * 50 if isinstance(value, list) else f"${{{other}}}" * 50
        settings["i"] = "x"
        with pytest.raises(ConfigError, match="its references lead to more|or too long"):
            interpolate(settings)
