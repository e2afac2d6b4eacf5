"""Starts the ranks of `fsdp2x train --nproc` and `fsdp2x trl` on this host, and reports the failure of a rank once."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fsdp2x.base.errors import ConfigError
from fsdp2x.train.commands.shared import mistake, unexpected, write_error_file

# Seconds that ranks have to save a checkpoint after a signal.
_SAVE_S = 300


def is_launched() -> bool:
    """Returns whether this process is a rank that another program started."""
    return {"RANK", "WORLD_SIZE"} <= set(os.environ)


def choose_ranks(nproc: int | None, on_cpu: bool, way: str) -> tuple[int, int]:
    """Returns the number of ranks, and of threads of each. ``way``: how to train on the CPU.

    Without ``nproc``, there is a rank for each GPU of this host, or two ranks on the CPU.
    """
    import torch

    num_devices = 0 if on_cpu else torch.accelerator.device_count()
    if num_devices and nproc is not None and nproc > num_devices:
        raise ConfigError(f"--nproc {nproc}: this host has {num_devices} GPU(s). Use {way} for CPU ranks.")
    world = nproc or num_devices or 2
    fair_share = 1 if num_devices else max(1, len(os.sched_getaffinity(0)) // world)
    num_threads = int(os.environ.get("OMP_NUM_THREADS") or fair_share)
    if nproc is None and not num_devices:
        sys.stderr.write(f"fsdp2x: {world} CPU ranks with {num_threads} thread(s) (--nproc, OMP_NUM_THREADS)\n")
    return world, num_threads


def run_ranks(words: Sequence[str], world: int, num_threads: int, *, finish: bool) -> int:
    """Runs `fsdp2x WORDS` as ranks of this host and returns the exit status. None of them outlives this call.

    ``finish``: ranks get Ctrl-C and SIGTERM, and end by themselves. A second Ctrl-C kills them.

    Raises:
        KeyboardInterrupt: a signal ended the ranks. Its `number` is that of the signal.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std

    from fsdp2x.ranks import local_ranks

    name, *more = words
    command = ["-m", "fsdp2x", name, "--supervisor", str(os.getpid()), *more]
    try:
        with contextlib.ExitStack() as closing:
            folder = tempfile.mkdtemp(prefix="fsdp2x-ranks-")
            closing.callback(shutil.rmtree, folder, ignore_errors=True)
            # The other ranks repeat what the first one writes to the terminal.
            logs = DefaultLogsSpecs(folder, redirects=dict.fromkeys(range(1, world), Std.ALL))
            ranks = closing.enter_context(local_ranks(f"fsdp2x {name}", command, world, num_threads, logs, _SAVE_S))
            if finish:
                closing.enter_context(_pass_on(ranks))
            return _judge(ranks.wait(period=0.1), ranks.stderrs)
    except SignalException as stop:
        raise _interrupt(f"{stop.sigval.name}: all ranks have ended.", stop.sigval) from None


def _interrupt(message: str, number: int) -> KeyboardInterrupt:
    interrupt: Any = KeyboardInterrupt(message)
    interrupt.number = number
    return interrupt


@contextlib.contextmanager
def _pass_on(ranks: Any) -> Iterator[None]:
    """Sends the first signal to the ranks, which have sessions of their own and so do not get the terminal's."""
    seen: list[int] = []

    def handle(number: int, frame: object) -> None:
        if seen and number == signal.SIGINT:
            raise _interrupt("interrupted twice: this run ended without saving", number)
        for rank in ranks.subprocess_handlers.values() if not seen else ():
            rank.proc.send_signal(number)
        seen.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        ranks.close(signal.SIGKILL)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _judge(result: Any, logs: Mapping[int, str]) -> int:
    """Reports the first failure once and returns the exit status."""
    if not result.failures:
        return 0
    from fsdp2x.ranks import first_failure, how_it_ended, last_lines

    first = first_failure(result.failures)
    if first.exitcode in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        return first.exitcode  # rank 0 has said how the run ended
    if first.error_file_data.get("is_mistake"):
        mistake(ConfigError(first.message))
        return first.exitcode
    what, text = "failed", first.message
    if "time" not in first.error_file_data:  # it could not report
        what, text = f"ended {how_it_ended(first)}", last_lines(logs, first)
    sys.stderr.write(f"fsdp2x: error: rank {first.local_rank} {what}\n{text.rstrip()}\n")
    return 1


def run_rank(work: Callable[[], object], supervisor: int | None, statuses: Mapping[type[Exception], int]) -> int:
    """Runs a rank's work and returns the exit status.

    Errors go to the supervisor, or else to standard error. Those of ``statuses`` need no traceback.
    """
    if supervisor is not None:
        from fsdp2x.ranks import follow

        if not follow(supervisor):
            return 1
    try:
        work()
        return 0
    except KeyboardInterrupt:
        if supervisor is None or os.environ["RANK"] == "0":
            raise
        return 0  # a failure would end rank 0 before it says how the run ended
    except Exception as error:
        status = next((one for kind, one in statuses.items() if isinstance(error, kind)), 1)
        is_mistake = isinstance(error, tuple(statuses)) and error.__cause__ is None
        if supervisor is None:
            (mistake if is_mistake else unexpected)(error)
        else:
            write_error_file(str(error) if is_mistake else traceback.format_exc(), is_mistake)
        return status
