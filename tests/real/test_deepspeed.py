"""DeepSpeed: ZeRO-3 is a peer that computes what the others do."""

import os
import subprocess
from pathlib import Path

from environments import python_with

ROOT = Path(__file__).resolve().parents[2]


def run(*words: object, **more: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **more}
    command = [python_with("deepspeed"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_zero_3_is_measured_beside_the_others(tmp_path):
    """There is no row unless its losses are those of stock FSDP2."""
    bench = ROOT / "benchmarks" / "bench_step.py"
    run(bench, "--cases", "many", "--steps", "2", "--json", tmp_path / "step.json", TORCH_EXTENSIONS_DIR=str(tmp_path))
    text = (tmp_path / "step.json").read_text()
    assert '"zero3"' in text
