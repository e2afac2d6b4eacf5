"""Fine-tuning on rows: wrong ones end every rank, rules of truncation, resuming, early stopping, what is logged."""

import logging

import pytest
import torch.distributed as dist

from chats import CHATML, chat_tokenizer, some_rows, turn, write_rows
from checkpoints import on_first, shared_folder
from fsdp2x.io.checkpoint.directory import find
from fsdp2x.train import ConfigError, Trainer, parse_config
from fsdp2x.train.metrics import read_metrics
from harness import dist_run, distributed
from training import MODEL, Said, losses, run, settings


def sft(folder, output="run", data=None, **sections):
    model = {"config": {**MODEL, "max_position_embeddings": 256}}
    rows = {"format": "jsonl", "tokenizer": str(folder / "tokenizer"), "block_size": 200, **(data or {})}
    return settings(folder / "rows.jsonl", folder / output, model=model, data=rows, **sections)


def write(folder, rows=None, template=CHATML):
    write_rows(folder / "rows.jsonl", some_rows(20) if rows is None else rows)
    chat_tokenizer(template).save_pretrained(str(folder / "tokenizer"))


WRONG = {
    "role": {"messages": [turn("user", "a"), turn("bot", "b")]},
    "empty answer": {"messages": [turn("user", "a"), turn("assistant", " ")]},
    "columns": {"question": "a"},
}


@distributed(world_sizes=(1, 3))
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_ends_every_rank_with_its_line(ctx, streaming, name):
    """When rows are streamed, one rank alone reads the wrong one."""
    with shared_folder() as folder:
        on_first(lambda: write(folder, [*some_rows(7), WRONG[name]]))
        config = sft(folder, data={"streaming": streaming, "held_out": 0.0}, train={"batch_size": 1, "steps": 8})
        with pytest.raises(ConfigError, match=r"rows\.jsonl:8: ") as error:
            trainer = Trainer(parse_config(config))
            try:
                trainer.run()
            finally:
                trainer.close()
        if not streaming:
            said = [None] * ctx.world
            dist.all_gather_object(said, str(error.value))
            assert len(set(said)) == 1
        dist.barrier()


@distributed
@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_are_too_long(ctx, streaming):
    long = {"messages": [turn("user", "q"), turn("assistant", "a" * 300)]}
    hidden = {"messages": [turn("user", "q" * 300), turn("assistant", "a")]}
    with shared_folder() as folder, Said() as said:
        logging.getLogger("fsdp2x").setLevel(logging.INFO)
        on_first(lambda: write(folder, [*some_rows(6), long, hidden]))
        data = {"streaming": streaming, "held_out": 0.0}
        one_pass = {"steps": None, "epochs": 1, "batch_size": 2, "accumulation": 1}
        with pytest.raises(ConfigError, match=r"rows have more than 200 tokens.*rows\.jsonl:[78], has 3\d\d\. Raise"):
            run(sft(folder, "error", data, train=one_pass))
        for rule, left_out, told in (
            ("cut", 1, ["cut", "nothing to train"]),
            ("drop", 2, ["too long"]),
        ):
            said.clear()
            trainer = run(sft(folder, rule, {**data, "truncation": rule}, train=one_pass))
            assert len(trainer.blocks.train) == (8 if streaming else 8 - left_out)
            if ctx.rank == 0:
                assert all(any(what in sentence for sentence in said) for what in told), said
        dist.barrier()


@distributed
def test_a_step_larger_than_the_data_is_reported(ctx):
    with shared_folder() as folder, Said() as said:
        on_first(lambda: write(folder, some_rows(3)))
        run(sft(folder, data={"held_out": 0.0}, train={"batch_size": 4, "accumulation": 1, "steps": 1}))
        if ctx.rank == 0:
            assert any("there are only 3 for training" in sentence for sentence in said), said
        dist.barrier()


def train(ctx, config):
    run(config)


@pytest.mark.parametrize("data", [{}, {"packing": True}, {"streaming": True}], ids=["padded", "packed", "streamed"])
def test_another_world_size_goes_on_with_the_same_rows(tmp_path, data):
    write(tmp_path)
    sizes = {n: {"batch_size": 6 // n, "accumulation": 1, "eval_every": 3} for n in (1, 2, 3)}
    dist_run(train, 2, sft(tmp_path, "whole", data, train=sizes[2]), fresh=False)
    resume = {"resume_from": str(tmp_path / "whole/checkpoints/step-000003")}
    dist_run(train, 3, sft(tmp_path, "resumed", data, train=sizes[3], checkpoint=resume), fresh=False)
    whole, resumed = losses(tmp_path / "whole"), losses(tmp_path / "resumed")
    assert list(resumed) == [4, 5, 6]
    for step in resumed:
        assert float.fromhex(resumed[step]) == pytest.approx(float.fromhex(whole[step]), abs=2e-6)
    evaluations = [
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if line["event"] == "eval"]
        for name in ("whole", "resumed")
    ]
    assert evaluations[1] == pytest.approx(evaluations[0][1:], abs=2e-6)


@distributed
def test_it_ends_when_the_held_out_loss_no_longer_falls(ctx):
    """The run keeps the best checkpoint, under a name, besides `keep` others. A resumed run continues the count."""
    with shared_folder() as folder, Said() as said:
        logging.getLogger("fsdp2x").setLevel(logging.INFO)
        on_first(lambda: write(folder))
        early = {"eval_every": 1, "patience": 2, "min_delta": 100.0, "steps": 9}
        config = sft(folder, train=early, checkpoint={"keep": 1, "save_every": 0})
        trainer = run(config)
        best = folder / "run/checkpoints/best"
        assert trainer.step == 3 and trainer.early_stop.best_step == 1
        assert best.resolve().name == "step-000001" and find(best)[0].resolve() == best.resolve()
        dist.barrier()
        names = {path.name for path in (folder / "run/checkpoints").iterdir() if path.name.startswith("step")}
        assert names == {"step-000001", "step-000003"}
        if ctx.rank == 0:
            assert any(sentence.startswith("ended after step 3: no lower held-out loss") for sentence in said)
            assert any(f"best: step 1, held-out loss {trainer.early_stop.best_loss:.4f}, {best}" in s for s in said)
        # It is over, unless more patience is asked for.
        resumes = {**config, "checkpoint": {**config["checkpoint"], "resume_from": str(folder / "run")}}
        assert run(resumes).step == 3
        more = {**resumes, "train": {**resumes["train"], "patience": 4}}
        assert run(more).step == 5


@distributed
def test_a_better_checkpoint_replaces_the_best_one(ctx):
    with shared_folder() as folder:
        on_first(lambda: write(folder))
        early = {"eval_every": 1, "patience": 3, "steps": 4}
        trainer = run(sft(folder, train=early, checkpoint={"keep": 1, "save_every": 0, "keep_every": 2}))
        dist.barrier()
        events = read_metrics(folder / "run/metrics.jsonl")
        held_out = [line["loss"] for line in events if line["event"] == "eval"]
        assert held_out == sorted(held_out, reverse=True) and trainer.early_stop.best_step == 4
        assert (folder / "run/checkpoints/best").resolve().name == "step-000004"
        names = sorted(path.name for path in (folder / "run/checkpoints").glob("step-*"))
        # Step 2 by keep_every, step 3 as the one that `keep` keeps.
        assert names == ["step-000002", "step-000003", "step-000004"]


@distributed
def test_a_validation_file_and_what_is_logged(ctx):
    with shared_folder() as folder, Said() as said:
        logging.getLogger("fsdp2x").setLevel(logging.INFO)
        on_first(lambda: (write(folder), write_rows(folder / "other.jsonl", some_rows(3))))
        calls = []
        trained = {"steps": None, "epochs": 2, "batch_size": 2, "accumulation": 1, "eval_every": 5}
        config = sft(
            folder,
            data={"validation_files": [str(folder / "other.jsonl")]},
            train=trained,
            logging={"tensorboard": True},
        )
        trainer = Trainer(parse_config(config), loggers=[lambda values, step: calls.append((step, values))])
        trainer.run()
        trainer.close()
        dist.barrier()
        assert len(trainer.blocks.held_out) == 3 and len(trainer.blocks.train) == 20
        assert trainer.num_steps == 2 * 20 // (2 * ctx.world)
        lines = [line for line in read_metrics(folder / "run/metrics.jsonl") if line["event"] == "train"]
        assert lines[-1]["epochs"] == 2.0 and lines[-1]["samples"] == 40 and lines[-1]["seconds_left"] == 0
        assert lines[0]["seconds_left"] is None and lines[1]["seconds_left"] > 0
        assert all(line["planned_bytes"] > 0 and "used_bytes" in line for line in lines)
        assert list((folder / "run/tensorboard").glob("events.*"))
        if ctx.rank == 0:
            (last,) = [sentence for sentence in said if sentence.startswith(f"step {trainer.num_steps}  loss")]
            assert all(word in last for word in ("  lr ", "  epoch 2.00", "  left 0s", "  mem ", "(plan "))
            assert any("train/lr" in values for _, values in calls) and any("eval/loss" in v for _, v in calls)


@distributed
def test_text_may_have_a_validation_file_too(ctx):
    with shared_folder() as folder:
        on_first(lambda: [(folder / name).write_text(text) for name, text in (("a", "x" * 100), ("b", "y" * 50))])
        config = settings(folder / "a", folder / "run", data={"validation_files": [str(folder / "b")]})
        blocks = run(config).blocks
        assert len(blocks.train) == 101 // 16 and set(blocks.held_out.flatten().tolist()) == {ord("y")}


@distributed
def test_a_template_of_a_file_makes_a_chat_of_any_tokenizer(ctx):
    """The bytes tokenizer also takes it, and the checkpoint's tokenizer contains it."""
    with shared_folder() as folder:
        rows = [{"talk": row["messages"]} for row in some_rows(8)]
        on_first(lambda: (write(folder, rows), (folder / "chat.jinja").write_text(CHATML)))
        data = {"tokenizer": "bytes", "block_size": 256, "columns": {"messages": "talk"}}
        with pytest.raises(ConfigError, match=r"no chat template. Set data.chat_template"):
            run(sft(folder, "none", data))
        with pytest.raises(ConfigError, match=r"data.chat_template: .*nothing"):
            run(sft(folder, "none", {**data, "chat_template": str(folder / "nothing")}))
        run(sft(folder, "run", {**data, "chat_template": str(folder / "chat.jinja")}, train={"steps": 1}))
        dist.barrier()
        from transformers import AutoTokenizer

        saved = AutoTokenizer.from_pretrained(str(find(folder / "run")[0] / "hf"))
        assert saved.chat_template == CHATML and len(saved) == 257
