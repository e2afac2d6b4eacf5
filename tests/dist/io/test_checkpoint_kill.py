"""SIGKILL at random moments of saving, of one rank and of all: there is always a whole checkpoint, nothing is left."""

import os
import random
import signal
import threading
import time

import pytest
import torch

from checkpoints import Training
from harness import dist_run

# Long enough for a handful of saves; the kill falls anywhere into them.
LONGEST_S = 0.8


def fill(training, value):
    """Every number that a checkpoint holds becomes `value`."""
    with torch.no_grad():
        for tensor in [*training.model.parameters(), *training.model.buffers()]:
            tensor.fill_(value)
        for state in training.optimizer.state.values():
            for tensor in state.values():
                tensor.fill_(value)


def save_until_killed(ctx, root, kill_after_s, victims, is_async):
    """Saves one checkpoint after the other; a victim dies at its moment, the others return what they were told."""
    training = Training("adamw")
    training.steps(1)
    fill(training, 1)
    training.save(root, step=1)
    if ctx.rank in victims:
        threading.Timer(kill_after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    step = 2
    begun = time.monotonic()
    try:
        while time.monotonic() - begun < 25:
            fill(training, step)
            training.save(root, step=step, keep=2, async_save=is_async)
            (root.parent / f"returned-{ctx.rank}").write_text(str(step))
            step += 1
    except RuntimeError as error:
        return str(error), time.monotonic() - begun
    return "never told", time.monotonic() - begun


def check(tmp_path, seed, victims, is_async):
    root = tmp_path / "checkpoints"
    moment = random.Random(seed).uniform(0, LONGEST_S)
    died = dict.fromkeys(victims, -signal.SIGKILL)
    outcomes = dist_run(save_until_killed, 2, root, moment, victims, is_async, expect_exit=died)
    for outcome in outcomes:
        if outcome.rank not in victims:
            said, seconds = outcome.value
            assert "lost rank 1" in said, said
            assert seconds < moment + 10
    returned = [tmp_path / f"returned-{rank}" for rank in range(2)]
    # What save() returned for is on disk; an asynchronous one only when the next has returned.
    known = max([int(path.read_text() or 0) for path in returned if path.exists()], default=1)
    training = Training("adamw", impl=None)
    loaded = training.load(root)
    assert known - is_async <= loaded.step <= known + 1
    values = {float(v) for tensor in training.model.state_dict().values() for v in tensor.unique()}
    values |= {float(v) for s in training.optimizer.state.values() for tensor in s.values() for v in tensor.unique()}
    assert values == {float(loaded.step)}
    training.save(root, step=loaded.step + 10, keep=1)
    assert sorted(path.name for path in root.iterdir()) == ["latest", f"step-{loaded.step + 10:06d}"]


@pytest.mark.parametrize(("victims", "is_async"), [((1,), False), ((0, 1), False), ((1,), True), ((0, 1), True)])
def test_kill(tmp_path, victims, is_async):
    check(tmp_path, f"{victims} {is_async}", victims, is_async)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(30))
def test_kill_at_random_moments(tmp_path, seed):
    check(tmp_path, seed, ((1,), (0, 1))[seed % 2], seed % 4 >= 2)
