"""Faults planted in the schedule of the engine are found by the programs of ``tests/cpp/schedule``."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "cpp/schedule/mutants.py"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_each_planted_fault_is_found():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
