"""Lets gloo's threads release their tensors before the interpreter of a process ends.

gloo's threads release the tensors of a collective some time after its waiter continued, and need the interpreter's lock
for it. If a thread asks for the lock while the interpreter ends, Python ends the thread inside a destructor, which
aborts the process ("terminate called without an active exception"). So a finished job fails with SIGABRT if its last
collective is a few milliseconds before its end (pytorch/pytorch, issues 179291 and 190489). Destroying the process
group does not help while other objects refer to it, as device meshes do.

Imports nothing of fsdp2x, so programs can load this file alone.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_GLOO_THREAD = "pt_gloo_runloop"  # torch's name for these threads
_LOOK_S = 0.001
_LIMIT_S = 5.0


def gloo_threads(tasks: Path = _TASKS) -> list[Path]:
    """Returns the folders of the threads that run gloo's collectives."""
    found = []
    for task in tasks.glob("*"):
        try:
            if (task / "comm").read_text().strip() == _GLOO_THREAD:
                found.append(task)
        except OSError:  # the thread has ended
            continue
    return found


def wait_until_idle(tasks: Path = _TASKS, limit_s: float = _LIMIT_S) -> bool:
    """Gives gloo's threads the interpreter's lock until none of them runs. Returns False if some do after ``limit_s``.

    A thread that waits for another rank does not run, and is not waited for. Nor does one that waits for the lock,
    which it gets while this thread sleeps. So all must be idle twice.
    """
    threads = gloo_threads(tasks)
    end = time.monotonic() + limit_s
    times_idle = 0
    while threads and times_idle < 2:
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_S)
        states = [state for thread in threads if (state := _state_of(thread)) is not None]
        times_idle = 0 if "R" in states else times_idle + 1
    return True


def _state_of(thread: Path) -> str | None:
    """Returns the kernel's letter for what a thread does, or None after its end."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


atexit.register(wait_until_idle)
