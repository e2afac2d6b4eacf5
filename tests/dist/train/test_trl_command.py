"""`fsdp2x trl`: its mistakes are one sentence, a failure is reported once, and no rank outlives the command."""

import json
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from chats import some_rows, write_rows
from harness import programs
from trl_runs import write_folder

pytest.importorskip("trl")
TIMEOUT_S = 200
COMMAND = ("-m", "fsdp2x", "trl")
# Makes several mistakes in one process, as torchrun's only rank.
MISTAKES = """
import json, sys
from fsdp2x.train.commands.trl_rank import run_rank

for words in json.loads(sys.argv[1]):
    config = "sft.yaml" if words[0].startswith("--") else words.pop(0)
    print("status", run_rank("sft", config, words, None), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("trl"))


def test_mistakes_are_one_sentence(folder):
    (folder / "typo.yaml").write_text("lerning_rate: 1.0e-3\n")
    (folder / "entry.yaml").write_text("datasets: [{path: json, data_file: rows.jsonl}]\n")
    write_rows(folder / "rows.jsonl", some_rows(8))
    hub = "fsdp2x trl downloads nothing. Correct the path, use `hf download`, or set HF_HUB_OFFLINE=0."
    cases = {
        ("typo.yaml",): "config file typo.yaml: unknown key lerning_rate. Did you mean learning_rate?",
        ("none.yaml",): "config file none.yaml: No such file",
        ("entry.yaml",): "unexpected keyword argument 'data_file'",
        ("--lerning-rate", "1"): "unrecognized argument --lerning-rate. Did you mean learning_rate?",
        ("--learning_rat", "1"): "unrecognized argument --learning_rat. Did you mean learning_rate?",
        ("--max_steps", "few"): "argument --max_steps/--max-steps: invalid int value: 'few'",
        ("--model_name_or_path", "Some/Model"): f"Some/Model is neither a folder nor in the HuggingFace cache. {hub}",
        ("--model_name_or_path", "./a/b/c"): f"./a/b/c is neither a folder nor in the HuggingFace cache. {hub}",
        ("--dataset_name", "some/rows"): hub,
        ("--dataset_name", "missing.jsonl"): hub,
        ("--dataset_name", "rows.jsonl", "--eval_strategy", "steps"): "Set test_split_size, dataset_test_split, or",
    }
    if find_spec("bitsandbytes") is None:
        cases[("--load_in_4bit", "--use_peft")] = "load_in_4bit needs bitsandbytes, which is not installed."
    launch = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    words = json.dumps(list(cases))
    done = programs.run(
        "-c", MISTAKES, words, cwd=folder, env=programs.environment(**launch, OMP_NUM_THREADS="1"), timeout=TIMEOUT_S
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    said = done.stderr.split("status 2\n")
    assert len(said) == len(cases) + 1, done.stderr
    for expected, text in zip(cases.values(), said, strict=False):
        assert expected in text and text.count("fsdp2x: error: ") == 1


def start(folder, *words, log):
    env = programs.environment(TMPDIR=str(folder))
    return programs.Program(*COMMAND, *words, "--nproc", 2, log=folder / log, cwd=folder, env=env)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("reward.fail", "rank 1 failed\nTraceback"),
        pytest.param("reward.die", "rank 1 ended by SIGKILL", marks=pytest.mark.full),
        (None, "unknown key typo."),
    ],
)
def test_the_first_failure_is_reported_once(folder, reward, said):
    config = yaml.safe_load((folder / "grpo.yaml").read_text())
    (folder / "fails.yaml").write_text(
        yaml.safe_dump({**config, **({"reward_funcs": [reward]} if reward else {"typo": 1})})
    )
    program = start(folder, "grpo", "--config", "fails.yaml", log="log")
    status, log = program.wait(TIMEOUT_S), program.log.read_text()
    assert status == (1 if reward else 2), log
    program.log.unlink()
    assert log.count("fsdp2x: error: ") == log.count(said) == 1, log
    assert log.count("Traceback") == log.count("ValueError: no reward") == (reward == "reward.fail"), log


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGKILL]
)
def test_no_rank_outlives_the_command(folder, number):
    output = folder / f"{number.name}-out"
    program = start(folder, "sft", "--config", "sft.yaml", "--max_steps", "100000", "--output_dir", output, log="end")
    ranks = []
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not list(output.glob("checkpoint-*/trainer_state.json")) and program.poll() is None:
            assert time.monotonic() < deadline, program.log.read_text()
            time.sleep(0.05)
        ranks = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        assert len(ranks) == 2, program.log.read_text()
        os.kill(program.pid, number)
        status = program.wait(TIMEOUT_S)
    finally:
        program.end()
    log = program.log.read_text()
    program.log.unlink()
    while any(is_running(pid) for pid in ranks):
        assert time.monotonic() < deadline, "a rank outlives the command"
        time.sleep(0.05)
    if number != signal.SIGKILL:
        assert status == 128 + number and "Traceback" not in log, log
        (last,) = [line for line in log.splitlines() if "all ranks have ended" in line]
        assert last.startswith(f"fsdp2x: {number.name}: all ranks have ended. Continue with --resume_from_checkpoint ")
        assert (Path(last.split()[-1]) / "trainer_state.json").exists()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
