"""The kernels on a device, by the bodies that test their twins on the CPU."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = Path(os.environ.get("FSDP2X_GPU_BUILD", ROOT / "build" / "gpu")) / "tests" / "cpp"
NAMES = ("device_copies", "device_optimizer", "device_peers", "device_reduce")


def run(name: str, timeout: float, *wrapper: str) -> None:
    path = PROGRAMS / name
    if not path.is_file():
        pytest.skip(f"{path} is not built: run `make gpu-kernels` where nvcc is")
    result = subprocess.run([*wrapper, str(path)], capture_output=True, text=True, timeout=timeout)
    without_device = re.search(r"no CUDA device.*", result.stdout)
    if without_device:
        pytest.skip(without_device[0])
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "[  PASSED  ]" in result.stdout


@pytest.mark.parametrize("name", NAMES)
def test_kernels_on_the_device(name):
    run(name, 300)


@pytest.mark.full
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("name", ["device_copies", "device_optimizer", "device_reduce"])
def test_compute_sanitizer_finds_nothing(name, tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    run(name, 1800, sanitizer, f"--tool={tool}", "--error-exitcode=9")
