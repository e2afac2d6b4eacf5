"""The example of reinforcement learning: every number that it checks is there, in turns, one step ahead, colocated."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from harness import programs

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_toy.py"
SMALL = ("--warmup_steps", "5", "--prompts", "8", "--samples", "4", "--lr", "0.01")
PHASES = {"generate", "score", "train", "push"}
pytestmark = pytest.mark.timeout(300)


def run(out, *words, timeout=240.0):
    done = programs.run(EXAMPLE, "--out", out, *words, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["warm-up", *["step"] * (len(lines) - 2), "end"]
    return lines, lines[1:-1]


@pytest.mark.parametrize("mode", ["in turns", "--async", pytest.param("--colocate", marks=pytest.mark.full)])
def test_a_few_steps(tmp_path, mode):
    words = [mode] if mode.startswith("-") else []
    lines, steps = run(tmp_path, "--steps", "4", *SMALL, *words)
    assert [step["version"] for step in steps] == [1, 2, 3, 4]
    for line in lines:
        assert 0 <= line["difference"] < 1e-4
    ages = [step["staleness_max"] for step in steps]
    # What was asked before the first update is of the first weights; a push may still be in time for some tokens.
    assert ages == [0, 0, 0, 0] if mode != "--async" else ages[0] == 0 and set(ages[1:]) <= {0, 1}
    for step in steps:
        assert 0 <= step["staleness"] <= step["staleness_max"] and step["kl"] >= 0 and step["entropy"] > 0
        assert set(step["seconds"]) == PHASES and all(seconds > 0 for seconds in step["seconds"].values())
        assert ("weight_max" in step) == (mode == "--async")
        if mode == "--async" and step["staleness_max"] == 1:
            assert step["weight_min"] < 1 < step["weight_max"] <= 2 and step["weight_max"] - step["weight_min"] > 1e-3
    assert steps[0]["kl"] < 1e-9 and steps[-1]["kl"] > 1e-5, "from the policy of the start, which was trained on"
    assert (tmp_path / "reward.png").stat().st_size > 10_000


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
