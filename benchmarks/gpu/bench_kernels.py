"""The kernels' bandwidth against a device-to-device copy of as many bytes; needs a GPU and `make gpu-kernels`.

    python benchmarks/gpu/bench_kernels.py            # a table, and benchmarks/results/<gpu>-<date>.json
    python benchmarks/gpu/bench_kernels.py --json FILE

The file is shared by the GPU benchmarks of one day: this one writes the entry "kernels" of its results.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import harness  # noqa: E402

NO_DEVICE = 77
TARGET = 0.85  # share of the copy's bandwidth that a kernel is expected to reach


def results_file(device: str, directory: Path) -> Path:
    """`<gpu>-<date>.json`, the GPU's name in lower case with dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return directory / f"{name}-{datetime.date.today().isoformat()}.json"


def keep(path: Path, entry: str, value: list | dict) -> None:
    """Writes `value` as `entry` of the results in `path`; other entries of it stay."""
    results = json.loads(path.read_text())["results"] if path.is_file() else {}
    harness.save(path, "gpu", {**results, entry: value})


def rows_of(results: dict) -> list[list[str]]:
    """The table; a kernel below `TARGET` is marked."""
    rows = [["kernel", "MB", "ms", "GB/s", "share of a copy"]]
    for row in results["kernels"]:
        mark = "" if row["share_of_copy"] >= TARGET else " (low)"
        numbers = [f"{row['bytes'] / 1e6:.0f}", f"{row['ms']:.3f}", f"{row['gb_per_s']:.0f}"]
        rows.append([row["kernel"], *numbers, f"{row['share_of_copy']:.2f}{mark}"])
    return rows


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
    path = arguments.json or results_file(report["device"], ROOT / "benchmarks" / "results")
    keep(path, "kernels", report["rows"])
    print(f"{report['device']}; kept in {path}\n\n{harness.table(rows_of({'kernels': report['rows']}))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
