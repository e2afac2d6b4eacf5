"""The kernels on a device, with the bodies that test the reference kernels on the CPU."""

import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernel_programs import kernel_programs
from one_gpu import needs_kernels

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = Path(os.environ.get("FSDP2X_GPU_BUILD", ROOT / "build" / "gpu")) / "tests" / "cpp"
NAMES = kernel_programs("device")
# Load kernels before any stream waits for another one.
TOGETHER = {"CUDA_MODULE_LOADING": "EAGER"}


def run(name: str, timeout: float, *wrapper: str) -> subprocess.CompletedProcess:
    """Runs a program, under `wrapper` if there is one; skips without the program or a device."""
    path = PROGRAMS / name
    if not path.is_file():
        pytest.skip(f"{path} is not built: run `make gpu-kernels` where nvcc and GoogleTest are")
    environment = {**os.environ, **TOGETHER}
    result = subprocess.run([*wrapper, str(path)], capture_output=True, text=True, timeout=timeout, env=environment)
    without_device = re.search(r"no CUDA device.*", result.stdout)
    if without_device:
        pytest.skip(without_device[0])
    return result


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.shows("kernels")
def test_kernels_on_the_device(name):
    result = run(name, 280)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "[  PASSED  ]" in result.stdout


def sanitizer() -> str:
    """compute-sanitizer of a CUDA toolkit, or of the package nvidia-cuda-sanitizer-api."""
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    for folder in site.getsitepackages():
        packaged = sorted(Path(folder).glob("nvidia/cu*/bin/compute-sanitizer"))
        found = found or (str(packaged[-1]) if packaged else None)
    if found is None:
        pytest.skip("compute-sanitizer is not installed: it comes with CUDA, or pip install nvidia-cuda-sanitizer-api")
    return found


def checked(result: subprocess.CompletedProcess) -> None:
    """Fails if the sanitizer found something. Skips if it cannot run on this machine."""
    output = result.stdout + result.stderr
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer says: Device not supported")
    assert result.returncode == 0, output[-6000:]
    assert "ERROR SUMMARY: 0 errors" in output or "RACECHECK SUMMARY: 0 hazards" in output, output[-2000:]


@pytest.mark.full
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.shows("sanitizer")
def test_compute_sanitizer_finds_nothing(name, tool):
    checked(run(name, 280, sanitizer(), f"--tool={tool}", "--error-exitcode=9"))


@pytest.mark.full
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.shows("sanitizer")
def test_compute_sanitizer_finds_nothing_in_training_steps(tool):
    """Checks the kernels with the engine's plans of a model, without torch's own kernels."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and finds none")
    needs_kernels()
    command = [sanitizer(), f"--tool={tool}", "--error-exitcode=9", "--kernel-name", "kns=fsdp2x"]
    script = str(Path(__file__).with_name("train_steps.py"))
    checked(subprocess.run([*command, sys.executable, script], capture_output=True, text=True, timeout=280))
