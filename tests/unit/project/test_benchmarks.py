"""The benchmarks' harness, tables and history, and dry runs of the GPU scripts."""

import json
import math
import subprocess
from pathlib import Path

import pytest

from harness import programs

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


def report(*arguments) -> subprocess.CompletedProcess:
    """In a process of its own: the benchmarks' harness and the tests' have the same name."""
    return programs.run(FOLDER / "report.py", *arguments)


@pytest.fixture
def history(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import history

    return history


@pytest.fixture
def result():
    """A recorded one, in which FSDP2 takes 6.7 times as long as fsdp2x in "comm"."""
    record = json.loads((FOLDER / "results/step_cpu_2ranks.json").read_text())
    sides = record["results"]["comm"]
    sides["stock"]["step"]["median_ms"] = 6.7 * sides["fsdp2x"]["step"]["median_ms"]
    return record


def test_a_row_below_all_recorded_runs_is_found(history, result):
    line = history.entry("step_cpu_2ranks", result, 0.1)
    assert line["ratios"]["comm: FSDP2"] == 6.7 and line["load"] == 0.1
    assert line["ours"]["comm"] == pytest.approx(result["results"]["comm"]["fsdp2x"]["step"]["median_ms"], abs=0.001)
    lines = []
    for day, factor in enumerate((0.9, 0.8, 1.0, 1.2, 1.1)):
        scaled = {row: factor * value for row, value in line["ratios"].items()}
        lines.append({**line, "day": f"2026-01-0{1 + day % 2}", "ratios": scaled})
    table = history.steps_table([*lines, {**line, "name": "other"}])
    assert "runs: 5, days: 2, machines: 1" in table
    assert "| comm: 12 layers of 512, 16 tokens | 6.7x (5.4 to 8.0) |" in table
    assert history.regressions(lines, {"step_cpu_2ranks": result}) == []
    result["results"]["comm"]["stock"]["step"]["median_ms"] *= 0.7
    (found,) = history.regressions(lines, {"step_cpu_2ranks": result})
    assert found == "step_cpu_2ranks, comm: FSDP2: 4.69x, the 5 runs before had 5.36x and more"
    assert history.regressions(lines[:4], {"step_cpu_2ranks": result}) == []


def test_gpu_benchmarks_train_on_the_cpu_when_asked_to(tmp_path):
    """Dry runs: everything but the device's clock and counters, with losses that agree; and the report shows them."""
    kept = tmp_path / "results" / "dry-run.json"
    for name in ("step", "units", "memory"):
        done = programs.run(FOLDER / f"gpu/bench_{name}.py", "--device", "cpu", "--json", kept, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(kept.read_text())["results"]
    assert [(one["case"]["name"], one["case"]["policy"]) for one in results["step"]] == [
        (name, policy) for name in ("qwen3-tiny:8", "llama-tiny:8") for policy in ("fp32", "bf16")
    ]
    assert all(one[side]["step"]["median_ms"] > 0 for one in results["step"] for side in ("stock", "fsdp2x"))
    assert [(one["case"]["world"], one["case"]["gathers"]) for one in results["units"]] == [
        (1, "packed"), (2, "packed"), (2, "alone"),
    ]  # fmt: skip
    for one in results["units"]:  # slopes of short runs: any number
        assert all(math.isfinite(one["host_us"][side]["backward"]) for side in ("stock", "fsdp2x"))
    for one in results["memory"]:
        assert one["stock"]["model"] <= one["fsdp2x"]["model"] < one["fsdp2x"]["plan_resting"]
    done = report("--results", kept.parent, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out" / "README.md").read_text()
    for title in ("Steps of HuggingFace shapes", "What a unit costs", "Memory of a rank"):
        assert f"### {title}" in text
