"""Sets up this process for a run: its process group and device, determinism, and Ctrl-C."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fsdp2x.base.failures import ConfigError, LostRanks

logger = logging.getLogger(__name__)


@dataclass
class World:
    """This process's place. `close()` ends the process group if `open_world` began it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    lost_ranks: LostRanks
    owns_group: bool

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def close(self) -> None:
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()
            self.owns_group = False


def choose_device(wanted: str, local_rank: int, local_size: int) -> tuple[torch.device, str]:
    """Returns device and backend: NCCL if each rank of this host has its own GPU, else gloo.

    Raises:
        ConfigError: a GPU is requested, but there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("parallel.device (--device): got 'cuda', but this torch sees no GPU; choose cpu")
    num_gpus = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if num_gpus == 0:
        return torch.device("cpu"), "gloo"
    device = torch.device("cuda", local_rank % num_gpus)
    return device, "cpu:gloo,cuda:nccl" if local_size <= num_gpus and dist.is_nccl_available() else "gloo"


def open_world(device: str, timeout_s: float) -> World:
    """Joins torchrun's ranks, uses an initialized group, or makes a group of one process without any environment."""
    timeout = datetime.timedelta(seconds=timeout_s)
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    local_rank = int(os.environ.get("LOCAL_RANK", 0)) if launched or dist.is_initialized() else 0
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1))) if launched else 1
    if dist.is_initialized() and not launched:
        local_size = dist.get_world_size()
    chosen, backend = choose_device(device, local_rank, local_size)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    owns_group = not dist.is_initialized()
    if owns_group and launched:
        dist.init_process_group(backend, timeout=timeout)
    elif owns_group:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    lost_ranks = LostRanks()
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=local_rank,
        local_size=local_size,
        device=chosen,
        backend=dist.get_backend(),
        lost_ranks=lost_ranks,
        owns_group=owns_group,
    )


def idle_gpus(world: World) -> str:
    """Returns a sentence if GPUs of this host are in no rank, else an empty text."""
    num_gpus = torch.cuda.device_count() if world.device.type == "cuda" else 0
    if world.local_size >= num_gpus:
        return ""
    return (
        f"{world.local_size} of this host's {num_gpus} GPUs are in use; for all of them run fsdp2x train with "
        "--nproc auto"
    )


def explain_emulation(dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns a warning for a half precision that this CPU emulates without vector instructions, and slowly.

    The rule is oneDNN's: https://uxlfoundation.github.io/oneDNN/dev_guide_data_types.html
    """
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    if dtype not in supported or supported[dtype]():
        return None
    name = str(dtype).removeprefix("torch.")
    return (
        f"this CPU has no fast {name} arithmetic: matrix products can take 10 times as long as in float32. "
        "Set parallel.param_dtype=float32 and model.dtype=float32."
    )


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Allows only deterministic kernels inside the block. An operation without one raises.

    Shared memory always adds in rank order. NCCL must use one algorithm, for which it reads the environment when its
    first group is made, so enter the block before the process group begins.
    """
    if not enabled:
        yield
        return
    wanted = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        for name in added:
            os.environ.pop(name, None)


def mean_over_ranks(value_sum: float, weight: float, device: torch.device) -> float:
    """Returns sum(value_sum) / sum(weight) over all ranks, in double precision and rank order."""
    total, weights = sums_over_ranks([value_sum, weight], device)
    return total / weights


def any_rank(flag: bool, device: torch.device) -> bool:
    """Returns whether any rank sets the flag, the same on every rank. Collective."""
    return sums_over_ranks([float(flag)], device)[0] > 0


def sums_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Returns each value's sum, in double precision and rank order."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


# ---- Ctrl-C, and SIGTERM of a scheduler: the run ends with a checkpoint; a second Ctrl-C ends it at once

# torchrun also gets the terminal's signal, and passes it to its ranks, which already have it.
_ECHO_S = 2.0


class Interrupted(KeyboardInterrupt):
    """Raised when a signal ended the run. `number` is that of the signal."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number


class Interrupt:
    """Records SIGINT and SIGTERM inside the block instead of acting. Works only in the main thread."""

    def __init__(self, says: bool) -> None:
        self.number = 0  # of the first signal
        self._says = says
        self._since = 0.0
        self._before: dict[int, Any] = {}

    @property
    def noted(self) -> bool:
        return self.number != 0

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.noted:
            # A scheduler that wants to end it at once sends SIGKILL.
            if number == signal.SIGTERM or "TORCHELASTIC_RUN_ID" in os.environ and now - self._since < _ECHO_S:
                return
            raise Interrupted("interrupted twice: this run ends without saving")
        self.number, self._since = number, now
        if self._says:
            name = b"Ctrl-C" if number == signal.SIGINT else b"SIGTERM"
            # Not through logging, whose lock the interrupted code may hold.
            os.write(2, b"\nfsdp2x: " + name + b" received: stopping after what runs now. Press Ctrl-C again to quit")
            os.write(2, b" without saving.\n")
