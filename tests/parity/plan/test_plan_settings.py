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
from fsdp2x.train.parse import known_keys
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
    "muon": {"optimizer.name": "muon", "train.accumulation": 1},
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
# They change nothing that a plan counts.
SAME = {
    "model.attn_implementation": ("run", "eager"),
    "model.load": ("folder", "rows"),
    "model.tiled_mlp": ("run", 2),
    "model.expert_patch": ("experts", True),
    "model.grouped_gemm": ("experts", True),
    "lora.alpha": ("lora", 3.0),
    "lora.dropout": ("lora", 0.5),
    "data.pattern": ("run", ["*.txt"]),
    "data.exclude": ("run", ["x"]),
    "data.max_bytes": ("run", 1000),
    "data.block_size": ("run", 8),
    "data.held_out": ("run", 0.3),
    "data.shuffle": ("run", False),
    "optimizer.lr": ("run", 1.0),
    "optimizer.adamw_lr": ("muon", 1.0),
    "optimizer.muon_lr_scale": ("muon", "original"),
    "optimizer.muon_split": ("muon", "heads"),
    "optimizer.muon_ns_method": ("muon", "gram"),
    "optimizer.muon_ns_dtype": ("muon", "float32"),
    "optimizer.betas": ("run", [0.5, 0.5]),
    "optimizer.eps": ("run", 0.1),
    "optimizer.weight_decay": ("run", 0.0),
    "schedule.kind": ("run", "linear"),
    "schedule.warmup_steps": ("run", 2),
    "schedule.warmup_ratio": ("run", 0.5),
    "schedule.warmup_start_ratio": ("run", 0.5),
    "schedule.decay_steps": ("run", 3),
    "schedule.min_lr_ratio": ("run", 0.5),
    "schedule.min_lr": ("run", 1e-4),
    "schedule.wsd_decay_steps": ("run", 1),
    "schedule.wsd_decay": ("run", "cosine"),
    "parallel.world_size": ("run", 2),
    "parallel.timeout_s": ("run", 20.0),
    "scaler.enabled": ("run", True),
    "scaler.init_scale": ("run", 2.0),
    "scaler.growth_factor": ("run", 3.0),
    "scaler.backoff_factor": ("run", 0.25),
    "scaler.growth_interval": ("run", 3),
    "train.steps": ("run", 2),
    "train.epochs": ("run", 1),
    "train.eval_batch_size": ("run", 1),
    "train.global_eval_batch_size": ("run", 2),
    "train.clip": ("run", None),
    "train.seed": ("run", 4),
    "train.eval_every": ("run", 1),
    "train.eval_blocks": ("run", 1),
    "train.activation_checkpointing": ("run", True),
    "train.compile": ("run", True),
    "train.compile_backend": ("run", "eager"),
    "train.deterministic": ("run", True),
    "checkpoint.save_every": ("run", 1),
    "checkpoint.save_last": ("run", False),
    "checkpoint.form": ("run", "full"),
    "checkpoint.keep": ("run", 1),
    "checkpoint.keep_every": ("run", 1),
    "logging.every": ("run", 2),
    "logging.tensorboard": ("run", True),
    "logging.wandb_options": ("run", {"project": "x"}),
    "logging.report": ("run", True),
    "logging.memory_snapshot": ("run", 1),
    "logging.profile_start": ("run", 1),
}
# Key -> why no run is compared with its plan here.
ALONE = {
    "data.files": "where the text is: the other tests of this file have one",
    "data.validation_files": "where the text is",
    "parallel.device": "a test below: there is no GPU here",
    "parallel.offload": "a test below: it acts on GPUs",
    "optimizer.implementation": "refused, where it takes memory of its own: a test below",
    "optimizer.stochastic_rounding": "takes no memory, and moments_dtype, which is walked",
    "checkpoint.async_save": "host memory beside the report: a test below",
    "checkpoint.resume_from": "needs a checkpoint",
    "checkpoint.folder": "a path",
    "logging.output": "a path",
    "logging.tensorboard_dir": "a path",
    "logging.wandb": "needs a package that is not installed",
    "logging.progress": "settings() says it",
    "logging.profile_end": "needs profile_start, which is walked",
}


def test_every_key_is_walked():
    walked = [*CHANGES, *CHANGES_OF_FOUR, *SAME, *ALONE]
    assert sorted(walked) == sorted(known_keys())


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


def test_which_settings_change_the_plan(folder):
    for settings_of, world in ((CHANGES, 2), (CHANGES_OF_FOUR, 4), (SAME, 2)):
        bases = {base for base, _ in settings_of.values()}
        before = {base: planned(folder, prepare(folder, base, {}), world).report for base in bases}
        for key, (base, value) in settings_of.items():
            plan = planned(folder, prepare(folder, base, {key: value}), world).report
            assert (plan == before[base]) == (settings_of is SAME), f"{key}\n{before[base]}\n{plan}"


def check(ctx, base: str, key: str, value) -> None:
    """A run's memory report equals its plan."""
    with shared_folder(ctx) as folder:
        if "FOLDER" in (BASES[base].get("model.path"), value):
            on_first(lambda: write_models(folder))
        config = prepare(folder, base, {key: value})
        trainer = Trainer(parse_config(config))
        try:
            if ctx.rank > 0:  # the plan is that of the first rank
                return
            plan = planned(folder, config, ctx.world)
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
@pytest.mark.parametrize("key", [*CHANGES, *(pytest.param(key, marks=pytest.mark.full) for key in SAME)])
def test_runs_are_as_planned(ctx, key):
    check(ctx, *_of(CHANGES | SAME, key))


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("key", CHANGES_OF_FOUR)
def test_runs_of_four_ranks_are_as_planned(ctx, key):
    check(ctx, *_of(CHANGES_OF_FOUR, key))


def _of(settings_of: dict, key: str) -> tuple[str, str, object]:
    base, value = settings_of[key]
    return base, key, value


def test_devices_and_offloading(folder):
    def of(**changes):
        return planned(folder, prepare(folder, "run", changes)).report

    cpu, cuda = of(), of(**{"parallel.device": "cuda"})
    assert cpu.transport == "shm" and cuda.transport == "device" and cuda.step_bytes is not None
    hosts = [of(**{"parallel.device": "cuda", "parallel.offload": mode}).host_bytes
             for mode in ("none", "optimizer", "gradients", "all")]  # fmt: skip
    assert hosts == sorted(set(hosts)) or hosts[:3] == sorted(set(hosts[:3]))
    half = of(**{"parallel.device": "cuda", "parallel.param_dtype": "auto"})
    assert half == of(**{"parallel.device": "cuda", "parallel.param_dtype": "bfloat16"}) != cuda
    assert of(**{"parallel.param_dtype": "auto"}) == cpu


def test_what_a_plan_does_not_foresee_is_refused_by_name(folder):
    for name in ("foreach", "for_loop"):
        config = prepare(folder, "run", {"optimizer.implementation": name})
        with pytest.raises(ConfigError, match=f"optimizer.implementation: got '{name}'"):
            planned(folder, config)
    for name in ("auto", "fsdp2x", "fused"):
        planned(folder, prepare(folder, "run", {"optimizer.implementation": name}))


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
