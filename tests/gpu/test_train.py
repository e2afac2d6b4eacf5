"""One GPU: a run of a training file is killed, resumed bit for bit, exported, and reloaded."""

import subprocess
import sys
from pathlib import Path

import pytest

from one_gpu import needs_gpu

ROOT = Path(__file__).resolve().parents[2]


@needs_gpu
@pytest.mark.shows("steps")
def test_the_demo(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--steps", "60", "--out", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    logs = "\n".join(log.read_text()[-4000:] for log in sorted((tmp_path / "demo").glob("*.log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
