"""The parent of the ranks: starts a pool, runs a body on all of it, watches the clock, and collects the outcomes.

Processes come from multiprocessing's fork server, which has imported torch, transformers, fsdp2x, and the tests'
helpers once. A rank costs a fork and a gloo connection. The rendezvous store lives in the parent, so it outlives every
rank.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from harness import worker
from harness.context import Body

# After the first rank has failed, the others get this long to notice. Then the parent stops them.
GRACE_S = 5.0
START_TIMEOUT_S = 90.0
# Each gloo group of a mesh has a thread that wakes up a hundred times a second for as long as its process lives.
_MAX_THREADS = 60
# A report shows this many lines from the beginning of a long log, where a crash names itself, and from its end.
_LOG_LINES = 40
# The fork server ignores modules that are not installed.
_PRELOAD = ["torch.distributed.fsdp", "torch.distributed.tensor", "torch.optim", "pytest", "harness.worker"]
_PRELOAD += ["torch._dynamo", "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"]
# Only some bodies import these, but each process that runs one would take 0.2 to 0.5 s for it.
_PRELOAD += ["hypothesis", "numpy.ma", "peft", "torch._decomp.decompositions_for_jvp"]
_PRELOAD += [
    "fsdp2x.train",
    "fsdp2x.train.trainer",
    "fsdp2x.train.selftest",
    "torch.distributed.run",
    "reference",
    "models",
    "training",
    "harness.frozen",
]
_PRELOAD += [f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "grpo")]
TESTS = str(Path(__file__).parents[1])
# Folders of the modules that tests import, for programs.
PATH = os.pathsep.join([TESTS, os.path.join(TESTS, "support")])


class DistributedTestError(AssertionError):
    """One or more ranks failed, hung or died; the message has each rank's traceback and the end of its log."""


@dataclass
class Outcome:
    """One rank's outcome of a body. `status`: ok, skip, fail, died, hung, stopped. `exit_code`: set at its end."""

    rank: int
    status: str = "running"
    value: Any = None
    log: str = ""
    exit_code: int | None = None
    num_groups: int = 0  # process groups that the rank has made, by which torch names the next one
    has_diverged: bool = False  # the ranks did different things, and have not met since

    @property
    def cause(self) -> str:
        exit_code = "" if self.exit_code is None else f" (exit code {self.exit_code})"
        return f"{self.status}{exit_code}" + (f"\n{self.value.rstrip()}" if self.status == "fail" else "")


def fork(target: Callable, arguments: tuple, name: str) -> BaseProcess:
    """A daemon process that calls `target`; the first one of the session starts the fork server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # The server reads these when it starts; the arguments of a process tell its `sys.path`.
    path = os.pathsep.join([PATH, *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path, HF_HUB_OFFLINE="1"):
        process = context.Process(target=target, args=arguments, name=name, daemon=True)
        process.start()
    return process


class RankPool:
    """`world` processes in one gloo group. A pool that `is_spent` must be closed.

    It is spent if it saw anything but success, or if its bodies left many threads.
    """

    def __init__(self, world: int):
        import torch.distributed as dist

        self.world = world
        self.broken = False
        self._idle: set[int] = set()  # ranks that wait for a message, and so can be asked to end
        # Files without a name: they go with the last process that has them open, however this one ends.
        self._logs = [tempfile.TemporaryFile(prefix="fsdp2x-rank-") for _ in range(world)]
        self._store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        self._processes, self._connections = [], []
        for rank in range(world):
            ours, theirs = multiprocessing.Pipe()
            log_path = f"/proc/{os.getpid()}/fd/{self._logs[rank].fileno()}"
            arguments = (rank, world, self._store.port, theirs, log_path, list(sys.path))
            self._processes.append(fork(worker.main, arguments, name=f"rank {rank}"))
            theirs.close()
            self._connections.append(ours)
        started = self._collect(START_TIMEOUT_S, [0] * world)
        if any(outcome.status != "ready" for outcome in started):
            self.close()
            raise DistributedTestError(report(f"{world} ranks did not start", started))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def is_spent(self) -> bool:
        return self.broken or len(os.listdir(f"/proc/{self.pids[0]}/task")) > _MAX_THREADS

    def run(
        self,
        body: Body,
        impl: str,
        options: dict,
        arguments: tuple,
        keywords: dict,
        timeout: float,
        tolerate: Collection[int] = (),
    ) -> list[Outcome]:
        """Executes the body on every rank. Outcomes are in rank order and never "running".

        A failure of a rank in `tolerate` leaves the others the whole `timeout` instead of a few seconds.
        """
        starts = [os.fstat(log.fileno()).st_size for log in self._logs]
        self._idle.clear()
        for connection in self._connections:
            connection.send((body, impl, options, arguments, keywords))
        outcomes = self._collect(timeout, starts, tolerate)
        _require_equal_num_groups(outcomes)
        self.broken = any(outcome.status not in ("ok", "skip") for outcome in outcomes)
        return outcomes

    def meet_again(self) -> None:
        """Lets ranks meet after a body in which they diverged.

        A rank may still wait in a gloo collective. If it timed out in a later body, gloo would close all connections.
        """
        self.run(Body.of(worker.meet_again), "fsdp2x", {}, (), {}, GRACE_S)

    def close(self) -> list[int | None]:
        """Ends all ranks, asking first; returns their exit codes. Nothing of the pool is left afterwards."""
        for rank in self._idle:
            try:
                self._connections[rank].send(None)
            except OSError:
                pass
        deadline = time.monotonic() + (3 if self.broken else 10)
        for rank in self._idle:
            self._processes[rank].join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(10)
        codes = [process.exitcode for process in self._processes]
        for connection in self._connections:
            connection.close()
        for log in self._logs:
            log.close()
        self._store = None
        return codes

    def _collect(self, timeout: float, log_starts: list[int], tolerate: Collection[int] = ()) -> list[Outcome]:
        outcomes = [Outcome(rank) for rank in range(self.world)]
        deadline = time.monotonic() + timeout
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        stopped_as = "hung"
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), left):
                outcome = outcomes[pending.pop(connection)]
                try:
                    outcome.status, outcome.value, outcome.num_groups, outcome.has_diverged = connection.recv()
                    self._idle.add(outcome.rank)
                except (EOFError, ConnectionResetError):
                    outcome.status = "died"
                    self._processes[outcome.rank].join(10)
                    outcome.exit_code = self._processes[outcome.rank].exitcode
                if outcome.status in ("fail", "died") and stopped_as == "hung" and outcome.rank not in tolerate:
                    stopped_as = "stopped"
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in pending.values():
            outcomes[rank].status = stopped_as
            self._dump_stacks(rank)
        failed = any(outcome.status not in ("ok", "skip", "ready") for outcome in outcomes)
        if pending:
            time.sleep(0.5)  # the stacks are written by the ranks' signal handlers
        for outcome in outcomes if failed else ():
            outcome.log = self._log_tail(outcome.rank, log_starts[outcome.rank])
        return outcomes

    def _dump_stacks(self, rank: int) -> None:
        try:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        except ProcessLookupError:
            pass

    def _log_tail(self, rank: int, start: int) -> str:
        log = self._logs[rank].fileno()
        text = os.pread(log, os.fstat(log).st_size - start, start).decode(errors="replace")
        lines = text.splitlines()
        if len(lines) > 2 * _LOG_LINES:
            lines = [*lines[:_LOG_LINES], "...", *lines[-_LOG_LINES:]]
        return "\n".join(lines)


def _require_equal_num_groups(outcomes: list[Outcome]) -> None:
    """Ranks of which only some made process groups could not meet in new ones: the next body would wait for nothing."""
    if all(outcome.status == "ok" for outcome in outcomes) and len({outcome.num_groups for outcome in outcomes}) > 1:
        for outcome in outcomes:
            outcome.status = "fail"
            outcome.value = f"has made {outcome.num_groups} process groups, unlike others: make them on all ranks alike"


def report(headline: str, outcomes: list[Outcome]) -> str:
    """The headline, each distinct cause with the ranks that share it, and each rank's log: those that died first."""
    ranks: dict[str, list[str]] = {}
    for outcome in outcomes:
        ranks.setdefault(outcome.cause, []).append(str(outcome.rank))
    lines = [headline]
    lines += [f"---- rank {', '.join(shared)}: {cause}" for cause, shared in ranks.items()]
    by_interest = sorted(outcomes, key=lambda outcome: outcome.status != "died")
    lines += [f"-- log of rank {o.rank}\n{o.log.rstrip()}" for o in by_interest if o.log.strip()]
    return "\n".join(lines)


def check(outcomes: list[Outcome], what: str) -> str | None:
    """Raises DistributedTestError unless every rank is ok (returns None) or skipped (returns the reason)."""
    statuses = {outcome.status for outcome in outcomes}
    if statuses == {"ok"}:
        return None
    if statuses == {"skip"}:
        return outcomes[0].value
    bad = [outcome for outcome in outcomes if outcome.status != "ok"]
    summary = ", ".join(f"rank {outcome.rank} {outcome.status}" for outcome in bad)
    raise DistributedTestError(report(f"{what}: {summary}", bad))
