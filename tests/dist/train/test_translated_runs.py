"""Translated configs of other trainers, run at tiny sizes: only the model and the text are put in."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

import snippets
from checkpoints import on_first
from fsdp2x.train import ConfigError
from harness import distributed
from training import MODEL, shared_folder, write_model

EXAMPLES = Path(__file__).parents[3] / "examples"
TINY = f"model.config={MODEL}"
EXPERTS = {**MODEL, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
TINY_EXPERTS = f"model.config={ {**EXPERTS, 'num_key_value_heads': 2} }"
SMALL = ("data.block_size=16", "parallel.timeout_s=30", "parallel.device=cpu", "logging.progress=off")


def run(folder: Path, text: str, *overrides: str, role: str | None = None):
    """Trains a translated text; returns the trainer, and the lines of its metrics. Overrides are ours or theirs."""
    from fsdp2x.train import Trainer, load_config
    from fsdp2x.train.metrics import read_metrics
    from fsdp2x.train.parse import SECTIONS, apply_overrides
    from fsdp2x.train.translate import translate

    ours = [override for override in overrides if override.partition(".")[0] in SECTIONS]
    theirs = [override for override in overrides if override not in ours]
    size = re.search(r"fsdp_size: *(\d+)", text)
    if size is not None and int(size[1]) > dist.get_world_size():
        ours.append(f"parallel.fsdp_size={dist.get_world_size()}")
    found = translate(apply_overrides(yaml.safe_load(text) or {}, theirs), to="train", role=role)
    path = folder / f"config-{dist.get_rank()}.yaml"
    path.write_text(yaml.safe_dump(found.settings))
    trainer = Trainer(load_config(path, [*SMALL, *ours]))
    try:
        trainer.run()
        dist.barrier()
        return trainer, read_metrics(trainer.inputs.folder.output / "metrics.jsonl")
    finally:
        trainer.close()


def losses(lines):
    return [line["loss"] for line in lines if line["event"] == "train"]


def save_model(folder: Path) -> Path:
    """A folder as `from_pretrained` takes it, written by rank 0."""
    from fsdp2x.train.tokenizer import ByteTokenizer

    on_first(lambda: ByteTokenizer().save(write_model(folder, 257, tokenizer=False)))
    return folder


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize("example", ["gpt_flat_small", "gpt_flat_medium"])
def test_flat(ctx, example):
    with shared_folder(ctx) as folder:
        trainer, lines = run(
            folder,
            (EXAMPLES / f"{example}.yaml").read_text(),
            *(f"data_path={folder / 'text'}", "n_layer=2", "n_embd=20", "n_head=5", "block_size=16", "train_batch=12"),
            *("eval_freq=2", "save_freq=2", "warmup_steps=2", "decay_steps=8", "lr=1e-2", "max_epoch=1"),
            *(f"checkpoint_root={folder / 'saved'}", f"tensorboard_path={folder / 'events'}"),
            f"logging.output={folder / 'run'}",
        )
        assert trainer.plan.name == "FULL_SHARD" and trainer.inputs.tokenizer.vocab_size == 257
        assert trainer.scaler is None  # a CPU computes in float32
        assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]
        got = losses(lines)
        assert len(got) == trainer.num_steps and got[-1] < got[0] - 0.3
        rates = [line["lr"] for line in lines if line["event"] == "train"]
        assert rates[:2] == pytest.approx([5e-3, 1e-2]) and rates[7] == pytest.approx(1e-4)
        assert list((folder / "events").glob("events.*")) and (folder / "saved" / "latest").exists()
        assert trainer.model.transformer.wte.weight is trainer.model.lm_head.weight
        # The folder's tokenizer is that of the run.
        import transformers

        from fsdp2x.checkpoint import resolve

        saved = transformers.AutoTokenizer.from_pretrained(str(resolve(folder / "saved") / "hf"))
        ids = saved("line 3 of file", add_special_tokens=False)["input_ids"]
        assert ids == trainer.inputs.tokenizer.encode(b"line 3 of file").tolist()
        assert saved.decode(ids) == "line 3 of file"


@distributed
def test_blocks_by_role(ctx):
    with shared_folder(ctx) as folder:
        trainer, lines = run(
            folder,
            snippets.STRATEGY_TRAIN,
            *(TINY, f"data.files={folder / 'text'}", f"logging.output={folder / 'run'}"),
            *("actor_train.training_args.gradient_accumulation_steps=2", "train.steps=3"),
        )
        assert str(trainer.plan).startswith("FSDP: mesh (2,) [fsdp], 2 shards, reshard after forward")
        assert len(losses(lines)) == 3 and trainer.schedule.shape.warmup_steps == 20
        assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
        logits = []
        handle = trainer.model.register_forward_hook(lambda module, args, output: logits.append(output.logits.dtype))
        trainer.steps.feed.step()[0][0]()
        handle.remove()
        assert logits == [torch.bfloat16]


# Text, what is replaced in it, a role, overrides, and what the run then is.
RUNS = {
    "every key of a role": (
        snippets.STRATEGY_ALL, ("[model.embed_tokens]", "~"), "actor_train", (TINY,),
        lambda run, lines: [line["step"] for line in lines if line["event"] == "save"] == [2, 3],
    ),
    "nested": (
        snippets.NESTED_ALL, (), "policy_trainer",
        ("models.policy_trainer.load=FOLDER/model", "models.policy_trainer.meta_init=True",
         "runtime_args.eval_data_path=FOLDER/text/0.txt"),
        lambda run, lines: run.inputs.batching.accumulation == 2 and run.blocks.num_files == 6
        and [line["step"] for line in lines if line["event"] == "eval"] == [3],
    ),
    "packing by overrides alone": (
        "", (), None,
        (*(one for one in snippets.NESTED_OVERRIDES if "meta_init" not in one and "wandb" not in one), TINY_EXPERTS,
         "train.steps=3"),
        lambda run, lines: run.config.data.packing and run.config.data.max_tokens == 4096,
    ),
    "a reference": (
        snippets.STRATEGY_INFER, (), None, ("model.path=FOLDER/model",),
        lambda run, lines: run.optimizer is None
        and all(parameter.dtype == torch.bfloat16 for parameter in run.model.parameters())
        and 4 < next(line["loss"] for line in lines if line["event"] == "eval") < 7,
    ),
}  # fmt: skip


@distributed
@pytest.mark.parametrize("name", RUNS)
def test_configs_run(ctx, name):
    text, replaced, role, overrides, is_as_said = RUNS[name]
    with shared_folder(ctx) as folder:
        save_model(folder / "model")
        overrides = [override.replace("FOLDER", str(folder)) for override in overrides]
        trainer, lines = run(
            folder,
            text.replace(*replaced) if replaced else text,
            *(*overrides, f"data.files={folder / 'text'}", f"logging.output={folder / 'run'}"),
            role=role,
        )
        assert is_as_said(trainer, lines)
        assert trainer.optimizer is None or len(losses(lines)) == 3


@distributed(world_sizes=(4,))
def test_two_ranks_a_sequence_and_two_copies_by_role(ctx):
    with shared_folder(ctx) as folder:
        text = snippets.STRATEGY_ULYSSES.replace("fsdp_size: 4", "fsdp_size: 2").replace(": 256", ": 2")
        files = (f"data.files={folder / 'text'}", f"logging.output={folder / 'run'}")
        trainer, lines = run(folder, text, TINY, *files, "train.steps=2")
        assert trainer.plan.shape == (2, 2) and trainer.inputs.num_readers == 2 and len(losses(lines)) == 2


@distributed
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (snippets.STRATEGY_VISION.replace("ulysses_size: 2", ""), "model.freeze: .*'vision_model'"),
        (snippets.STRATEGY_EXPERTS, "model.expert_patch: .* has no experts"),
    ],
)
def test_snippets_for_other_models_say_what_they_need(ctx, text, sentence):
    with shared_folder(ctx) as folder, pytest.raises(ConfigError, match=sentence):
        run(folder, text, TINY, f"data.files={folder / 'text'}", f"logging.output={folder / 'run'}")
