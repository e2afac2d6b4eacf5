"""An environment for each package under test, with its pinned requirements and the project's packages.

``make test-real`` keeps them in ``build/real``, and makes them again when their requirements change. If a package
cannot be installed, its tests are skipped with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from statistics import median, quantiles

import pytest

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "build" / "real"
ENGINES = ("stock", "shm", "process_group")
# A line for each comparison, in the order they ran.
SPEEDS: list[str] = []
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
    command = [*map(str, words), str(HERE / "requirements" / f"{package}.txt")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{package} cannot be installed here: no end after 15 minutes")
    if done.returncode != 0:
        pytest.skip(f"{package} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    record.write_text(wanted)
    return str(python)


def results_of(
    package: str, script: str, engine: str, folder: Path, *words: str, ranks: int = 2, torchrun: bool = True
) -> list[dict]:
    """Runs ``scripts/<script>.py`` and returns the JSON that each rank writes to the path in its first argument.

    Args:
        engine: ``"stock"`` runs the script as it is. A transport runs it through ``fsdp2x.run`` over that transport.
        words: further arguments.
        torchrun: False for a script that starts its ranks itself, and installs fsdp2x in them if FSDP2X_TRANSPORT is
            set.
    """
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"] if torchrun else []
    install = ["-m", "fsdp2x.run"] if torchrun and engine != "stock" else []
    command = [python_with(package), *launch, *install, str(HERE / "scripts" / f"{script}.py")]
    command += [str(folder / f"{engine}.json"), *words]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {} if engine == "stock" else {"FSDP2X_TRANSPORT": engine}
    # Sockets need a short path. The folder's end also removes files that packages leave, such as verl's locks.
    with tempfile.TemporaryDirectory(prefix="real-", ignore_cleanup_errors=True) as scratch:
        with subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, "TMPDIR": scratch},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=600)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)  # not kill: torchrun ends its ranks first
                raise
    assert process.returncode == 0, output[-6000:]
    return [json.loads((folder / f"{engine}.json.{rank}").read_text()) for rank in range(ranks)]


def same_as_stock(
    package: str, script: str, folder: Path, *words: str, ranks: int = 2, torchrun: bool = True
) -> dict[str, list[dict]]:
    """Runs ``script`` on stock and over both transports; all that its ranks write must be equal, bit for bit.

    FSDP2X_REAL_ROUNDS runs of each, in turn (1 by default), tell how fast steps are: in SPEEDS, for the summary.
    """
    rounds, num_rounds = [], int(os.environ.get("FSDP2X_REAL_ROUNDS", "1"))
    for i in range(num_rounds):
        place = folder / f"round{i}"
        place.mkdir()
        rounds.append(
            {name: results_of(package, script, name, place, *words, ranks=ranks, torchrun=torchrun) for name in ENGINES}
        )
    for found in rounds:
        for engine in ENGINES[1:]:
            # Only a run of ours has our classes: that it was ours is part of the result.
            assert all(rank["is_ours"] for rank in found[engine]), f"{engine}: the model is not sharded by fsdp2x"
            for part in ("values", "units"):
                assert [rank[part] for rank in found[engine]] == [rank[part] for rank in found["stock"]], engine
        assert not any(rank["is_ours"] for rank in found["stock"])
    _note_speed(" ".join([script, *words]), ranks, rounds)
    return rounds[0]


def same_with_example(package: str, script: str, folder: Path, *words: str, without: str | None = None) -> None:
    """The package on our engine, then with the example of ``examples/integrations`` that its script knows.

    Args:
        without: the word in place of ``example`` for a run without it; None for no word.
    """
    ways = {"shm": [without] if without else [], "example": ["example"]}
    rounds = []
    for i in range(int(os.environ.get("FSDP2X_REAL_ROUNDS", "1"))):
        found = {}
        for name, way in ways.items():
            place = folder / f"{name}{i}"
            place.mkdir()
            found[name] = results_of(package, script, "shm", place, *way, *words)
        assert [rank["values"] for rank in found["example"]] == [rank["values"] for rank in found["shm"]]
        rounds.append(found)
    _note_speed(" ".join([script, "with its example", *words]), 2, rounds, "shm")


def _note_speed(what: str, ranks: int, rounds: list[dict[str, list[dict]]], base: str = "stock") -> None:
    """Notes the median and the middle half of the ratios of step times, without the first two steps."""
    steps = {name: [each for found in rounds for each in found[name][0]["seconds"][1:]] for name in rounds[0]}
    row = f"{what}: {ranks} ranks, {len(rounds[0][base][0]['values'])} numbers equal"
    row += f", a step of {base} {1e3 * median(steps[base]):.0f} ms" if steps[base] else ""
    for name in [name for name in steps if name != base]:
        ratios = [a / b for a, b in zip(steps[base], steps[name], strict=False)]
        if len(ratios) < 2:  # so few steps do not show the speed
            continue
        first, middle, last = quantiles(ratios)
        row += f", {name} {middle:.2f}x ({first:.2f} to {last:.2f})"
    SPEEDS.append(row)
