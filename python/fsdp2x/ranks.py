"""Runs commands as the ranks of this host, for `fsdp2x train`, `fsdp2x trl`, and `fsdp2x compare`, and scripts."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes


@contextlib.contextmanager
def local_ranks(
    name: str, words: Sequence[str], world: int, num_threads: int, logs: DefaultLogsSpecs, grace_s: int
) -> Iterator[Any]:
    """Runs `python WORDS` as ``world`` ranks and yields torch's context of their processes. None outlives the block.

    At its end they get SIGTERM, and SIGKILL after ``grace_s`` seconds or at a second signal to this process.
    """
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": str(num_threads)}
    environments = {rank: shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)}
    ranks = start_processes(name, sys.executable, dict.fromkeys(range(world), tuple(words)), environments, logs)
    try:
        yield ranks
    finally:
        try:
            with contextlib.suppress(SignalException):
                ranks.close(signal.SIGTERM, timeout=grace_s)
        finally:
            ranks.close(signal.SIGKILL)


def follow(supervisor: int) -> bool:
    """Lets the kernel kill this process if the supervisor ends in any way. Returns False if it has ended."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    return os.getppid() == supervisor


def run_script(words: Sequence[str]) -> None:
    """Runs `SCRIPT ARGS` or `-m MODULE ARGS` in this process, with the `sys.argv` and `sys.path[0]` of `python`."""
    as_module = words[0] == "-m"
    sys.argv[:] = words[1:] if as_module else words
    if as_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        if not sys.flags.safe_path and not os.path.isdir(words[0]):  # a folder or archive adds itself
            sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def first_failure(failures: Mapping[int, Any]) -> Any:
    """Returns the failure that caused the others, as torch describes it."""
    # torch ends the other ranks by SIGTERM. Errors that follow from a killed rank can come before torch sees its end.
    causes = [one for one in failures.values() if one.exitcode != -signal.SIGTERM]
    return min(causes or failures.values(), key=lambda one: one.error_file_data.get("time", one.timestamp - 2))


def how_it_ended(failure: Any) -> str:
    return f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with status {failure.exitcode}"


def last_lines(logs: Mapping[int, str], failure: Any) -> str:
    """Returns what the failed rank wrote last."""
    text = Path(logs[failure.local_rank] or os.devnull).read_text(errors="replace")
    return "\n".join(text.splitlines()[-20:])
