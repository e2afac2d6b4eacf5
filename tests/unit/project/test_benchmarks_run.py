"""Every benchmark, as short as it gets: it runs to its end, its sides agree, its result makes a table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import programs

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
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
    "bench_muon.py": ("--cases", "layers", "--steps", "1"),
    "bench_optimizer.py": ("--steps", "1"),
    "bench_score.py": ("--quick", "--steps", "1"),
    "bench_sequence.py": ("--quick", "--steps", "1"),
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
