"""A step's peak of device memory is never above stock FSDP2's, and what memory_report foretells."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "peaks.py"
# Flags behind reduced rows and pads between parameters.
SLACK_BYTES = 2**16
ACTIVATION_BYTES = 3 * 2**17  # no report counts them


def test_no_step_needs_more_than_stocks():
    """One rank and eight; embedding and head larger than blocks, tied or not, and units that are all alike."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in launcher} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    for one in json.loads(done.stdout.splitlines()[-1]):
        name, world, _ = one["case"]
        assert one["fsdp2x"] <= one["stock"] + SLACK_BYTES, one
        if world == 1:
            assert one["fsdp2x"] < one["stock"], one
        if name != "tied":  # there autograd adds two gradients up: three of them at once
            assert abs(one["fsdp2x"] - one["planned"]) <= ACTIVATION_BYTES, one
