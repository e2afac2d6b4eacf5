"""A vLLM server as the engine of ``grpo_toy.py``: how it is started, and what a rank asks it for.

Tokens go in and tokens come out (``/inference/v1/generate``), each with the label of the weights that drew it, which
``fsdp2x.sync.Vllm`` sets at each push. The server has copies of fsdp2x's files for engines on its path, and
weights of its own making until the first push. Written for vLLM 0.32.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ENGINE_FILES = ("engine.py", "engine_tcp.py", "engine_group.py", "vllm_worker.py")
READY_S, END_S = 900, 60


class VllmEngine:
    """The methods of ``fsdp2x.rollout.RolloutClient``, by requests to a server. Every rank has one."""

    def __init__(self, url: str, timeout_s: float) -> None:
        import fsdp2x

        self._url, self._timeout_s = url, timeout_s
        self._asked: threading.Thread | None = None
        self._found: list = []
        self._error = ""
        #: For ``fsdp2x.sync.connect``, with ``names="hf"``.
        self.target = fsdp2x.sync.Vllm(url)

    def ask(self, prompts: Sequence[Sequence[int]], sampling) -> None:
        """Returns at once; a thread asks, so that the server never waits for a trainer that pushes to it."""
        self._found, self._error = [], ""
        self._asked = threading.Thread(target=self._run, args=([list(p) for p in prompts], sampling), daemon=True)
        self._asked.start()

    def collect(self) -> list:
        """The answer.

        Raises:
            RolloutError: on every rank: the server refused a request of one of them, or is gone.
        """
        import torch.distributed as dist

        from fsdp2x.rollout import RolloutError

        assert self._asked is not None, "ask first"
        self._asked.join()
        errors: list = [None] * dist.get_world_size()
        dist.all_gather_object(errors, self._error)
        for rank, error in enumerate(errors):
            if error:
                raise RolloutError(f"vLLM at {self._url}, asked by rank {rank}: {error}")
        return self._found

    def sleep(self) -> None:
        """When all ranks have their answers: the engine gives its accelerator's memory back. Collective."""
        import torch.distributed as dist

        dist.barrier()
        self.target.sleep(1)

    def wake(self) -> None:
        """Before the next request, where no push has woken it. Collective."""
        import torch.distributed as dist

        self.target.wake()
        dist.barrier()

    def close(self) -> None:
        """The server is the launcher's to end."""

    def _run(self, prompts: list[list[int]], sampling) -> None:
        try:
            threads = []
            answers: list = [None] * len(prompts)
            for index, prompt in enumerate(prompts):  # at once, so that the server draws them together
                threads.append(threading.Thread(target=self._draw, args=(index, prompt, sampling, answers)))
                threads[-1].start()
            for thread in threads:
                thread.join()
            self._found = [completion for of_prompt in answers for completion in of_prompt or ()]
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"

    def _draw(self, index: int, prompt: list[int], sampling, answers: list) -> None:
        from fsdp2x.rollout import Completion

        words = {
            "n": sampling.num_samples, "max_tokens": sampling.max_tokens, "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_ids), "ignore_eos": True, "logprobs": 0, "detokenize": False,
            "seed": (sampling.seed * 4099 + index) % (1 << 31),
        }  # fmt: skip
        try:
            body = json.dumps({"model": "policy", "token_ids": prompt, "sampling_params": words}).encode()
            answer = _ask(f"{self._url}/inference/v1/generate", body, self._timeout_s)
            answers[index] = []
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
                spans = [(int(span["version"]), span["end"] - span["start"]) for span in choice["weight_versions"]]
                log_probs = [content["logprob"] for content in choice["logprobs"]["content"]]
                answers[index].append(Completion(index, choice["token_ids"], log_probs, spans, spans[0][0]))
        except Exception as error:
            self._error = self._error or f"{type(error).__name__}: {error}"


def _ask(url: str, body: bytes | None, timeout_s: float) -> dict:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return json.loads(response.read() or b"{}")
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error}: {error.read().decode(errors='replace')[:400]}") from None


# ---- the server


def copy_engine_files(path: Path) -> None:
    """What an engine's process needs of fsdp2x, for its PYTHONPATH: the folder needs nothing else of it."""
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


class VllmServer:
    """A server of this program, by the interpreter of an environment that has vLLM."""

    def __init__(self, python: str, model: Path, out: Path) -> None:
        """Starts it; ``model``: a folder with a ``config.json``. ``out``: takes its log, and its path."""
        path = out / "vllm_path"
        path.mkdir(exist_ok=True)
        copy_engine_files(path)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", out / "vllm.txt"
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "policy"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--enable-scale-out", "--skip-tokenizer-init"]
        command += ["--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--max-model-len", "32"]
        command += ["--max-num-seqs", "256", "--block-size", "32", "--logprobs-mode", "processed_logprobs"]
        command += ["--worker-extension-cls", "vllm_worker.Fsdp2xWorker"]
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment |= {"VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0)))}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(out / "vllm_cache")}
        environment |= os.environ
        environment["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
        # Sockets need a short name, and a server that is ended leaves them.
        self._sockets = tempfile.TemporaryDirectory(prefix="vllm-")
        environment["VLLM_RPC_BASE_PATH"] = self._sockets.name
        with open(self._log, "w") as log:
            # A session of its own: what it starts ends with it.
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def await_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            if self.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"grpo_toy: FAILED: vLLM does not answer:\n{self._log.read_text()[-4000:]}")
            with contextlib.suppress(OSError):
                _ask(f"{self.url}/health", None, 5)
                return
            time.sleep(0.5)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        """Ends it with all that it has started, and the shared memory that it would leave."""
        end_server(self._process)
        self._sockets.cleanup()
