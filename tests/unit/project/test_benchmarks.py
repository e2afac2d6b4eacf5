"""The benchmarks' harness, tables and history, and dry runs of the GPU scripts."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from harness import programs

ROOT = Path(__file__).resolve().parents[3]
FOLDER, PARTS = ROOT / "benchmarks", ROOT / "tests" / "gpu" / "run_parts.py"


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


def test_pages_quote_the_recorded_numbers():
    done = programs.run(FOLDER / "headline.py", "check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_gpu_parts_end_on_the_cpu(tmp_path):
    """Dry runs of both calls, in two minutes: all but the device, with losses that agree; and the report shows them."""
    for call in ("first", "second"):
        command = [sys.executable, str(PARTS), call, "--dry-run", "--out", str(tmp_path)]
        done = subprocess.run(
            command, env=programs.environment(), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        page = (tmp_path / call / "page.txt").read_text()
        assert "VERDICT" in page and "FAILED" not in page, page
    probed = json.loads((tmp_path / "first" / "probe.json").read_text())
    assert probed["memory of another process"] == probed["two ranks on one device"] == ""
    first, second = (json.loads((tmp_path / call / "numbers.json").read_text()) for call in ("first", "second"))
    results = {**second["results"], **first["results"]}
    assert [one["case"]["name"] for one in results["step"]] == ["qwen3-tiny:8", "llama-tiny:8"]
    for one in results["step"]:
        assert all(one[side]["step"]["median_ms"] > 0 for side in ("stock", "fsdp2x", "unsharded"))
    assert [(one["case"]["world"], one["case"]["gathers"]) for one in results["units"]] == [
        (1, "packed"), (2, "packed"), (2, "alone"),
    ]  # fmt: skip
    for one in results["units"]:  # slopes of short runs: any number
        assert all(math.isfinite(one["host_us"][side]["backward"]) for side in ("stock", "fsdp2x"))
    for one in results["memory"]:
        assert one["stock"]["model"] <= one["fsdp2x"]["model"] < one["fsdp2x"]["plan_resting"]
        assert one["kept"]["model"] == one["fsdp2x"]["model"]
    kept = tmp_path / "results" / "dry-run.json"
    kept.parent.mkdir()
    kept.write_text(json.dumps({**first, "results": results}))
    done = report("--results", kept.parent)
    assert done.returncode == 0, done.stderr
    for title in ("Steps of HuggingFace shapes", "Steps as rank 0 of 8", "What a unit costs", "Memory of a rank"):
        assert f"### {title}" in done.stdout


# ---- every benchmark, as short as it gets: it runs to its end, its sides agree, its result makes a table

ONE_SMALL_MODEL = ("--hidden", "64", "--layers", "2", "--repeats", "1")
SHORTEST = {
    "bench_checkpoint.py": ONE_SMALL_MODEL,
    "bench_collectives.py": ("--sizes", "4096", "--steps", "2"),
    "bench_curves.py": ("--quick",),
    "bench_export.py": ONE_SMALL_MODEL,
    "bench_host.py": ("--quick",),
    "bench_load.py": ONE_SMALL_MODEL,
    "bench_memory.py": ("--quick",),
    "bench_moe.py": ("--quick", "--steps", "1"),
    "bench_moments.py": ("--steps", "1"),
    "bench_muon.py": ("--cases", "layers", "--sides", "float32", "float32-gram", "--steps", "1"),
    "bench_optimizer.py": ("--steps", "1"),
    "bench_score.py": ("--quick", "--steps", "1"),
    "bench_sequence.py": ("--quick", "--steps", "1"),
    "bench_sft.py": ("--quick", "--gloo"),
    "bench_step.py": ("--cases", "many", "--steps", "1"),
    "bench_sync.py": ONE_SMALL_MODEL,
    "bench_wire.py": ("--quick", "--steps", "1"),
}
USE = """
import json, report, sys
print(report.section({**json.load(open(sys.argv[1])), "name": "x"}))
"""


@pytest.mark.full
def test_none_is_missing():
    assert {path.name for path in FOLDER.glob("bench_*.py")} == set(SHORTEST)


@pytest.mark.full
@pytest.mark.parametrize("script", SHORTEST)
def test_a_benchmark_runs(script, tmp_path):
    if script == "bench_step.py":
        pytest.importorskip("peft")
    result = tmp_path / "result.json"
    # An interpreter of its own: benchmarks start processes in every way there is.
    command = [sys.executable, str(FOLDER / script), *SHORTEST[script], "--json", str(result)]
    done = subprocess.run(command, env=programs.environment(), capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(result.read_text())["benchmark"] == script[len("bench_") : -len(".py")]
    done = programs.run("-c", USE, result, cwd=FOLDER)
    assert done.returncode == 0 and done.stdout.count("|") > 20, done.stdout + done.stderr
