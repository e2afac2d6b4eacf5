"""The two examples of a loop over rewards: the reward rises, and the asynchronous one samples during updates."""

import re
from pathlib import Path

import pytest

from harness import programs

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 20


def run(name, *words, status=0):
    done = programs.run(*programs.TORCHRUN, "--standalone", "--nproc_per_node=2", EXAMPLES / name, *words, timeout=240)
    assert (done.returncode == 0) == (status == 0), done.stdout + done.stderr
    return done.stdout, done.stderr


def numbers(pattern, text):
    (found,) = re.findall(pattern, text)
    return [float(number) for number in found]


def test_the_reward_rises():
    said, _ = run("grpo_toy.py", f"--steps={STEPS}")
    first, last = numbers(r"mean reward: (\S+) at first, (\S+) at last", said)
    assert 0.4 < first < 0.6 and last > first + 0.25
    apart = [float(number) for number in re.findall(r"sampler and policy differ by (\S+)", said)]
    assert len(apart) == 3 and max(apart) < 1e-4


@pytest.mark.full
def test_the_engine_samples_during_updates():
    said, _ = run("grpo_async.py", f"--steps={STEPS}")
    first, last = numbers(r"mean reward: (\S+) at first, (\S+) at last", said)
    assert 0.4 < first < 0.6 and last > first + 0.25
    assert re.findall(r"(\d+) update\(s\) old", said) == ["0", "1", "1"]
    sampled, overlapped = numbers(r"the engine sampled (\S+) s ahead, (\S+) s of them during updates", said)
    assert 0.25 * sampled <= overlapped <= sampled


def test_one_step_ahead_refuses_to_sample_in_the_trainers_process():
    _, said = run("grpo_async.py", "--engine=colocated", status=2)
    assert "--engine colocated: a trainer's process cannot sample while it trains. Use grpo_toy.py" in said


@pytest.mark.full
@pytest.mark.parametrize("name", ["grpo_toy.py", "grpo_async.py"])
def test_the_examples_as_they_are(name):
    run(name)
