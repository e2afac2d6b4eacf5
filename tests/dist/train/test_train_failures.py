"""What goes wrong while training: a rank that dies is named by the others, and a mistake of one rank is told to all."""

import os
import signal
import time

import pytest

from harness import dist_run, distributed
from training import settings, shared_folder, write_text


def make_trainer(config):
    from fsdp2x.train import Trainer, parse_config

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


@distributed
def test_a_loss_that_is_not_a_number_ends_the_run(ctx):
    with shared_folder(ctx) as folder:
        config = settings(folder / "text", folder / "run", optimizer={"lr": 1e30}, train={"clip": None})
        with pytest.raises(RuntimeError, match=r"the loss of step \d is not a number; lower optimizer.lr"):
            trainer = make_trainer(config)
            trainer.run()


@distributed
def test_text_that_differs_between_ranks_is_an_error_on_all(ctx):
    from fsdp2x.train import ConfigError

    with shared_folder(ctx) as folder:
        if ctx.rank == 1:
            write_text(folder / "other", num_files=5)
        mine = folder / ("text" if ctx.rank == 0 else "other")
        with pytest.raises(ConfigError, match="rank 1: data.files: this rank read other text than rank 0"):
            make_trainer(settings(mine, folder / "run"))
        with pytest.raises(ConfigError, match="rank 1: data.files: .*/nothing: no such file"):
            make_trainer(settings(folder / ("text" if ctx.rank == 0 else "nothing"), folder / "run"))
