"""The end of a process that used gloo: its threads let go of their tensors before the interpreter goes away.

gloo's threads drop the tensors of a collective some time after its waiter went on, and need the interpreter's lock for
it. Whoever asks for the lock of an interpreter that is going away is ended by Python inside a destructor, and that
aborts the process ("terminate called without an active exception"): a job that did all its work fails with SIGABRT when
its last collective is a few milliseconds before its end (pytorch/pytorch, issues 179291 and 190489). Ending the process
group does not help while somebody holds a reference to it, as device meshes do.

Imports nothing of fsdp2x, so that programs can load this file alone.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_GLOO_THREAD = "pt_gloo_runloop"  # the name torch gives them
_LOOK_S = 0.001
_LIMIT_S = 5.0


def gloo_threads(tasks: Path = _TASKS) -> list[Path]:
    """The folders of the threads in which collectives of gloo run."""
    found = []
    for task in tasks.glob("*"):
        try:
            if (task / "comm").read_text().strip() == _GLOO_THREAD:
                found.append(task)
        except OSError:  # has ended
            continue
    return found


def wait_until_idle(tasks: Path = _TASKS, limit_s: float = _LIMIT_S) -> bool:
    """Lets gloo's threads have the interpreter's lock until none of them runs; False if some do after ``limit_s``.

    A thread that waits for a peer does not run, and is not waited for. One that waits for the lock does not either, and
    has it while we sleep: so all must be seen idle twice.
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
    """The letter of the kernel for what a thread does; None when it has ended."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


atexit.register(wait_until_idle)
