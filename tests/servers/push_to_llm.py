"""A trainer that pushes into rank 0's ``vllm.LLM``, asleep and awake, and compares its answers with transformers'.

    torchrun push_to_llm.py PYTHON PATH MODEL RESULT

The ``LLM`` needs another torch than the trainer, so it runs in a separate process (``llm_process.py``) with vLLM's
``PYTHON``. The trainer calls its methods there.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import Listener
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from policy import NUM_NEW, answer_of, change, prompt_of, sharded
from transformers import AutoModelForCausalLM

import fsdp2x
from fsdp2x.sync import SyncError, Vllm

python, path, folder, result = sys.argv[1:]
rows: list[dict] = []


class DistantLLM:
    """The methods of an ``LLM`` that ``Vllm`` calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets = tempfile.TemporaryDirectory(prefix="llm-")
        address = f"{self._sockets.name}/llm"
        environment = {
            name: value for name, value in os.environ.items() if name not in TORCHRUN and "PYTHON" not in name
        }
        environment |= {
            "PYTHONPATH": path,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_CI_ENV": "1",
            "HF_HUB_OFFLINE": "1",
        }
        environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_RPC_BASE_PATH": self._sockets.name}
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))),
            "VLLM_CACHE_ROOT": f"{path}/cache",
        }
        script = Path(__file__).with_name("llm_process.py")
        with Listener(address, "AF_UNIX") as listener:
            self._process = subprocess.Popen([python, str(script), address, folder], env=environment)
            self._asked = listener.accept()
        extension = self._answer()
        parallel = SimpleNamespace(worker_extension_cls=extension)
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(parallel_config=parallel),
            is_sleeping=lambda: self.call("llm_engine.is_sleeping"),
            reset_encoder_cache=lambda: self.call("llm_engine.reset_encoder_cache"),
        )

    def _answer(self):
        ended, value = self._asked.recv()
        if not ended:
            raise RuntimeError(value)
        return value

    def call(self, name: str, *arguments):
        with self._lock:
            self._asked.send((name, arguments))
            return self._answer()

    def collective_rpc(self, method: str, timeout: float | None, args: tuple) -> list:
        return self.call("collective_rpc", method, timeout, args)

    def sleep(self, level: int) -> None:
        self.call("sleep", level)

    def wake_up(self, tags: list[str]) -> None:
        self.call("wake_up", tags)

    def reset_prefix_cache(self) -> bool:
        return self.call("reset_prefix_cache")

    def update_weight_version(self, version: str) -> None:
        self.call("update_weight_version", version)

    def close(self) -> None:
        self._asked.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._sockets.cleanup()


TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def compare(step: str) -> None:
    full = dict(fsdp2x.full_tensors(model))
    if rank == 0:
        plain.load_state_dict(full, strict=False)
        prompt = prompt_of(plain.config.vocab_size)
        expected, scores = answer_of(plain, prompt)
        tokens, found = llm.call("answer", prompt, NUM_NEW)
        apart = max(abs(a - b) for a, b in zip(scores, found, strict=True))
        rows.append({"step": step, "same": tokens == expected, "apart": apart})
    dist.barrier()


def refused(step: str, call, kind: type[Exception]) -> None:
    try:
        call()
        said = ""
    except kind as error:
        said = str(error)
    if rank == 0:
        rows.append({"step": step, "refused": said})
    dist.barrier()


dist.init_process_group("gloo")
rank = dist.get_rank()
plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
model = sharded(copy.deepcopy(plain))
llm = DistantLLM() if rank == 0 else None
try:
    dist.barrier()
    compare("start")
    target = Vllm(llm)
    with fsdp2x.sync.connect(model, target, bucket_bytes=50_000) as sync:
        for level in (0, 1, 2):
            if level:
                target.sleep(level)
                if rank == 0:
                    assert llm.llm_engine.is_sleeping()
            if level == 2 and rank == 0:
                refused_wake = ""
                try:
                    target.wake()
                except RuntimeError as error:
                    refused_wake = str(error)
                rows.append({"step": "wake after level 2", "refused": refused_wake})
            change(model, 40 + level)
            sync.push(version=level)
            compare(f"out of sleep {level}" if level else "pushed")
        target.sleep(1)
        target.wake()
        dist.barrier()
        compare("woken without a push")
    with fsdp2x.sync.connect(model, Vllm(llm), params=lambda name, param: "layers.1." not in name) as sync:
        refused("left out", lambda: sync.push(version="never"), SyncError)
    with fsdp2x.sync.connect(model, Vllm(llm)) as sync:
        sync.push(version="whole")
        compare("after what was left out")
finally:
    if llm is not None:
        llm.close()
if rank == 0:
    with open(result, "w") as file:
        json.dump(rows, file, indent=1)
dist.barrier()
dist.destroy_process_group()
