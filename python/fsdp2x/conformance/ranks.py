"""Processes that run behaviors: one gloo group for each number of ranks, reused while nothing hangs."""

from __future__ import annotations

import importlib
import linecache
import multiprocessing
import os
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

START_TIMEOUT_S = 120.0
# A collective that waits longer fails. A behavior gets twice this time.
COLLECTIVE_TIMEOUT_S = 30.0
# After one rank has failed, the others get this long.
GRACE_S = 3.0
DIED, NO_ANSWER = "the process died", "no answer in time, or while the other ranks failed"
_PRELOAD = ["torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.optim"]
_PRELOAD += ["torch._dynamo"]  # DTensor imports it at first use, in each rank


@dataclass(frozen=True)
class Outcome:
    """What became of a behavior: ``status`` is passed, failed, or skipped, and ``reason`` one line."""

    status: str
    reason: str = ""


class Ranks:
    """``world`` processes that run behaviors of one engine. Close it at the end.

    Args:
        engine: ``module:function``.
        options: keyword arguments for each call of the function.
    """

    def __init__(self, world: int, engine: str, options: dict[str, Any] | None = None) -> None:
        self.world, self.engine, self.options = world, engine, options or {}
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, module: str, name: str, row: str) -> Outcome:
        """Runs one behavior on all ranks. The ranks are replaced afterwards if they may be out of step."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((module, name, row))
        found = self._collect(2 * COLLECTIVE_TIMEOUT_S)
        if any(outcome.status == "lost" for outcome in found) or len({outcome.status for outcome in found}) > 1:
            self.close()
        bad = [(rank, outcome) for rank, outcome in enumerate(found) if outcome.status in ("failed", "lost")]
        bad.sort(key=lambda item: _distance(item[1].reason))
        return Outcome("failed", f"rank {bad[0][0]}: {bad[0][1].reason}") if bad else found[0]

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(GRACE_S)
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOAD, self.engine.partition(":")[0]])
        self._folder = tempfile.TemporaryDirectory(prefix="fsdp2x-conformance-", ignore_cleanup_errors=True)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world, self.engine, self.options, self._folder.name, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        started = self._collect(START_TIMEOUT_S)
        if wrong := [outcome.reason for outcome in started if outcome.status != "passed"]:
            self.close()
            raise RuntimeError(f"{self.world} ranks of {self.engine} did not start. {wrong[0]}")

    def _collect(self, timeout: float) -> list[Outcome]:
        found = [Outcome("lost", NO_ANSWER)] * self.world
        deadline = time.monotonic() + timeout
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), left):
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    found[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    found[rank] = Outcome("lost", DIED)
                if found[rank].status != "passed":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return found


def _distance(reason: str) -> int:
    """Orders reasons: a rank that failed by itself, one that died, those that lost it, and those that waited for it."""
    signs = (NO_ANSWER, "closed by peer", "reset by peer", DIED)
    return next((len(signs) - index for index, sign in enumerate(signs) if sign in reason), 0)


def _serve(rank: int, world: int, engine: str, options: dict, folder: str, connection: Connection) -> None:
    """The code of a rank."""
    log = os.open(Path(folder) / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    try:
        import torch
        import torch.distributed as dist

        from fsdp2x.conformance.behavior import Context

        torch.set_num_threads(1)
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        dist.init_process_group("gloo", f"file://{folder}/store", timeout, world_size=world, rank=rank)
        module, _, function = engine.partition(":")
        places = importlib.import_module(module)
        context = Context(rank, world, places, getattr(places, function), options, Path(folder))
    except Exception as error:
        connection.send(Outcome("failed", f"{type(error).__name__}: {error}"))
        return
    connection.send(Outcome("passed"))
    while True:
        try:
            module, name, row = connection.recv()
        except EOFError:
            break
        connection.send(_run(context, module, name, row))
    dist.destroy_process_group()


def _run(context: Any, module: str, name: str, row: str) -> Outcome:
    import torch

    from fsdp2x.conformance.behavior import BEHAVIORS

    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    importlib.import_module(module)
    found = BEHAVIORS[module, name]
    try:
        found.run(context, *found.rows[row])
    except Exception as error:
        return Outcome("failed", _in_one_line(error, error.__traceback__))
    return Outcome("passed")


def _in_one_line(error: Exception, where: TracebackType | None) -> str:
    """The error with the line of the behavior that raised it."""
    text = " ".join(str(error).split())
    folder = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_tb(where) if frame.filename.startswith(folder)]
    if isinstance(error, AssertionError) and not text:
        text = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
    return f"{type(error).__name__}: {text[:300]} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
