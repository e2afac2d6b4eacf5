"""Configs of other trainers, run at tiny sizes: the model and the text are the only things that are put in."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import snippets
from checkpoints import on_first
from harness import distributed
from training import MODEL, shared_folder, write_model

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = f"model.config={MODEL}"
SMALL = ("data.block_size=16", "parallel.timeout_s=30", "parallel.device=cpu", "logging.progress=off")


def run(folder: Path, text: str, *overrides: str):
    """Trains a config given as text; returns the trainer, and the lines of its metrics."""
    from fsdp2x.train import Trainer, load_config
    from fsdp2x.train.metrics import read_metrics

    path = folder / f"config-{dist.get_rank()}.yaml"
    path.write_text(text, encoding="utf-8")
    trainer = Trainer(load_config(path, [*SMALL, *overrides]))
    try:
        trainer.run()
        dist.barrier()
        return trainer, read_metrics(trainer.output / "metrics.jsonl")
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
        assert trainer.plan.name == "FULL_SHARD" and trainer.tokenizer.vocab_size == 257
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
        assert ids == trainer.tokenizer.encode(b"line 3 of file").tolist()
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
        assert str(trainer.plan).startswith("FSDP: mesh (2,) [fsdp], 2 shards, freed after forward")
        assert len(losses(lines)) == 3 and trainer.schedule.shape.warmup_steps == 20
        assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
        logits = []
        handle = trainer.model.register_forward_hook(lambda module, args, output: logits.append(output.logits.dtype))
        trainer.feed.step()[0][0]()
        handle.remove()
        assert logits == [torch.bfloat16]


@distributed
def test_every_key_of_a_role(ctx):
    with shared_folder(ctx) as folder:
        text = snippets.STRATEGY_ALL.replace("[model.embed_tokens]", "~")
        trainer, lines = run(
            folder, text, "role=actor_train", TINY, f"data.files={folder / 'text'}", f"logging.output={folder / 'run'}"
        )
        assert len(losses(lines)) == 3 and [line["step"] for line in lines if line["event"] == "save"] == [2, 3]


@distributed
def test_evaluation_of_a_reference(ctx):
    with shared_folder(ctx) as folder:
        trainer, lines = run(
            folder,
            snippets.STRATEGY_INFER,
            *(f"model.path={save_model(folder / 'model')}", f"data.files={folder / 'text'}"),
            f"logging.output={folder / 'run'}",
        )
        (line,) = [line for line in lines if line["event"] == "eval"]
        assert 4 < line["loss"] < 7 and trainer.optimizer is None
        assert all(parameter.dtype == torch.bfloat16 for parameter in trainer.model.parameters())


@distributed
def test_nested(ctx):
    with shared_folder(ctx) as folder:
        trainer, lines = run(
            folder,
            snippets.NESTED_ALL,
            *(f"models.policy_trainer.load={save_model(folder / 'model')}", "models.policy_trainer.meta_init=True"),
            *(f"runtime_args.data_path={folder / 'text'}", f"runtime_args.output_dir={folder / 'run'}"),
        )
        assert len(losses(lines)) == 3 and trainer.batching.accumulation == 2
        assert [line["step"] for line in lines if line["event"] == "eval"] == [3]
        assert (folder / "run" / "checkpoints" / "latest").exists()
