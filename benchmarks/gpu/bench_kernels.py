"""Measures the kernels' bandwidth against a device-to-device copy of as many bytes. Needs a GPU and `make gpu-kernels`.

    python benchmarks/gpu/bench_kernels.py            # a table, and benchmarks/results/<gpu>-<date>.json
    python benchmarks/gpu/bench_kernels.py --json FILE

The GPU benchmarks of one day share the file. This one writes the entry "kernels" of its results.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import harness  # noqa: E402
from gpu.gpu_results import RESULTS, Target, keep, results_file  # noqa: E402

NO_DEVICE = 77
TARGET = 0.85  # share of the copy's bandwidth that a kernel is expected to reach


def rows_of(results: list[dict]) -> list[list[str]]:
    """The table; a kernel below `TARGET` is marked."""
    rows = [["kernel", "MB", "ms", "GB/s", "share of a copy"]]
    for row in results:
        mark = "" if row["share_of_copy"] >= TARGET else " (low)"
        numbers = [f"{row['bytes'] / 1e6:.0f}", f"{row['ms']:.3f}", f"{row['gb_per_s']:.0f}"]
        rows.append([row["kernel"], *numbers, f"{row['share_of_copy']:.2f}{mark}"])
    return rows


def targets_of(results: list[dict]) -> list[Target]:
    """A line for each kernel."""
    return [
        Target(row["kernel"], f"{row['share_of_copy']:.2f}", f"{TARGET:.2f}", row["share_of_copy"] >= TARGET)
        for row in results
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Bandwidth of the CUDA kernels against a device copy.")
    parser.add_argument("--program", type=Path, default=ROOT / "build" / "gpu" / "tests" / "cpp" / "bench_kernels")
    parser.add_argument(
        "--json", type=Path, help="file for the numbers; benchmarks/results/<gpu>-<date>.json if absent"
    )
    arguments = parser.parse_args()
    if not arguments.program.is_file():
        print(f"{arguments.program} is not built: run `make gpu-kernels` where nvcc is", file=sys.stderr)
        return 1
    result = subprocess.run([str(arguments.program)], capture_output=True, text=True, timeout=1200)
    if result.returncode == NO_DEVICE:
        print(f"skipped: {result.stderr.strip()}")
        return 0
    if result.returncode != 0:
        print(result.stderr, file=sys.stderr)
        return 1
    report = json.loads(result.stdout)
    path = arguments.json or results_file(report["device"], RESULTS)
    keep(path, "kernels", report["rows"])
    print(f"{report['device']}; kept in {path}\n\n{harness.table(rows_of(report['rows']))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
