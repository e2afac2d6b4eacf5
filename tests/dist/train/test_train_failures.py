"""Failures that end a run or skip a step: a dead rank, different texts, NaN, and a float16 overflow."""

import math
import os
import signal
import time

import pytest
import torch

from fsdp2x.train import ConfigError, Trainer, parse_config
from fsdp2x.train.metrics import read_metrics
from harness import dist_run, distributed
from training import Said, settings, shared_folder, weights, write_text


def make_trainer(config):
    return Trainer(parse_config(config))


def train_and_die(ctx, config, moment):
    """Rank 1 dies in its fifth forward (step 3) or in the backward after it."""
    trainer = make_trainer(config)
    calls = 0

    def kill(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    def count(module, args):
        nonlocal calls
        calls += 1
        if calls == 5 and moment == "forward":
            kill()

    def hook_backward(module, args, output):
        if calls == 5 and moment == "backward":
            output.logits.register_hook(kill)

    if ctx.rank == 1:
        trainer.model.register_forward_pre_hook(count)
        trainer.model.register_forward_hook(hook_backward)
    begun = time.monotonic()
    try:
        trainer.run()
    except RuntimeError as error:
        return str(error), time.monotonic() - begun
    return None


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_a_rank_killed_while_training_is_named(tmp_path, moment):
    config = settings(write_text(tmp_path / "text"), tmp_path / "run")
    outcomes = dist_run(train_and_die, 2, config, moment, expect_exit={1: -signal.SIGKILL})
    said, seconds = outcomes[0].value
    assert "training step 3: lost rank 1 (pid " in said
    assert seconds < 30  # parallel.timeout_s


# ---- a step with a value that is not finite, or without labels, changes nothing

OPTIMIZERS = [{}, {"implementation": "foreach"}, {"name": "sgd", "momentum": 0.9}, {"name": "muon"}]


def poison(trainer, where, value, rank):
    """Multiplies the loss, or the gradient of one block, by `value` in step 3, on one rank."""
    module = trainer.model if where == "loss" else trainer.model.model.layers[1].mlp

    def hook(module, args, output):
        if trainer.step != 2 or trainer.world.rank != rank or not torch.is_grad_enabled():
            return None
        if where != "loss":
            output.register_hook(lambda grad: grad * value)
            return None
        output.loss = output.loss * value
        return output

    module.register_forward_hook(hook)


def state_of(trainer):
    moments = [value for state in trainer.optimizer.state.values() for _, value in sorted(state.items())]
    tensors = [*weights(trainer), *(value.to_local() if hasattr(value, "to_local") else value for value in moments)]
    return [tensor.clone() for tensor in tensors], trainer.schedule.step


def fail():
    raise RuntimeError("another reason")


def same(one, other):
    return one[1] == other[1] and all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("where", "value"), [("loss", math.inf), ("loss", math.nan), ("block", math.nan)])
def test_a_step_that_is_not_finite_changes_nothing(ctx, optimizer, where, value):
    with shared_folder(ctx) as folder:
        clip = None if value == math.inf else 1.0
        for kind in ("end", "skip"):
            config = settings(
                folder / "text",
                folder / kind,
                optimizer=optimizer,
                train={"clip": clip, "on_nonfinite": kind, "steps": 4},
                checkpoint={"save_every": 1, "keep": 1},
            )
            trainer = make_trainer(config)
            poison(trainer, where, value, rank=1)
            trainer.train_step()
            trainer.train_step()
            trainer.save()
            before = state_of(trainer)
            if kind == "end":
                match = r"step 3: the (loss|norm of the gradients) is (nan|inf); not finite .* \(shard of rank 0\) to"
                with pytest.raises(RuntimeError, match=match):
                    trainer.run()
                assert same(state_of(trainer), before)
                assert [path.name for path in (folder / kind / "checkpoints").glob("step-*")] == ["step-000002"]
            else:
                with Said() as said:
                    assert trainer.train_step()[1] is None and trainer.skipped
                assert len(said) == (ctx.rank == 0) and same(state_of(trainer), before)
                with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="another reason"):
                    patch.setattr(trainer.optimizer, "step", fail)
                    trainer.train_step()
                trainer.optimizer.zero_grad()
                assert trainer.train_step()[1] > 0 and not same(state_of(trainer), before)
            trainer.close()


@distributed(world_sizes=(2,))
def test_a_step_without_labels_changes_nothing(ctx):
    with shared_folder(ctx) as folder:
        trainer = make_trainer(settings(folder / "text", folder / "run", data={"packing": True}))
        trainer.train_step()
        before, samples = state_of(trainer), trainer.stream.next_samples
        # The first token of a sample has no label.
        trainer.stream.next_samples = lambda: [{"input_ids": one["input_ids"][:1]} for one in samples()]
        assert trainer.train_step()[1] is None and trainer.skipped and same(state_of(trainer), before)
        trainer.stream.next_samples = lambda: [
            one if ctx.rank else {"input_ids": one["input_ids"][:1]} for one in samples()
        ]
        assert trainer.train_step()[1] > 0 and not trainer.skipped and trainer.step == 3
        trainer.close()


@distributed
def test_text_that_differs_between_ranks_is_an_error_on_all(ctx):
    with shared_folder(ctx) as folder:
        if ctx.rank == 1:
            write_text(folder / "other", num_files=5)
        mine = folder / ("text" if ctx.rank == 0 else "other")
        with pytest.raises(ConfigError, match="rank 1: data.files: .*other text"):
            make_trainer(settings(mine, folder / "run"))
        with pytest.raises(ConfigError, match="rank 1: data.files: .*/nothing: no such file"):
            make_trainer(settings(folder / ("text" if ctx.rank == 0 else "nothing"), folder / "run"))


# ---- float16: an overflow on one rank skips the step on all, and a resumed run has the scale it left


HALF = {"param_dtype": "float16", "reduce_dtype": "float32"}


def config(folder, output, **sections):
    base = {"parallel": HALF, "scaler": {"init_scale": 256.0, "growth_interval": 2}, **sections}
    # `settings` merges sections into the tiny config, which has no scaler.
    scaler = base.pop("scaler")
    return {**settings(folder / "text", folder / output, **base), "scaler": scaler}


def overflow(trainer, step, rank):
    """Makes the gradient of the logits infinite on one rank in one step."""

    def hook(module, args, output):
        if trainer.step + 1 == step and trainer.world.rank == rank and output.logits.requires_grad:
            output.logits.register_hook(lambda grad: grad * math.inf)

    trainer.model.register_forward_hook(hook)


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("parallel", [{}, {"strategy": "NO_SHARD"}, {"transport": "process_group"}])
def test_an_overflow_on_one_rank_skips_on_all(ctx, parallel):
    with shared_folder(ctx) as folder:
        trainer = Trainer(parse_config(config(folder, "run", parallel={**HALF, **parallel})))
        overflow(trainer, step=2, rank=ctx.world - 1)
        seen = []
        for _ in range(4):
            before = weights(trainer)
            loss, norm, lr = trainer.train_step()
            same = all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
            seen.append((trainer.skipped, same, norm is None, trainer.scaler.scale, math.isfinite(loss)))
        assert trainer.schedule.step == 3 and lr > 0
        trainer.close()
    assert seen == [
        (False, False, False, 256.0, True),
        (True, True, True, 128.0, True),
        (False, False, False, 128.0, True),
        (False, False, False, 256.0, True),
    ]


@distributed
def test_a_resumed_run_has_the_scale_it_left(ctx):
    def train(output, **sections):
        trainer = Trainer(parse_config(config(folder, output, **sections)))
        overflow(trainer, step=2, rank=0)
        start = trainer.scaler.state_dict()
        trainer.run()
        trainer.close()
        return trainer, start

    with shared_folder(ctx) as folder:
        whole, _ = train("whole")
        checkpoint = {"resume_from": str(folder / "whole/checkpoints/step-000003")}
        resumed, start = train("resumed", checkpoint=checkpoint)
        # Step 2 halved 256; step 3 was good, so that one more doubles it.
        assert (start["scale"], start["_growth_tracker"]) == (128.0, 1)
        assert resumed.scaler.state_dict() == whole.scaler.state_dict()
        for one, other in zip(weights(whole), weights(resumed), strict=True):
            assert torch.equal(one, other)
        torch.distributed.barrier()
        lines = [line for line in read_metrics(folder / "whole" / "metrics.jsonl") if line["event"] == "train"]
        assert [line["skipped"] for line in lines] == [False, True, False, False, False, False]
        assert [line["scale"] for line in lines] == [256.0, 128.0, 128.0, 256.0, 256.0, 512.0]
