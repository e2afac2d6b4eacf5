"""Features of a run: deterministic, compiled, monitored, evaluated, and loaded row by row."""

import gzip
import json
import logging

import pytest
import torch
import torch.distributed as dist

from checkpoints import on_first
from fsdp2x.train import ConfigError, Trainer, parse_config
from fsdp2x.train.metrics import read_metrics, shard_report
from harness import distributed
from training import Said, losses, run, settings, shared_folder, weights, write_model


def make(folder, output, loggers=(), **sections):
    return Trainer(parse_config(settings(folder / "text", folder / output, **sections)), loggers=loggers)


@distributed(world_sizes=(1, 3))
def test_two_deterministic_runs_are_equal_bit_for_bit(ctx):
    with shared_folder(ctx) as folder:
        results = []
        for output in ("first", "second"):
            trainer = make(folder, output, train={"deterministic": True, "activation_checkpointing": True})
            assert torch.are_deterministic_algorithms_enabled()
            trainer.run()
            results.append(weights(trainer))
            trainer.close()
            assert not torch.are_deterministic_algorithms_enabled()
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
        dist.barrier()
        assert losses(folder / "first") == losses(folder / "second")


@pytest.mark.full
@distributed(world_sizes=(2,), timeout=120)
def test_compiled_blocks_give_the_same_losses(ctx):
    torch._dynamo.reset()
    with shared_folder(ctx) as folder:
        run(settings(folder / "text", folder / "plain", train={"steps": 3}))
        compiled = {"steps": 3, "compile": True, "compile_backend": "aot_eager"}
        trainer = make(folder, "compiled", train=compiled)
        assert sum(module._compiled_call_impl is not None for module in trainer.model.modules()) == 2
        trainer.run()
        trainer.close()
        dist.barrier()
        plain, got = losses(folder / "plain"), losses(folder / "compiled")
    torch._dynamo.reset()
    for step in plain:
        assert float.fromhex(got[step]) == pytest.approx(float.fromhex(plain[step]), abs=1e-5)


@pytest.mark.parametrize("over", [{}, {"data": {"packing": True}}, {"parallel": {"sequence_parallel": 2}}])
@distributed(world_sizes=(2,))
def test_the_tiled_loss_is_the_models(ctx, over):
    """In training and evaluation. Its head returns eight numbers in place of logits."""
    with shared_folder(ctx) as folder:
        for tiled in (None, True):
            sizes = set()
            trainer = make(folder, str(tiled), train={"steps": 3, "eval_every": 3, "tiled_loss": tiled}, **over)
            trainer.model.lm_head.register_forward_hook(lambda *args, sizes=sizes: sizes.add(args[-1].numel()))
            trainer.run()
            trainer.close()
            assert (sizes == {8}) == bool(tiled) and min(sizes) >= 8
        dist.barrier()
        plain, got = (list(read_metrics(folder / name / "metrics.jsonl")) for name in ("None", "True"))
        for one, other in zip(plain, got, strict=True):
            assert one.get("loss") == pytest.approx(other.get("loss"), abs=1e-5)


@distributed(world_sizes=(3,))
def test_the_report_names_every_parameter(ctx):
    with shared_folder(ctx) as folder:
        trainer = make(folder, "run")
        lines = shard_report(trainer.model).splitlines()
        names = [name for name, _ in trainer.model.named_parameters()]
        trainer.close()
    assert lines[0].split()[:4] == ["parameter", "dtype", "placement", "global"]
    assert [line.split()[0] for line in lines[1:]] == names
    (embedding,) = [line for line in lines if line.startswith("model.embed_tokens.weight")]
    assert "Shard(dim=0)" in embedding or "S(0)" in embedding
    assert embedding.endswith("(257, 16)  0-1: (86, 16)  2: (85, 16)")


@distributed
def test_profile_snapshot_report_and_loggers(ctx):
    calls = []
    logging.getLogger("fsdp2x").setLevel(logging.INFO)

    def log(values, *, step):
        calls.append((step, values))

    with shared_folder(ctx) as folder, Said() as said:
        trainer = make(
            folder,
            "run",
            loggers=[log],
            train={"steps": 4, "eval_every": 2},
            logging={
                "profile_start": 2, "profile_end": 3, "memory_snapshot": 3, "report": True,
                "tensorboard": True, "tensorboard_dir": str(folder / "events"),
            },
        )  # fmt: skip
        trainer.run()
        trainer.close()
        dist.barrier()
        with gzip.open(folder / "run/profile/steps-2-3" / f"trace-rank{ctx.rank}.json.gz") as file:
            trace = json.load(file)
        names = {event.get("name", "") for event in trace["traceEvents"]}
        assert any("backward" in name.lower() for name in names)
        snapshot = json.loads((folder / "run" / "memory" / f"rank-{ctx.rank}-step-3.json").read_text())
        assert snapshot["memory_bytes"] > 0 and snapshot["planned"]["peak_bytes"] > 0
        assert bool(list((folder / "events").glob("events.*")))
        assert not (folder / "run" / "tensorboard").exists()
    reported = any("model.embed_tokens.weight" in message for message in said)
    if ctx.rank == 0:
        assert reported
        assert [step for step, values in calls if "train/loss" in values] == [1, 2, 3, 4]
        assert [step for step, values in calls if "eval/loss" in values] == [2, 4]
    else:
        assert not calls and not reported


@distributed
def test_a_window_that_outlasts_the_run_is_written(ctx):
    with shared_folder(ctx) as folder:
        run(
            settings(
                folder / "text", folder / "run", train={"steps": 2}, logging={"profile_start": 2, "profile_end": 9}
            )
        )
        assert (folder / "run/profile/steps-2-9" / f"trace-rank{ctx.rank}.json.gz").exists()


@distributed
def test_wandb(ctx):
    """A package of that name that remembers: one run, on rank 0; without the package every rank hears the same."""
    import sys
    import types

    seen = []

    class Run:
        def log(self, values, step):
            seen.append((step, values))

        def finish(self):
            seen.append("finished")

    def init(**options):
        seen.append(options)
        return Run()

    with shared_folder(ctx) as folder:
        logged = {"wandb": True, "wandb_options": {"project": "p", "name": "n"}}
        sys.modules["wandb"] = types.SimpleNamespace(init=init)
        try:
            run(settings(folder / "text", folder / "run", train={"steps": 2}, logging=logged))
            sys.modules["wandb"] = None
            with pytest.raises(ConfigError, match="logging.wandb: .*not installed"):
                make(folder, "other", logging=logged)
        finally:
            del sys.modules["wandb"]
        if ctx.rank == 0:
            assert seen[0]["project"] == "p" and seen[0]["config"]["train"]["steps"] == 2
            assert [entry[0] for entry in seen[1:-1]] == [1, 2] and seen[-1] == "finished"
        else:
            assert not seen


@distributed
def test_evaluation_alone_has_no_optimizer_and_takes_all_text(ctx):
    with shared_folder(ctx) as folder:
        trained = run(settings(folder / "text", folder / "run", train={"steps": 3, "eval_every": 3}))
        dist.barrier()
        trainer = make(
            folder,
            "evaluated",
            train={"mode": "evaluate"},
            data={"held_out": 0.2},
            checkpoint={"resume_from": str(folder / "run")},
        )
        trainer.run()
        loss = trainer.evaluate()
        assert trainer.optimizer is None and not any(p.requires_grad for p in trainer.model.parameters())
        assert loss == trained.evaluate()
        trainer.close()
        whole = make(folder, "whole", train={"mode": "evaluate"}, data={"held_out": 0.0})
        assert len(whole.blocks.held_out) == 0 and 3 < whole.evaluate() < 7
        whole.close()
        assert not (folder / "evaluated" / "checkpoints").exists()


@distributed
def test_weights_read_row_by_row_train_as_those_read_whole(ctx):
    with shared_folder(ctx) as folder:
        on_first(lambda: write_model(folder / "model", 257, tokenizer=False))
        for load in ("whole", "rows"):
            model = {"config": None, "path": str(folder / "model"), "load": load}
            data = {"tokenizer": "bytes"}  # the folder has none
            run(settings(folder / "text", folder / load, model=model, data=data, train={"steps": 3}))
        dist.barrier()
        assert losses(folder / "whole") == losses(folder / "rows")


@distributed
def test_validation_files_and_what_a_line_says(ctx):
    """Packed lines: a step counts samples, the last line has the whole progress."""
    with shared_folder(ctx) as folder, Said() as said:
        logging.getLogger("fsdp2x").setLevel(logging.INFO)
        on_first(lambda: (folder / "other").write_text("yy\n" * 3))
        trained = {"steps": None, "epochs": 2, "batch_size": 8, "accumulation": 1, "eval_every": 5}
        data = {"validation_files": [str(folder / "other")], "packing": True}
        trainer = run(settings(folder / "text", folder / "run", data=data, train=trained))
        num_samples = len(trainer.blocks.train)
        assert len(trainer.blocks.held_out) == 3 and trainer.num_steps == 2 * num_samples // (8 * ctx.world)
        lines = [line for line in read_metrics(folder / "run/metrics.jsonl") if line["event"] == "train"]
        assert lines[-1]["samples"] == 8 * ctx.world * trainer.num_steps and lines[-1]["seconds_left"] == 0
        assert lines[-1]["epochs"] == round(lines[-1]["samples"] / num_samples, 4)
        assert lines[0]["seconds_left"] is None and lines[1]["seconds_left"] > 0
        assert all(line["planned_bytes"] > 0 and "used_bytes" in line for line in lines)
        if ctx.rank == 0:
            (last,) = [sentence for sentence in said if sentence.startswith(f"step {trainer.num_steps}  loss")]
            assert all(
                word in last for word in ("  lr ", "  epoch ", "  left 00:00", "  mem ", " planned + activations)")
            )


@distributed
def test_validation_files_of_text_in_blocks(ctx):
    with shared_folder(ctx) as folder:
        on_first(lambda: [(folder / name).write_text(text) for name, text in (("a", "x" * 100), ("b", "y" * 50))])
        config = settings(folder / "a", folder / "run", data={"validation_files": [str(folder / "b")]})
        blocks = run(config).blocks
        assert len(blocks.train) == 101 // 16 and set(blocks.held_out.flatten().tolist()) == {ord("y")}


@distributed
def test_a_step_larger_than_the_data_is_reported(ctx):
    with shared_folder(ctx) as folder, Said() as said:
        train = {"batch_size": 200, "accumulation": 1, "steps": 1}
        trainer = run(settings(folder / "text", folder / "run", train=train))
        if ctx.rank == 0:
            assert any(f"there are only {len(trainer.blocks.train)} for training" in sentence for sentence in said)
