"""Runs GPU checks in parts, what is least known first: `make gpu-test QUICK=1` and `QUICK=2` on one GPU.

    python tests/gpu/run_parts.py first     # nine minutes: what one GPU allows, memory, steps, and kernels
    python tests/gpu/run_parts.py second    # five minutes: tests
    python tests/gpu/run_parts.py eight     # half an hour of eight GPUs, `make gpu-test-8`
    python tests/gpu/run_parts.py first --dry-run    # without a GPU: tests skip, benchmarks train tiny models

Each part is a process with a timeout and a log, and none stops the next. The page is written again after each part. It
has a line for each part, and the errors of those that failed. `OUT`, where set, is a folder that also gets the page and
one archive of all logs and numbers after each part. Exits with 1 if a part has failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = {"first": 540, "second": 300, "eight": 1800}
# Lets NCCL take two ranks on one GPU, where it can (2.30).
TWO_RANKS = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float
    command: list[str]  # after the Python
    environment: dict[str, str] = field(default_factory=dict)
    needs: str = ""  # of what probe.py found out in the first call


def tests(name: str, seconds: float, *arguments: str, full: bool = False, **environment: str) -> Part:
    """Tests of this folder, which print the names of failed ones."""
    files = [str(ROOT / "tests" / "gpu" / one) if one.endswith(".py") or one == "kernels" else one for one in arguments]
    options = ["-q", "-rfE", "-p", "no:cacheprovider", "--tb=short", *(["--full"] if full else [])]
    return Part(name, seconds, ["-m", "pytest", *options, *files], environment)


def launched(num_ranks: int, *command: str) -> list[str]:
    return ["-m", "torch.distributed.run", f"--nproc_per_node={num_ranks}", "--master_port=29522", *command]


def parts_of(which: str, num_ranks: int, dry_run: bool, folder: Path) -> list[Part]:
    """Returns the parts in the order in which they run."""
    gpu = ROOT / "tests" / "gpu"
    device = ["--device", "cpu"] if dry_run else []
    few = ["--policies", "bf16"] if dry_run else []
    facts = Part("first minute", 60, [str(gpu / "first_minute.py")])
    doctor = Part("doctor", 40, ["-m", "fsdp2x", "doctor"])

    def benchmark(name: str, *arguments: str, into: str = "numbers") -> list[str]:
        keeps = ["--json", str(folder / f"{into}.json")]
        return [str(ROOT / "benchmarks" / "gpu" / f"bench_{name}.py"), *keeps, *arguments]

    if which == "first":
        large = ["--cases", "llama-8b:2048", "--policies", "fp32"]
        return [
            facts,
            doctor,
            Part("probe", 90, [str(gpu / "probe.py")]),
            Part("memory", 130, benchmark("memory", "--quick", "--kept", *device, *few)),
            Part("steps", 130, benchmark("step", "--quick", "--policies", "bf16", *device)),
            Part("simulated ranks", 100, benchmark("world", "--quick", *device)),
            *([] if dry_run else [Part("kernels", 30, benchmark("kernels"))]),
            *([] if dry_run else [Part("steps, fp32", 60, benchmark("step", "--quick", *large, into="fp32"))]),
        ]
    # One process does not keep the device or the cores busy. Memory measurements need the device alone.
    at_once = ["-n", "12"] if importlib.util.find_spec("xdist") and not dry_run else []
    measure_memory = ["test_overlap.py", "test_gpu_memory.py", "test_gpu_offload.py", "test_launch_counts.py"]
    alone = [*measure_memory, "test_shared_device.py"]
    others = sorted(one.name for one in gpu.glob("test_*.py") if one.name not in alone)
    if which == "second":
        shared = {"FSDP2X_RANKS_SHARE_GPU": "1", **TWO_RANKS}
        chosen = ("test_many_gpus.py", "-k", "stocks or captured")
        late = tests("late collectives", 120, "test_shared_device.py", full=dry_run)
        return [
            replace(late, needs="memory of another process"),
            tests("tests", 150, "kernels", *others, *at_once),
            tests("memory tests", 90, *measure_memory),
            replace(tests("two ranks", 80, *chosen, **shared), needs="two ranks on one device"),
            Part("units", 60, benchmark("units", "--quick", *device)),
        ]
    many = "test_many_gpus.py"
    cases = [] if dry_run else ["--cases", "llama-8b:2048", "llama-8b:8192"]
    moe = ["--cases", "qwen3-moe-tiny:8"] if dry_run else ["--cases", "qwen3-30b-a3b:2048", "--policies", "bf16"]
    speed = launched(num_ranks, *benchmark("step", *device, "--steps", "10", "--policies", "bf16"))
    looks_for_nan = {"TORCH_NCCL_NAN_CHECK": "1", "NCCL_DEBUG": "WARN"}
    return [
        facts,
        doctor,
        tests("parity", 240, many, "-k", "stocks", full=dry_run, **looks_for_nan),
        tests("failures", 240, many, "-k", "fails", full=dry_run),
        tests("capture", 90, many, "-k", "captured", full=dry_run),
        Part("speed", 400, [*speed, *cases]),
        Part("speed, legacy NCCL", 400, [*speed, *cases], {"TORCH_DIST_USE_NCCL2": "0"}),
        Part("experts", 240, [*launched(num_ranks, *benchmark("step", *device, "--steps", "10")), *moe]),
        tests("engines", 120, "test_handed_memory.py", "test_broadcasts.py"),
        tests(
            "engines, expandable", 120, "test_handed_memory.py", "test_step.py", "-k", "handed or sleep", **EXPANDABLE
        ),
        tests("parity, blocking", 240, many, "-k", "stocks", full=dry_run, CUDA_LAUNCH_BLOCKING="1"),
    ]


def run(part: Part, seconds: float, log: Path, probed: dict[str, str]) -> tuple[str, float]:
    """Runs a part and returns its result and seconds. A timeout ends all its processes."""
    start = time.monotonic()
    if seconds < 5:
        return "not run: the time is over", 0.0
    if part.needs and (why := probed.get(part.needs, "probe.py has not run")):
        return f"not run: no {part.needs}: {why}", 0.0
    environment = {**os.environ, "FSDP2X_OUT": str(log.parent), **part.environment}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *part.command], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
            ended = {0: "ok", 5: "no tests"}.get(code, f"FAILED, exit code {code}")
        except subprocess.TimeoutExpired:
            ended = f"FAILED, not done after {seconds:.0f} s"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    return ended, time.monotonic() - start


def summary_of(log: Path) -> str:
    """Returns a part's last line: pytest's counts, a line of the result, or why it was skipped."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\b(passed|skipped|failed|trained on|can run)\b|^\|", line)]
    return (telling or lines or ["nothing was said"])[-1][:90]


def page(which: str, ended: dict[str, tuple[str, float]], folder: Path, seconds: float) -> str:
    lines = [f"{'part':<22} {'seconds':>7}  how it ended"]
    errors = []
    for name, (how, took) in ended.items():
        log = folder / f"{name.replace(', ', '-').replace(' ', '-')}.txt"
        said = summary_of(log) if log.is_file() else ""
        lines.append(f"{name:<22} {took:>7.0f}  {how}: {said}")
        if how.startswith("FAILED") and log.is_file():
            found = [
                one for one in log.read_text(errors="replace").splitlines() if re.match(r"FAILED|ERROR|\w+Error", one)
            ]
            errors += [f"  {name}: {one[:200]}" for one in found[:6]]
    failed = [name for name, (how, _) in ended.items() if how.startswith("FAILED")]
    end = f"VERDICT of {which}: {len(ended) - len(failed)} of {len(ended)} parts ended well; {seconds:.0f} s"
    end += f"; failed: {', '.join(failed)}" if failed else ""
    return "\n".join([*lines, *(["", "errors:", *errors] if errors else []), "", end]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=[*TOTAL_S])
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: two ranks, tiny models, rehearsals")
    parser.add_argument("--ranks", type=int, help="default 8, or 2 in a dry run")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu" / "parts", help="folder of page and logs")
    chosen = parser.parse_args()
    folder = chosen.out / chosen.which
    folder.mkdir(parents=True, exist_ok=True)
    probe = chosen.out / "first" / "probe.json"
    probed = json.loads(probe.read_text()) if probe.is_file() else {}
    start, ended = time.monotonic(), {}
    for part in parts_of(chosen.which, chosen.ranks or (2 if chosen.dry_run else 8), chosen.dry_run, folder):
        left = TOTAL_S[chosen.which] - (time.monotonic() - start)
        log = folder / f"{part.name.replace(', ', '-').replace(' ', '-')}.txt"
        log.unlink(missing_ok=True)
        ended[part.name] = run(part, min(part.seconds, left), log, probed)
        print(f"{part.name}: {ended[part.name][0]}", flush=True)
        (folder / "page.txt").write_text(page(chosen.which, ended, folder, time.monotonic() - start))
        if out := os.environ.get("OUT"):
            shutil.copy2(folder / "page.txt", Path(out) / f"{chosen.which}.txt")
            shutil.make_archive(str(Path(out) / chosen.which), "gztar", folder)
    print(f"\n{(folder / 'page.txt').read_text()}(also in {folder}, with a log for each part)")
    return 1 if any(how.startswith("FAILED") for how, _ in ended.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
