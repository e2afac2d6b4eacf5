"""The benchmarks' harness, tables and history, and dry runs of the GPU scripts."""

import json
import math
import subprocess
from pathlib import Path

import pytest
import torch

from harness import programs

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


def report(*arguments) -> subprocess.CompletedProcess:
    """In a process of its own: the benchmarks' harness and the tests' have the same name."""
    return programs.run(FOLDER / "report.py", *arguments)


def test_several_runs_are_one_result_with_their_range():
    code = """
import harness, json
runs = [{"comm": {"fsdp2x": {"step": {"median_ms": m, "min_ms": 0.0, "max_ms": 99.0}}}, "world": 2} for m in (3, 1, 2)]
merged = harness.merge(runs)
step = merged["comm"]["fsdp2x"]["step"]
alone = runs[0]["comm"]["fsdp2x"]["step"]
print(json.dumps([merged["world"], step, harness.spread(step, 1), harness.spread(alone, 1)]))
"""
    done = programs.run("-c", code, cwd=FOLDER)
    assert done.returncode == 0, done.stderr
    merged = {"median_ms": 2, "min_ms": 1, "max_ms": 3, "runs": 3}
    assert json.loads(done.stdout) == [2, merged, "2.0 (1.0-3.0)", "3.0"]


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


def test_the_picture_has_medians_and_ranges_of_all_runs(history, tmp_path):
    pytest.importorskip("matplotlib")
    lines = history.read(history.HISTORY)
    sides = history.bars(lines, "memory_cpu_2ranks", "comm: peak of all ranks")
    ratios = history.ranges(lines)["memory_cpu_2ranks", "comm: peak of all ranks: FSDP2"]
    assert [value / sides["fsdp2x"][0] for value in sides["FSDP2"][1:]] == pytest.approx([min(ratios), max(ratios)])
    history.draw(lines, tmp_path / "overview.png")
    assert (tmp_path / "overview.png").stat().st_size > 5000


def test_a_run_is_appended(history, monkeypatch, tmp_path):
    """Each in a process of its own, the last one's result is kept; one that fails leaves no line."""
    (tmp_path / "results").mkdir()
    (tmp_path / "bench.py").write_text(
        "import json, sys\n"
        f"text = open({str(FOLDER / 'results/step_cpu_2ranks.json')!r}).read()\n"
        "open(sys.argv[-1], 'w').write(text)\n"
    )
    monkeypatch.setattr(history, "HERE", tmp_path)
    monkeypatch.setattr(history.run_all, "FULL", {"step": ["bench.py"], "gone": ["gone.py"]})
    assert history.record(["step"], 2, tmp_path / "history.jsonl") == 0
    assert history.record(["gone"], 1, tmp_path / "history.jsonl") == 1
    lines = history.read(tmp_path / "history.jsonl")
    assert [line["name"] for line in lines] == ["step", "step"] and history.read(tmp_path / "none") == []
    assert [file.name for file in (tmp_path / "results").iterdir()] == ["step.json"]


def test_a_file_that_is_no_result_is_refused(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    done = report("--results", tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 1 and "other.json: not a result of a benchmark" in done.stderr


def test_gpu_results_are_kept_and_shown(tmp_path):
    rows = [
        {"kernel": "copy", "bytes": 6000000, "ms": 2.0, "gb_per_s": 3.0, "copy_ms": 1.9, "share_of_copy": 0.95},
        {"kernel": "adamw", "bytes": 28000000, "ms": 4.0, "gb_per_s": 7.0, "copy_ms": 2.0, "share_of_copy": 0.5},
    ]
    program, kept = tmp_path / "program", tmp_path / "results" / "a-gpu.json"
    program.write_text(f"#!/bin/sh\necho '{json.dumps({'device': 'A GPU', 'rows': rows})}'\n")
    program.chmod(0o755)
    kept.parent.mkdir()
    kept.write_text(json.dumps({"benchmark": "gpu", "environment": {}, "results": {"other": [1], "kernels": []}}))

    def bench(path: Path) -> subprocess.CompletedProcess:
        return programs.run(FOLDER / "gpu/bench_kernels.py", "--program", path, "--json", kept)

    done = bench(program)
    assert done.returncode == 0, done.stderr
    assert "| adamw | 28 | 4.000 | 7 | 0.50 (low) |" in done.stdout
    assert json.loads(kept.read_text())["results"] == {"other": [1], "kernels": rows}
    done = report("--results", kept.parent, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "| copy | 6 | 2.000 | 3 | 0.95 |" in (tmp_path / "out" / "README.md").read_text()
    program.write_text("#!/bin/sh\necho 'no CUDA device' >&2\nexit 77\n")
    done = bench(program)
    assert (done.returncode, done.stdout) == (0, "skipped: no CUDA device\n")
    done = bench(tmp_path / "missing")
    assert done.returncode == 1 and "make gpu-kernels" in done.stderr


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


def test_gpu_benchmarks_skip_where_no_gpu_is():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = programs.run(FOLDER / "gpu/bench_memory.py")
    assert (done.returncode, done.stdout) == (0, "skipped: no CUDA device\n"), done.stderr
