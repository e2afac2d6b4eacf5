"""The example of reinforcement learning: every number that it checks is there, in turns, one step ahead, colocated."""

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from engines import new_address
from fsdp2x.rollout import RolloutServer
from harness import distributed, programs

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo_toy.py"
sys.path.append(str(EXAMPLE.parent))

from grpo_loop import Loop, Settings, make_model  # noqa: E402

MEETING_S = 20.0
SMALL = ("--warmup_steps", "5", "--prompts", "8", "--samples", "4", "--lr", "0.01")
PHASES = {"generate", "score", "train", "push"}
pytestmark = pytest.mark.timeout(300)


def run(out, *words, timeout=240.0):
    done = programs.run(EXAMPLE, "--out", out, *words, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["warm-up", *["step"] * (len(lines) - 2), "end"]
    return lines, lines[1:-1]


@pytest.mark.parametrize(
    "mode", ["in turns", *(pytest.param(m, marks=pytest.mark.full) for m in ("--async", "--colocate"))]
)
def test_a_few_steps(tmp_path, mode):
    words = [mode] if mode.startswith("-") else []
    lines, steps = run(tmp_path, "--steps", "3", *SMALL, *words)
    assert [step["version"] for step in steps] == [1, 2, 3]
    for line in lines:
        assert 0 <= line["difference"] < 1e-4
    ages = [step["staleness_max"] for step in steps]
    # What was asked before the first update is of the first weights; a push may still be in time for some tokens.
    assert ages == [0, 0, 0] if mode != "--async" else ages[0] == 0 and set(ages[1:]) <= {0, 1}
    for step in steps:
        assert 0 <= step["staleness"] <= step["staleness_max"] and step["kl"] >= 0 and step["entropy"] > 0
        assert set(step["seconds"]) == PHASES and all(seconds > 0 for seconds in step["seconds"].values())
        assert ("weight_max" in step) == (mode == "--async")
        if mode == "--async" and step["staleness_max"] == 1:
            assert step["weight_min"] < 1 < step["weight_max"] <= 2 and step["weight_max"] - step["weight_min"] > 1e-3
    assert steps[0]["kl"] < 1e-9 and steps[-1]["kl"] > 1e-5, "from the policy of the start, which was trained on"
    assert (tmp_path / "reward.png").stat().st_size > 10_000


class Meeting(RolloutServer):
    """An engine that is asked for a forward while the trainer updates: each waits for the other once a step.

    ``is_due``: the next forward waits until the trainer is in its update. ``forwards``: (begin, end, version).
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.point, self.is_due, self.forwards = threading.Barrier(2, timeout=MEETING_S), False, []

    @contextlib.contextmanager
    def _weights(self):
        with super()._weights() as version:
            began = time.monotonic()
            if self.is_due:
                self.is_due = False
                self.point.wait()
            yield version
            self.forwards.append((began, time.monotonic(), version))


class MeetingLoop(Loop):
    """The example's loop on a rank; with an engine in this process its updates meet a forward that was asked before."""

    def __init__(self, settings, address, server):
        super().__init__(settings, address)
        self.server, self.num_asked, self.updates = server, 0, []

    def ask(self, prompts, samples, temperature=None):
        if samples == self.settings.samples:
            self.num_asked += 1
            if self.server is not None and self.num_asked > 1:  # what is asked first is collected before any update
                self.server.is_due = True
        super().ask(prompts, samples, temperature)

    def train(self, prompts, completions):
        began = time.monotonic()
        if self.server is not None and self.version + 1 < self.settings.steps:
            self.server.point.wait()  # there is no forward that was asked for: the loop is not asynchronous
        found = super().train(prompts, completions)
        self.updates.append((began, time.monotonic(), self.version))
        return found


@distributed(world_sizes=(2,))
def test_one_step_ahead(ctx):
    """The engine draws while the trainers update, with the weights before; importance weights tell."""
    settings = Settings(steps=3, warmup_steps=5, warmup_batch=16, prompts=4, samples=4, lr=0.01, is_async=True)
    addresses = [new_address()]
    dist.broadcast_object_list(addresses)
    server, thread = None, None
    if ctx.rank == 0:
        server = Meeting(make_model(settings.model), addresses[0], has_weights=False)
        thread = threading.Thread(target=server.serve, kwargs={"contact_s": MEETING_S}, daemon=True)
        thread.start()
    loop = MeetingLoop(settings, addresses[0], server)
    try:
        lines = list(loop.run())
    finally:
        loop.close()
    steps = lines[1:-1]
    assert [step["version"] for step in steps] == [1, 2, 3] and loop.num_asked == 3
    assert [step["staleness_max"] for step in steps] == [0, 1, 1]
    for step in steps:
        assert ("weight_max" in step) and step["difference"] < 1e-4
    assert steps[0]["staleness"] == 0 and 1 - 1e-3 < steps[0]["weight_min"] <= steps[0]["weight_max"] < 1 + 1e-3
    for step in steps[1:]:
        assert 0 < step["staleness"] <= 1
        assert step["weight_min"] < 1 < step["weight_max"] <= 2 and step["weight_max"] - step["weight_min"] > 1e-3
    if server is not None:
        thread.join(MEETING_S)
        assert not thread.is_alive()
        server.close()
        for began, ended, version in loop.updates[:-1]:
            during = [of for start, stop, of in server.forwards if start < ended and began < stop]
            assert version in during, "no forward of the weights before ran during an update"
            assert version + 1 not in during


@pytest.mark.full
def test_weights_that_do_not_arrive_are_told(tmp_path):
    """A tolerance that no rounding meets: the comparison after the first push ends trainers and engine."""
    done = programs.run(EXAMPLE, "--out", tmp_path, "--steps", "2", *SMALL, "--tolerance", "1e-12", timeout=240)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "version 0: log-probabilities of trainers and engine differ by" in said
    assert "grpo_toy: FAILED: the trainers ended with status 1" in said


@pytest.mark.full
def test_an_engine_that_is_killed_ends_everything(tmp_path):
    """In the middle of a run: the launcher says so, nobody waits for anybody."""
    program = programs.Program(EXAMPLE, "--out", tmp_path, "--steps", "100000", *SMALL, log=tmp_path / "log")
    try:
        deadline, lines = time.monotonic() + 200, tmp_path / "metrics.jsonl"
        while not lines.exists() or lines.read_text().count("\n") < 3:
            assert program.poll() is None and time.monotonic() < deadline, program.log.read_text()
            time.sleep(0.05)
        (pid,) = re.findall(r"process (\d+) samples at", program.log.read_text())
        os.kill(int(pid), signal.SIGKILL)
        assert program.wait(100) == 1
    finally:
        program.end()
    assert "grpo_toy: FAILED: the " in program.log.read_text()


def test_one_step_ahead_is_refused_when_colocated(tmp_path):
    done = programs.run(EXAMPLE, "--out", tmp_path / "out", "--async", "--colocate")
    assert done.returncode == 2 and "--async samples while the trainers train" in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", ["in turns", "--async"])
def test_the_reward_rises(tmp_path, mode):
    """The example itself ends with an error unless the mean of ten steps rose by 0.2."""
    words = [mode] if mode.startswith("-") else []
    _, steps = run(tmp_path, *words, timeout=1400)
    rewards = [step["reward"] for step in steps]
    assert sum(rewards[-10:]) >= sum(rewards[:10]) + 2
