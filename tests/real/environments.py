"""An environment for each package under test: its pinned requirements beside the packages of the project.

``make test-real`` keeps them in ``build/real``; they are made again when their requirements change. Where a package
cannot be had the tests of it are skipped, with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "build" / "real"
ENGINES = ("stock", "shm", "process_group")
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def python_with(package: str) -> str:
    """The interpreter of the environment of ``requirements/<package>.txt``."""
    wanted = (HERE / "requirements" / f"{package}.txt").read_text()
    folder = FOLDER / package
    python, record = folder / "bin" / "python", folder / "requirements.txt"
    if record.exists() and record.read_text() == wanted:
        return str(python)
    venv.create(folder, with_pip=False, clear=True)
    inner = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    shared = sysconfig.get_path("purelib")
    inner.joinpath("shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    # Without dependencies: torch, transformers and accelerate are the project's, whatever a package would like.
    words = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "-r"]
    done = subprocess.run(
        [*map(str, words), str(HERE / "requirements" / f"{package}.txt")], capture_output=True, text=True, timeout=280
    )
    if done.returncode != 0:
        pytest.skip(f"{package} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    record.write_text(wanted)
    return str(python)


def results_of(package: str, script: str, engine: str, folder: Path, *words: str, ranks: int = 2) -> list:
    """What each rank of ``scripts/<script>.py`` writes as JSON to the path that is its first argument.

    Args:
        engine: ``"stock"`` runs the script as it is, a transport runs it through ``fsdp2x.run`` over that transport.
        words: further arguments.
    """
    command = [python_with(package), "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    command += [] if engine == "stock" else ["-m", "fsdp2x.run"]
    command += [str(HERE / "scripts" / f"{script}.py"), str(folder / f"{engine}.json"), *words]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {} if engine == "stock" else {"FSDP2X_TRANSPORT": engine}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # not kill: torchrun ends its ranks first
            raise
    assert process.returncode == 0, output[-6000:]
    return [json.loads((folder / f"{engine}.json.{rank}").read_text()) for rank in range(ranks)]


def same_as_stock(package: str, script: str, folder: Path, *words: str, ranks: int = 2) -> dict:
    """Runs ``script`` on stock and over both transports; all that its ranks write must be equal, bit for bit."""
    found = {engine: results_of(package, script, engine, folder, *words, ranks=ranks) for engine in ENGINES}
    for engine in ENGINES[1:]:
        # Only a run of ours has our classes: that it was ours is part of the result.
        assert all(rank["is_ours"] for rank in found[engine]), f"{engine}: the model is not sharded by fsdp2x"
        assert [rank["values"] for rank in found[engine]] == [rank["values"] for rank in found["stock"]], engine
    assert not any(rank["is_ours"] for rank in found["stock"])
    return found
