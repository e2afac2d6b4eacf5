"""Every setting of a training YAML that changes a rank's bytes changes its plan, to what the run's own report says."""

import copy

import pytest
import torch
import transformers
import yaml

import fsdp2x
from checkpoints import on_first
from fsdp2x.memory import plan_memory
from fsdp2x.train import ConfigError, Trainer, parse_config
from fsdp2x.train.commands.plan_request import make_plan
from fsdp2x.train.config import known_keys
from harness import distributed
from training import MODEL, settings, shared_folder, write_model, write_text

MOE = {**MODEL, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 12, "num_experts_per_tok": 2,
       "tie_word_embeddings": False}  # fmt: skip

# Runs in which a setting is changed. Each of them changes the tiny run of `settings`.
BASES = {
    "run": {},
    "experts": {"model.config": MOE},
    "folder": {"model.config": None, "model.path": "FOLDER"},
    "lora": {"lora.rank": 2},
    "sgd": {"optimizer.name": "sgd", "train.accumulation": 1},
    "one backward": {"train.accumulation": 1},
    "whole batch": {"train.accumulation": None, "train.batch_size": 2, "train.global_batch_size": 4},
    "whole batch of four": {"train.accumulation": None, "train.batch_size": 2, "train.global_batch_size": 8},
    "packed": {"data.packing": True, "data.max_tokens": 32, "train.accumulation": 1},
    "spread experts": {"model.config": MOE, "parallel.expert_parallel": 2},
    "hybrid": {"parallel.strategy": "HYBRID_SHARD", "parallel.fsdp_size": 2},
}
# Key -> (base, value): the plan changes, and is the report of the run.
CHANGES = {
    "model.config": ("run", {**MODEL, "num_hidden_layers": 3}),
    "model.path": ("folder", "OTHER"),
    "model.dtype": ("run", "bfloat16"),
    "model.freeze": ("run", ["model.layers.0"]),
    "lora.rank": ("lora", 3),
    "lora.target_modules": ("lora", ["q_proj"]),
    "data.tokenizer": ("run", "FOLDER"),
    "data.max_tokens": ("packed", 16),
    "data.packing": ("one backward", True),
    "optimizer.name": ("run", "sgd"),
    "optimizer.momentum": ("sgd", 0.9),
    "optimizer.moments_dtype": ("run", "int8"),
    "parallel.strategy": ("run", "SHARD_GRAD_OP"),
    "parallel.expert_parallel": ("experts", 2),
    "parallel.reshard_after_forward": ("run", False),
    "parallel.param_dtype": ("run", "bfloat16"),
    "parallel.reduce_dtype": ("run", "bfloat16"),
    "parallel.auto_wrap": ("run", ["Qwen3MLP"]),
    "parallel.expert_units": ("experts", ["Qwen3MoeExperts"]),
    "parallel.accumulate": ("run", "reduce_scatter"),
    "parallel.transport": ("run", "process_group"),
    "parallel.wire_weights": ("run", "int8"),
    "parallel.wire_gradients": ("run", "int8"),
    "train.mode": ("run", "evaluate"),
    "train.accumulation": ("run", 1),
    "train.batch_size": ("whole batch", 1),
    "train.global_batch_size": ("whole batch", 8),
}
# The same on four ranks.
CHANGES_OF_FOUR = {
    "parallel.fsdp_size": ("run", 2),
    "parallel.expert_fsdp_size": ("spread experts", 1),
    "parallel.sequence_parallel": ("whole batch of four", 2),
}
# The other keys. They change nothing that a plan counts, or a test below has them.
OTHERS = """
checkpoint.accept_changes checkpoint.async_save checkpoint.folder checkpoint.form checkpoint.keep
checkpoint.keep_every checkpoint.resume_from checkpoint.save_every checkpoint.save_last checkpoint.save_minutes
data.block_size data.exclude data.files data.held_out data.max_bytes data.pattern data.shuffle data.validation_files
logging.every logging.memory_snapshot logging.output logging.profile_end logging.profile_start logging.progress
logging.report logging.tensorboard logging.tensorboard_dir logging.wandb logging.wandb_options lora.alpha lora.dropout
model.attn_implementation model.expert_patch model.grouped_gemm model.load model.tiled_mlp optimizer.adamw_lr
optimizer.betas optimizer.eps optimizer.implementation optimizer.lr optimizer.muon_ns_dtype optimizer.muon_ns_method
optimizer.muon_split optimizer.stochastic_rounding optimizer.weight_decay parallel.device parallel.offload
parallel.timeout_s parallel.world_size scaler.enabled scaler.growth_interval scaler.init_scale schedule.decay_steps
schedule.kind schedule.min_lr schedule.min_lr_ratio schedule.warmup_ratio schedule.warmup_steps
schedule.wsd_decay_steps train.activation_checkpointing train.clip train.compile train.compile_backend
train.deterministic train.epochs train.eval_batch_size train.eval_blocks train.eval_every train.global_eval_batch_size
train.on_nonfinite train.seed train.steps train.tiled_loss
""".split()


def test_every_key_is_walked():
    assert sorted([*CHANGES, *CHANGES_OF_FOUR, *OTHERS]) == sorted(known_keys())


def apply(config: dict, changes: dict) -> dict:
    config = copy.deepcopy(config)
    for key, value in changes.items():
        section, name = key.split(".")
        config.setdefault(section, {})[name] = value
    return config


def prepare(folder, base: str, changes: dict) -> dict:
    config = apply(settings(folder / "text", folder / "run"), {**BASES[base], **changes})
    for section, name in (("model", "path"), ("data", "tokenizer")):
        if (path := config[section].get(name)) is not None:
            config[section][name] = str(folder / path)
    return config


def write_models(folder) -> None:
    write_model(folder / "FOLDER")
    write_model(folder / "OTHER", vocab_size=70)


def planned(folder, config: dict, world: int = 2, **options):
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(config))
    return make_plan(str(path), world, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    write_text(folder / "text")
    write_models(folder)
    return folder


def check(ctx, key: str, base: str, value) -> None:
    """A run's memory report equals its plan, which is not the plan of a run without the change."""
    with shared_folder(ctx) as folder:
        if "FOLDER" in (BASES[base].get("model.path"), value):
            on_first(lambda: write_models(folder))
        config = prepare(folder, base, {key: value})
        trainer = Trainer(parse_config(config))
        try:
            if ctx.rank > 0:  # the plan is that of the first rank
                return
            before, plan = (planned(folder, one, ctx.world) for one in (prepare(folder, base, {}), config))
            assert plan.report != before.report, key
            batches = plan.request.micro_batches
            before_last = config["parallel"].get("accumulate", "nothing")
            run = fsdp2x.memory_report(trainer.model, trainer.optimizer, micro_batches=batches, before_last=before_last)
            counted = config["data"].get("packing") or trainer.optimizer is None
            assert counted or batches == trainer.inputs.batching.accumulation
            expected = {**run.to_dict(), "optimizer_bytes": run.optimizer_bytes or 0}
            assert plan.report.to_dict() == expected, f"{key}\n{plan.report}\n{run}"
        finally:
            trainer.close()


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("key", CHANGES)
def test_runs_are_as_planned(ctx, key):
    check(ctx, key, *CHANGES[key])


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("key", CHANGES_OF_FOUR)
def test_runs_of_four_ranks_are_as_planned(ctx, key):
    check(ctx, key, *CHANGES_OF_FOUR[key])


def test_devices_and_offloading(folder):
    def of(**changes):
        return planned(folder, prepare(folder, "run", changes)).report

    cpu, cuda = of(), of(**{"parallel.device": "cuda"})
    assert cpu.transport == "shm" and cuda.transport == "device" and cuda.step_bytes is not None
    hosts = [of(**{"parallel.device": "cuda", "parallel.offload": mode}).host_bytes
             for mode in ("none", "optimizer", "gradients", "all")]  # fmt: skip
    assert hosts == sorted(set(hosts)) or hosts[:3] == sorted(set(hosts[:3]))
    half = of(**{"parallel.device": "cuda", "parallel.param_dtype": "auto"})
    assert half == of(**{"parallel.device": "cuda", "parallel.param_dtype": "bfloat16"}) == cuda
    assert cuda != of(**{"parallel.device": "cuda", "parallel.param_dtype": "float32"})
    assert of(**{"parallel.param_dtype": "auto"}) == cpu


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_config_json_with_settings_is_planned_as_a_run(tmp_path, device):
    """It needs no YAML and no weights. Runs are compared with the plans of YAMLs above."""
    write_models(tmp_path)
    config = prepare(tmp_path, "folder", {"lora.rank": 3})
    for path in tmp_path.glob("FOLDER/*"):
        if path.name != "config.json":
            path.unlink()
    from_yaml = planned(tmp_path, {**config, "train": {"batch_size": 2}}, device=device)
    settings = ("lora.rank=3", f"data.block_size={config['data']['block_size']}", "train.batch_size=2")
    for path in ("FOLDER", "FOLDER/config.json"):
        assert make_plan(str(tmp_path / path), 2, settings, device=device) == from_yaml
    assert from_yaml.has_frozen and from_yaml.report.optimizer_bytes < from_yaml.report.shard_bytes
    with pytest.raises(ConfigError, match=r"^lora.rank=3: key=value settings need a config.json or a training YAML"):
        make_plan(str(tmp_path / "FOLDER.json"), 2, settings)


@distributed(world_sizes=(2,))
def test_copies_for_saves_in_the_background(ctx):
    with shared_folder(ctx) as folder:
        config = prepare(folder, "run", {"checkpoint.async_save": True})
        trainer = Trainer(parse_config(config))
        try:
            trainer.train_step()
            saved = fsdp2x.checkpoint.save(trainer.inputs.folder.checkpoints, trainer.model, trainer.optimizer, step=1)
        finally:
            trainer.close()
        if ctx.rank == 0:
            plan = planned(folder, config)
            assert saved.num_bytes <= plan.staging_bytes < 1.5 * saved.num_bytes
            assert "saves in the background" in plan.text()
            assert plan.peak_bytes == plan.report.peak_bytes + plan.staging_bytes


def test_shards_of_a_node_follow_its_ranks(folder):
    """HYBRID_SHARD without a size shards inside a node, so a plan needs the node's number of ranks."""
    config = prepare(folder, "run", {"parallel.strategy": "HYBRID_SHARD", "train.accumulation": 1})

    def shape(**options):
        report = planned(folder, config, 16, **options).report
        return report.replicas, report.world

    assert shape() == (2, 8)
    assert shape(local_world_size=4) == (4, 4)
    assert shape(local_world_size=16) == (1, 16)


def test_experts_over_more_ranks_than_there_are(tmp_path):
    """Rows that pad at least twofold: units are cut along another dim."""
    experts = {"num_experts": 8, "hidden_size": 256, "moe_intermediate_size": 256}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**{**MOE, **experts, "vocab_size": 64})
        )
    numel = sum(param.numel() for param in model.parameters())
    split, whole = plan_memory(model, 32), plan_memory(model, 32, auto_wrap=False)
    assert split.shard_bytes < 1.1 * 4 * numel / 32 + 32768
    assert whole.shard_bytes > 3 * split.shard_bytes
    spread = plan_memory(model, 32, expert_parallel=8)
    assert spread.shard_bytes < 1.1 * split.shard_bytes


@pytest.mark.parametrize(("recomputes", "kept", "sent"), [(False, 4096, 16384), (True, 2048, 24576)])
def test_what_ranks_that_share_sequences_send_and_keep(folder, recomputes, kept, sent):
    """A layer: 32 positions, 1 of 2 heads and the kv head, 8 wide, on a rank, fp32. Two layers, two micro-batches."""
    changes = {"parallel.sequence_parallel": {"ulysses": 2, "context": 2}, "train.activation_checkpointing": recomputes}
    plan = planned(folder, prepare(folder, "run", changes), world=4)
    layer = 32 // 4 * (1 + 1) * 16 + 32 // 2 * 16
    assert sent == layer * 4 * 2 * 2 * (2 + recomputes)
    found = plan.to_dict()["sequences"]
    assert found == {"ulysses": 2, "context": 2, "positions": 32, "kept_bytes": kept, "sent_bytes": sent}
    assert "sequences over 4 ranks (Ulysses 2 x context 2): 8 of 32 positions a rank" in plan.text()
    assert planned(folder, prepare(folder, "run", {})).to_dict()["sequences"] is None
