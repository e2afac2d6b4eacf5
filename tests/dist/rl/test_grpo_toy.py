"""`fsdp2x grpo` next to an engine: the example, sampling one step ahead, and an engine that dies."""

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
from fsdp2x.grpo import GrpoConfig, GrpoTrainer
from fsdp2x.rollout import RolloutServer
from fsdp2x.train.load_config import config_of, translate_file
from fsdp2x.train.model import build_model
from fsdp2x.train.tokenizer import ByteTokenizer
from harness import distributed, programs
from training import shared_folder

EXAMPLES = Path(__file__).parents[3] / "examples" / "grpo_toy"
EXAMPLE, CONFIG = EXAMPLES / "grpo_toy.py", EXAMPLES / "grpo.yaml"
sys.path.append(str(EXAMPLES))

from grpo_toy import write_rows  # noqa: E402

MEETING_S = 20.0
MODEL = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32,
}  # fmt: skip
PHASES = {"seconds_generate", "seconds_score", "seconds_train", "seconds_push"}
SMALL = ("rollout.group_size=4", "train.global_batch_size=8", "train.eval_every=0", "optimizer.lr=0.01")
pytestmark = pytest.mark.timeout(300)


def run(folder, *words, timeout=240.0):
    done = programs.run(EXAMPLE, *words, cwd=folder, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (folder / "out/grpo/run/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "train"], [line for line in lines if line["event"] == "eval"]


@pytest.mark.parametrize(
    "word", ["rollout.ahead=0", *(pytest.param(w, marks=pytest.mark.full) for w in ("ahead=1", "engine=colocated"))]
)
def test_a_few_steps(tmp_path, word):
    word, ahead = f"rollout.{word.removeprefix('rollout.')}", "ahead=1" in word
    words = (*SMALL, "train.steps=3", "train.eval_every=3", "train.eval_blocks=16", "optimizer.lr=1e-3", word)
    steps, evaluated = run(tmp_path, *words)
    assert [step["step"] for step in steps] == [1, 2, 3] and [line["step"] for line in evaluated] == [3]
    ages = [step["staleness_max"] for step in steps]
    # Requests sent before the first update use the first weights. A push may still arrive in time for some tokens.
    assert ages == [0, 0, 0] if not ahead else ages[0] == 0 and set(ages[1:]) <= {0, 1}
    for step in steps:
        assert 0 <= step["difference_max"] < 1e-4 and 0 <= step["staleness"] <= step["staleness_max"]
        assert step["kl"] >= 0 and step["entropy"] > 0 and all(step[phase] > 0 for phase in PHASES)
        assert ("weight_max" in step) == ahead
    assert steps[0]["kl"] < 1e-9 and steps[-1]["kl"] > 1e-5, "to the policy of the start, which was trained on"
    assert 0 < steps[0]["reward"] < 1 and 0 <= evaluated[0]["reward"] <= 1


def read_config(folder, *overrides) -> GrpoConfig:
    """Reads the example's config, with an untrained model."""
    rows = [f"data.files={folder / 'prompts.jsonl'}", f"data.validation_files={folder / 'held_out.jsonl'}"]
    words = ["model.path=null", f"model.config={json.dumps(MODEL)}", f"logging.output={folder / 'run'}", *rows]
    return config_of(translate_file(CONFIG, [*words, *SMALL, *overrides], GrpoConfig), GrpoConfig)


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


class MeetingTrainer(GrpoTrainer):
    """On the rank with the engine, updates meet a forward that was asked for before."""

    server: Meeting | None = None
    num_asked = 0

    def meet(self, server: Meeting) -> None:
        self.server, self.updates, update = server, [], self.update.run

        def run(batch, step, step_optimizer):
            began = time.monotonic()
            if step + 1 < self.num_steps:
                server.point.wait()  # breaks where nothing was asked for: the run is not ahead
            found = update(batch, step, step_optimizer)
            self.updates.append((began, time.monotonic(), step))
            return found

        self.update.run = run

    def _ask(self, step, round_):
        self.num_asked += 1
        if self.server is not None and self.num_asked > 1:  # what is asked first is collected before any update
            self.server.is_due = True
        super()._ask(step, round_)


@distributed(world_sizes=(2,))
def test_one_step_ahead(ctx):
    """The engine draws while the trainers update, with the weights before; importance weights tell."""
    addresses = [new_address()]
    dist.broadcast_object_list(addresses)
    with shared_folder(ctx) as folder:
        if ctx.rank == 0:
            write_rows(folder)
        dist.barrier()
        # Nothing is sorted by chance, so that another reward has to move the weights.
        reward = "reward.functions=[{name: regex, pattern: '[a-q]'}]"
        config = read_config(folder, f"rollout.addresses={addresses}", "rollout.ahead=1", "train.steps=3", reward)
        server = None
        if ctx.rank == 0:
            server = Meeting(build_model(config.model, ByteTokenizer(), 0), addresses[0], has_weights=False)
            thread = threading.Thread(target=server.serve, kwargs={"contact_s": MEETING_S}, daemon=True)
            thread.start()
        trainer = MeetingTrainer(config)
        try:
            if server is not None:
                trainer.meet(server)
            steps = []
            for _ in range(3):
                trainer.train_step()
                steps.append(trainer.numbers)
        finally:
            trainer.close()
    assert trainer.step == 3 and trainer.num_asked == 3
    assert [step["staleness_max"] for step in steps] == [0, 1, 1]
    assert all(step["difference_max"] < 1e-4 for step in steps)
    assert steps[0]["staleness"] == 0 and abs(steps[0]["weight_max"] - 1) < 1e-3
    for step in steps[1:]:
        assert 0 < step["staleness"] <= 1 and 1 + 1e-3 < step["weight_max"] <= 2
    if server is not None:
        thread.join(MEETING_S)
        assert not thread.is_alive()
        server.close()
        for began, ended, version in trainer.updates[:-1]:
            during = [of for start, stop, of in server.forwards if start < ended and began < stop]
            assert version in during, "no forward of the weights before ran during an update"
            assert version + 1 not in during


@pytest.mark.full
def test_an_engine_that_is_killed_ends_the_run(tmp_path):
    """An engine dies in the middle of a run. Every rank reports it, and no rank waits for another."""
    write_rows(tmp_path / "out" / "grpo")
    words = [*programs.TORCHRUN, "--standalone", "--nproc_per_node=2", "-m", "fsdp2x.grpo", CONFIG, "model.path=null"]
    words += [f"model.config={json.dumps(MODEL)}", *SMALL, "train.steps=100000"]
    program = programs.Program(*words, log=tmp_path / "log", cwd=tmp_path)
    try:
        deadline, lines = time.monotonic() + 200, tmp_path / "out/grpo/run/metrics.jsonl"
        while not lines.exists() or lines.read_text().count('"train"') < 3:
            assert program.poll() is None and time.monotonic() < deadline, program.log.read_text()
            time.sleep(0.05)
        (pid,) = re.findall(r"process (\d+) samples at", program.log.read_text())
        os.kill(int(pid), signal.SIGKILL)
        assert program.wait(100) == 1
    finally:
        program.end()
    assert re.search(r"fsdp2x.sync.push: version \d+ failed|fsdp2x: error: .*rollout", program.log.read_text())


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ahead", [0, 1])
def test_the_reward_rises(tmp_path, ahead):
    """The example itself ends with an error unless the mean of ten steps rose by 0.2."""
    steps, evaluated = run(tmp_path, f"rollout.ahead={ahead}", timeout=1400)
    rewards = [step["reward"] for step in steps]
    assert sum(rewards[-10:]) >= sum(rewards[:10]) + 2 and evaluated[-1]["reward"] > 0.5
