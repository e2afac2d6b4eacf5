"""Runs the benchmarks of a GPU, the most important first, and writes a page of targets: held, missed, and not measured.

    python benchmarks/gpu/targets.py            # what `make gpu-bench` does; numbers in benchmarks/results
    python benchmarks/gpu/targets.py --quick    # the cases of the targets
    python benchmarks/gpu/targets.py --device cpu    # a dry run: tiny models on the CPU, without meaning

Each benchmark runs in its own process, so the others still run if one fails. Exits with 1 if one has failed. A missed
target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu import bench_kernels, bench_memory, bench_step, bench_units, bench_world  # noqa: E402
from gpu.gpu_results import RESULTS, Target  # noqa: E402

# The entry of the results that each writes. What is least known comes first.
BENCHMARKS = {
    "memory": bench_memory,
    "step": bench_step,
    "world": bench_world,
    "kernels": bench_kernels,
    "units": bench_units,
}


def run(name: str, arguments: list[str], timeout: float) -> tuple[list[Target], str]:
    """Returns the results for a benchmark's targets, and the reason if there are none."""
    script = Path(BENCHMARKS[name].__file__)
    with tempfile.TemporaryDirectory(prefix="fsdp2x-bench-") as folder:
        path = Path(folder) / "results.json"
        command = [sys.executable, str(script), "--json", str(path), *arguments]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout, check=False)
            output, reason = done.stdout, "" if done.returncode == 0 else f"failed, exit code {done.returncode}"
        except subprocess.TimeoutExpired as error:
            output, reason = (error.stdout or b"").decode(), f"failed: not done after {timeout:.0f} s"
        print(output, flush=True)
        if not path.is_file():
            skipped = [line for line in output.splitlines() if line.startswith("skipped: ")]
            return [], reason or (skipped[0] if skipped else "wrote no results")
        results = json.loads(path.read_text())
        if "--device" not in arguments:
            _keep(name, results["results"][name], output)
        return BENCHMARKS[name].targets_of(results["results"][name]), reason


def _keep(name: str, entry: list | dict, output: str) -> None:
    """In the file of this GPU and day; the first word of the output's first line is the GPU."""
    from gpu.gpu_results import keep, results_file

    keep(results_file(output.partition(";")[0], RESULTS), name, entry)


def page(shown: dict[str, tuple[list[Target], str]], seconds: float) -> str:
    """One line a target, and the sentence that counts them."""
    lines = [f"{'benchmark':<10} {'what':<64} {'got':>12} {'target':>12}"]
    for name, (targets, reason) in shown.items():
        for one in targets:
            lines.append(f"{name:<10} {one.what[:64]:<64} {one.got:>12} {one.wanted:>12}  {one.verdict}")
        if reason:
            lines.append(f"{name:<10} {reason}")
    every = [one for targets, _ in shown.values() for one in targets]
    held, silent = sum(one.held for one in every), [name for name, (targets, _) in shown.items() if not targets]
    end = f"VERDICT: {held} of {len(every)} targets held, {len(every) - held} missed"
    end += f"; not measured: {', '.join(silent)}" if silent else ""
    return "\n".join([*lines, "", f"{end}; {seconds:.0f} s"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases and steps")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for each benchmark")
    parser.add_argument("--page", type=Path, default=ROOT / "build" / "gpu" / "targets.txt", help="file for the page")
    chosen = parser.parse_args()
    arguments = [*(["--quick"] if chosen.quick else []), *(["--device", "cpu"] if chosen.device == "cpu" else [])]
    shown: dict[str, tuple[list[Target], str]] = {}
    start = time.monotonic()
    chosen.page.parent.mkdir(parents=True, exist_ok=True)
    for name in BENCHMARKS:
        if name == "kernels" and chosen.device == "cpu":
            shown[name] = [], "skipped: kernels need a device"
        else:
            shown[name] = run(name, [one for one in arguments if name != "kernels"], chosen.timeout)
        # Keeps the known results if the run is interrupted.
        chosen.page.write_text(page(shown, time.monotonic() - start))
    print(f"{chosen.page.read_text()}(also in {chosen.page})")
    return 1 if any(reason.startswith(("failed", "wrote")) for _, reason in shown.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
