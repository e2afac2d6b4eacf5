"""The commands as a user types them: alone without torchrun, under torchrun, killed and resumed, and with mistakes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fsdp2x.base.processes import start_time
from fsdp2x.train import model
from fsdp2x.train.cli import main
from fsdp2x.train.distributed import Interrupt
from fsdp2x.train.metrics import read_metrics
from harness import programs
from training import losses, settings, write_text

TIMEOUT_S = 120


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings(write_text(tmp_path / "text"), tmp_path / "run")))
    return path


def command(*args):
    done = programs.run(*args, timeout=TIMEOUT_S)
    return done.returncode, done.stdout + done.stderr


def torchrun(tmp_path):
    return (*programs.TORCHRUN, "--standalone", "--nproc_per_node=2", "--log-dir", tmp_path / "torchrun")


def test_one_process_without_torchrun_trains_resumes_and_exports(config, tmp_path):
    status, output = command("-m", "fsdp2x", "train", config, "train.steps=4")
    assert status == 0, output
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]
    status, output = command("-m", "fsdp2x", "train", config, "train.steps=5", "--resume_from", tmp_path / "run")
    assert status == 0, output
    assert "resumed from" in output
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]
    status, output = command("-m", "fsdp2x", "export", tmp_path / "run", tmp_path / "hf")
    assert status == 0, output
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "hf").iterdir()}
    status, output = command("-m", "fsdp2x", "export", tmp_path / "run", tmp_path / "hf")
    assert status == 2
    assert "exists already" in output and "Traceback" not in output


def with_interpreters(*words):
    """Runs like `command`, but in new interpreters, also for torchrun's ranks."""
    words = [sys.executable, *map(str, words)]
    done = subprocess.run(words, env=programs.environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("run", [command, pytest.param(with_interpreters, marks=pytest.mark.full)])
def test_torchrun_and_one_process_see_the_same_text(config, tmp_path, run):
    """Six blocks a step either way: the first losses agree up to rounding."""
    section = ("train.accumulation=1", "train.steps=2")
    status, output = run(*torchrun(tmp_path), "-m", "fsdp2x.train", config, "train.batch_size=3", *section)
    assert status == 0, output
    status, output = command(
        "-m", "fsdp2x.train", config, "train.batch_size=6", f"logging.output={tmp_path}/one", *section
    )
    assert status == 0, output
    two, one = losses(tmp_path / "run"), losses(tmp_path / "one")
    for step in (1, 2):
        assert float.fromhex(one[step]) == pytest.approx(float.fromhex(two[step]), abs=2e-6)


def test_ranks_that_outlive_their_launcher_keep_their_folder(config, tmp_path):
    """They continue to save. A second run raises until they have ended, and then continues from their checkpoint."""
    run = tmp_path / "run"
    more = ("train.steps=100000", "checkpoint.save_every=1", "schedule.kind=constant")
    launcher = programs.Program(*torchrun(tmp_path), "-m", "fsdp2x.train", config, *more, log=tmp_path / "log")
    pids = []
    try:
        pids = wait_for_step(run / "metrics.jsonl", 2, launcher)
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait(TIMEOUT_S)
        resume = ("-m", "fsdp2x", "train", config, "train.steps=3", "--resume_from", run)
        status, output = command(*resume)
        assert status == 2 and "Traceback" not in output, output
        assert f"is still running. End its processes (kill {pids[0]} {pids[1]})" in output
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        launcher.end()
    wait_for_end(pids)
    saved = int((run / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
    status, output = command(*resume, f"train.steps={saved + 1}")
    assert status == 0, output
    assert f"resumed from {run / 'checkpoints' / f'step-{saved:06d}'}" in output
    status, output = command("-m", "fsdp2x", "export", run, tmp_path / "hf")
    assert status == 0, output


def interrupted(config, tmp_path, launcher=(), more=(), number=signal.SIGINT):
    """A run that gets a signal as from a terminal, launcher and ranks alike; its status and what it says."""
    settings = ("train.steps=100000", "schedule.kind=constant", "train.accumulation=1", *more)
    program = programs.Program(*(launcher or ("-m", "fsdp2x", "train")), config, *settings, log=tmp_path / "log")
    try:
        pids = wait_for_step(tmp_path / "run/metrics.jsonl", 3, program)
        for pid in {*pids, program.pid}:
            os.kill(pid, number)
        return program.wait(TIMEOUT_S), program.log.read_text()
    finally:
        program.end()


@pytest.mark.parametrize(
    ("ranks", "number", "name"),
    [
        (1, signal.SIGINT, "Ctrl-C"),
        (2, signal.SIGTERM, "SIGTERM"),
    ],
)
def test_a_signal_saves_after_the_step_and_says_how_to_go_on(config, tmp_path, ranks, number, name):
    launcher = (*torchrun(tmp_path), "-m", "fsdp2x.train") if ranks == 2 else ()
    status, output = interrupted(config, tmp_path, launcher, number=number)
    saved = (tmp_path / "run/checkpoints/latest").read_text().strip()
    step = int(saved.removeprefix("step-"))
    assert step == max(losses(tmp_path / "run"))
    said = f"fsdp2x: interrupted after step {step}; saved step {step}; resume with --resume_from {tmp_path}/run/"
    assert output.count(said) == 1 and output.count(f"fsdp2x: {name} received: stopping after") == 1
    if ranks == 1:  # torchrun ends in its own way
        assert status == 130 and "Traceback" not in output, output
    status, output = command(
        "-m", "fsdp2x", "train", config, f"train.steps={step + 1}", "--resume_from", tmp_path / "run"
    )
    assert status == 0 and f"after step {step}" in output, output


def test_ctrl_c_where_nothing_is_saved_says_so(config, tmp_path):
    more = ("checkpoint.save_every=0", "checkpoint.save_last=false")
    status, output = interrupted(config, tmp_path, more=more)
    assert status == 130 and "Traceback" not in output
    assert output.strip().endswith("; nothing was saved: checkpoint.save_last=false and checkpoint.save_every=0")


def test_the_second_ctrl_c_ends_at_once(request):
    # A shell that starts pytest in the background has it ignore the signal.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, inherited))
    with pytest.raises(KeyboardInterrupt, match="ends without saving"), Interrupt(says=False) as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.noted
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # as it was before
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_the_terminal_of_ranks_that_the_command_started(config, tmp_path, times):
    """The terminal signals the process group of the command. Its ranks have sessions of their own."""
    more = ("train.steps=100000", "schedule.kind=constant", "train.accumulation=1")
    more += ("train.batch_size=1", "checkpoint.save_every=1000") * (times == 2)
    words = ("train", config, "--nproc", 2, *more)
    program = programs.Program("-m", "fsdp2x", *words, log=tmp_path / "log", session=True)
    pids = []
    try:
        pids = wait_for_step(tmp_path / "run/metrics.jsonl", 3, program)
        if times == 2:  # a rank that cannot end by itself
            os.kill(pids[1], signal.SIGSTOP)
        os.killpg(program.pid, signal.SIGINT)
        if times == 2:
            end = time.monotonic() + TIMEOUT_S
            while "Ctrl-C received" not in program.log.read_text() and time.monotonic() < end:
                time.sleep(0.1)
            os.killpg(program.pid, signal.SIGINT)
        status = program.wait(TIMEOUT_S)
    finally:
        program.end()
    output = program.log.read_text()
    assert status == 130 and "Traceback" not in output, output
    assert not any(alive(pid) for pid in pids)
    said = [line for line in output.splitlines() if line.startswith("fsdp2x: ")]
    assert said[0].startswith("fsdp2x: Ctrl-C received: stopping after what runs now."), output
    if times == 2:
        assert said[1:] == ["fsdp2x: interrupted twice: this run ended without saving"], output
        return
    step = int((tmp_path / "run/checkpoints/latest").read_text().strip().removeprefix("step-"))
    assert step == max(losses(tmp_path / "run"))
    (last,) = said[1:]
    assert last.startswith(f"fsdp2x: interrupted after step {step}; saved step {step}; resume with --resume_from ")
    status, output = command("-m", "fsdp2x", "train", config, f"train.steps={step}", "--resume_from", tmp_path / "run")
    assert status == 0 and f"nothing to do: the run ended after step {step}" in output, output


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        (("--nproc=auto", "train.steps=1"), 0, "fsdp2x: 2 CPU ranks with "),
        (("--nproc=2", "train.stepz=1"), 2, "fsdp2x: error: unknown key train.stepz. Did you mean train.steps?\n"),
        (("--nproc=2", "data.files=gone"), 2, "fsdp2x: error: data.files: gone: no such file\n"),
        (("--nproc=2", "optimizer.lr=1e30"), 1, "fsdp2x: error: step "),
    ],
)
def test_ranks_that_the_command_started_report_once(config, more, status, said):
    done, output = command("-m", "fsdp2x", "train", config, *more)
    assert done == status and output.count(said) == 1 and "Traceback" not in output, output
    assert output.count("fsdp2x: error: ") == (status > 0), output
    assert (" 2 ranks on " in output) == (status < 2), output


def test_a_scheduler_that_asks_again_does_not_lose_the_checkpoint():
    with Interrupt(says=False) as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.number == signal.SIGTERM


def test_torchruns_echo_of_ctrl_c_is_no_second_one(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with Interrupt(says=False):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def wait_for_end(pids):
    deadline = time.monotonic() + TIMEOUT_S
    # A thread that writes a checkpoint keeps files open, and so the lock, when the first thread has ended.
    while any(start_time(pid) is not None or num_threads(pid) > 1 for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def num_threads(pid):
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task"))
    return 0


def wait_for_step(path, step, program):
    """The ranks' pids, once the newest run in `path` has logged `step`."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        assert program.poll() is None, program.log.read_text()
        lines = read_metrics(path) if path.exists() else []
        starts = [i for i, line in enumerate(lines) if line["event"] == "start"]
        if starts and any(line["event"] == "train" and line["step"] >= step for line in lines[starts[-1] :]):
            pids = lines[starts[-1]]["pids"]
            if all(alive(pid) for pid in pids):
                return pids
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {program.log.read_text()}")


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.full
def test_the_demo_in_few_steps(tmp_path):
    demo = Path(__file__).parents[3] / "examples" / "demo.py"
    status, output = command(demo, "--steps", 20, "--out", tmp_path / "demo")
    assert status == 0, output
    assert "steps 11 to 12 are equal bit for bit" in output
    names = {path.name for path in (tmp_path / "demo").iterdir()}
    assert {"metrics.jsonl", "loss.png", "checkpoints", "export"} <= names


FAILS = """
import os, sys, time
from fsdp2x.base.failures import ConfigError
from fsdp2x.train import cli
from fsdp2x.train.config_file import ConfigFile

def read(*_):
    time.sleep(60 if os.environ["RANK"] == "0" else 0)
    exec(sys.argv[1])

ConfigFile.read = read
sys.exit(cli.main(["train", "x.yaml"]))
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise ConfigError('first\\nlost')", "fsdp2x: [rank 1] error: first (1 more line(s))\n"),
        ("raise KeyError('lost')", "[rank 1] unexpected failure: 'lost'\nTraceback (most recent call last):\n"),
        ("raise ConfigError('first') from KeyError('lost')", "[rank 1] unexpected failure: first\nKeyError: 'lost'\n"),
    ],
)
def test_each_rank_gives_its_reason_before_it_ends(tmp_path, fault, said):
    """Rank 0 hangs. The others are brief, and torchrun's report is complete."""
    (tmp_path / "fails.py").write_text(FAILS)
    status, output = command(*torchrun(tmp_path), tmp_path / "fails.py", fault)
    rank, _, report = output.partition("Root Cause")
    assert status == 1 and rank.count(said) == 1 and "lost" in report, output
    assert rank[rank.index(said) :].partition("W1")[0].count("\n") < 12, output


def test_a_slip_of_ours_keeps_its_traceback(config, caplog, monkeypatch):
    monkeypatch.setattr(model, "build_model", lambda *args: 1 // 0)
    assert main(["train", str(config)]) == 2
    assert "ZeroDivisionError" in caplog.text and "Traceback" in caplog.text


def test_ctrl_c_before_training_is_reported(config, capfd, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "build_model", interrupt)
    assert main(["train", str(config)]) == 130
    assert "fsdp2x: interrupted\n" in capfd.readouterr().err
