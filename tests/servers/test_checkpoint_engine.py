"""Pushes into checkpoint-engine's own worker function: bit for bit, after a bucket that its loader refuses, too."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "build" / "checkpoint_engine"


def python_with_package() -> str:
    """An environment with the package beside the project's own ones."""
    wanted = (HERE / "checkpoint_engine.txt").read_text()
    python, record = FOLDER / "bin" / "python", FOLDER / "requirements.txt"
    if record.exists() and record.read_text() == wanted:
        return str(python)
    venv.create(FOLDER, with_pip=False, clear=True)
    inner = FOLDER / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    inner.joinpath("shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *wanted.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        pytest.skip(f"{wanted.strip()} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    record.write_text(wanted)
    return str(python)


def test_pushes_into_its_worker(tmp_path, capsys):
    result = tmp_path / "found.json"
    command = [python_with_package(), "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += [str(HERE / "push_to_checkpoint_engine.py"), str(result)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=480)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # not kill: torchrun ends its ranks first
            raise
    assert process.returncode == 0, output[-6000:]
    found = json.loads(result.read_text())
    with capsys.disabled():
        print(f"\n{(HERE / 'checkpoint_engine.txt').read_text().strip()}: {found}")
    refused = found["pushes"].pop("2")
    assert refused["phase"] == "load" and refused["rank"] == 1 and "up_proj" in refused["reason"]
    assert all(push["same"] == [True, True] and push["buckets"] > 3 for push in found["pushes"].values())
    # Both workers were told to give up: that of the other rank, too.
    assert [len(said) for said in found["workers"]] == [1, 1]
    assert all("rank 1 in phase 'load'" in said[0] for said in found["workers"])
