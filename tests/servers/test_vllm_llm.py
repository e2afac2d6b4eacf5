"""``Vllm(llm)`` with a real ``LLM``, asleep and awake; and the loop of the example with a real server as its engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_vllm_server import DIGITS, PUSH_S, run_ranks, save_model
from vllm_server import INSTALL_S, ROOT, copy_engine_files, python_of_vllm, say_release

pytestmark = [pytest.mark.full, pytest.mark.timeout(INSTALL_S + 2400)]


@pytest.fixture
def path_of_engine(tmp_path):
    """A folder with what an engine's process needs of ours."""
    path = tmp_path / "path"
    path.mkdir()
    copy_engine_files(path)
    say_release(path)
    return path


def test_pushes_into_an_llm(tmp_path, path_of_engine, capsys):
    save_model("dense", tmp_path / "model")
    found = tmp_path / "found.json"
    words = [python_of_vllm(), str(path_of_engine), str(tmp_path / "model"), str(found)]
    run_ranks(Path(__file__).with_name("push_to_llm.py"), words)
    rows = {row["step"]: row for row in json.loads(found.read_text())}
    with capsys.disabled():
        print("\nan LLM of the trainer")
        for step, row in rows.items():
            said = row.get("refused")
            print(f"{step:28} " + (f"refused: {said[:60]}" if said else f"log-probs {row['apart']:.0e} apart"))
    assert "level 2 dropped the weights" in rows.pop("wake after level 2")["refused"]
    assert "has nothing for" in rows.pop("left out")["refused"]
    assert len(rows) == 6
    for row in rows.values():
        assert row["same"] and row["apart"] < DIGITS, row


@pytest.mark.parametrize("mode", ["in turns", "--async", "--colocate"])
def test_the_loop_of_the_example(tmp_path, path_of_engine, mode, capsys):
    """Its own checks hold with a real engine: log-probabilities after each push, and how old tokens are."""
    example = ROOT / "examples" / "grpo_toy.py"
    words = ["--engine", "vllm", "--vllm_python", python_of_vllm(), "--out", str(tmp_path / "out")]
    words += ["--steps", "4", "--warmup_steps", "5", "--prompts", "8", "--samples", "4", "--lr", "0.01"]
    words += [mode] if mode.startswith("--") else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path_of_engine)}
    done = subprocess.run(
        [sys.executable, str(example), *words], env=environment, capture_output=True, text=True, timeout=PUSH_S
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    with capsys.disabled():
        print(f"\ngrpo_toy.py --engine vllm, {mode}\n{done.stdout}")
    steps = [line for line in lines if line["event"] == "step"]
    assert [step["version"] for step in steps] == [1, 2, 3, 4]
    assert all(line["difference"] < 1e-4 for line in lines)
    ages = [step["staleness_max"] for step in steps]
    assert ages == [0, 0, 0, 0] if mode != "--async" else ages[0] == 0 and set(ages[1:]) <= {0, 1}
