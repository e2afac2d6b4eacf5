"""Runs every benchmark one after the other and prints their tables.

    python benchmarks/run_all.py [--quick] [--results DIR]

Without --results, they go to benchmarks/results: the numbers that are committed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
MUON_FLOAT32 = ("float32", "float32-gram", "float32-stacks", "float32-stacks-gram")
# Name of the result -> script and arguments; the quick ones in place of the others.
FULL = {
    "step_cpu_2ranks": ["bench_step.py"],
    "step_cpu_4ranks": ["bench_step.py", "--world", "4"],
    "optimizer_cpu_2ranks": ["bench_optimizer.py"],
    "moments_cpu": ["bench_moments.py"],
    "muon_cpu_2ranks": ["bench_muon.py"],
    "muon_cpu_4ranks": ["bench_muon.py", "--world", "4"],
    "muon_float32_cpu_2ranks": ["bench_muon.py", "--sides", *MUON_FLOAT32],
    "host_cpu": ["bench_host.py"],
    "collectives_cpu_2ranks": ["bench_collectives.py"],
    "collectives_cpu_4ranks": ["bench_collectives.py", "--world", "4"],
    "memory_cpu_2ranks": ["bench_memory.py"],
    "export_cpu_2ranks": ["bench_export.py", "--hidden", "1024"],
    "sync_cpu_2ranks": ["bench_sync.py"],
    "sequence_cpu_2ranks": ["bench_sequence.py"],
    "wire_cpu_2ranks": ["bench_wire.py"],
    "curves_cpu_2ranks": ["bench_curves.py"],
    "moe_cpu_2ranks": ["bench_moe.py"],
    "score_cpu": ["bench_score.py"],
    "checkpoint_cpu_2ranks": ["bench_checkpoint.py"],
    "load_warm_cpu_2ranks": ["bench_load.py", "--hidden", "1024", "--layers", "48", "--repeats", "1"],
    "load_cold_cpu_2ranks": ["bench_load.py", "--hidden", "1024", "--layers", "48", "--repeats", "1", "--cold"],
}
QUICK = {
    "step_cpu_2ranks": ["bench_step.py", "--cases", "comm", "many", "--steps", "5"],
    "optimizer_cpu_2ranks": ["bench_optimizer.py", "--steps", "5"],
    "host_cpu": ["bench_host.py", "--quick"],
    "collectives_cpu_2ranks": ["bench_collectives.py", "--quick"],
    "memory_cpu_2ranks": ["bench_memory.py", "--quick"],
    "sequence_cpu_2ranks": ["bench_sequence.py", "--quick"],
    "score_cpu": ["bench_score.py", "--quick"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps and cases, in minutes")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    failed = []
    for name, (script, *options) in (QUICK if args.quick else FULL).items():
        start = time.perf_counter()
        print(f"\n== {name}", flush=True)
        command = [sys.executable, str(HERE / script), *options, "--json", str(args.results / f"{name}.json")]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
        print(f"== took {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    command = [sys.executable, str(HERE / "report.py"), "--results", str(args.results)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
