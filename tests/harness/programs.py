"""Runs `python WORDS` like a shell, but forked from the server that has imported torch: half a second, not seven.

The program has its own arguments, environment, folder, signals, and end, like a separate process. Modules that a new
interpreter would import first are already there. Programs that it starts by subprocess are also forked, such as
torchrun's ranks.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from harness.pool import TESTS, fork

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = ("-m", "torch.distributed.run")


def environment(**more: str) -> dict[str, str]:
    """Ours, without any trace of a launcher."""
    return {"OMP_NUM_THREADS": "1", **{k: v for k, v in os.environ.items() if k not in _LAUNCHER}, **more}


class Program:
    """A running program that writes to `log`, or its errors to a file of their own. `session`: in a new session."""

    def __init__(
        self, *words: object, log: Path, errors: Path | None = None, cwd: Path | None = None, env=None, session=False
    ):
        self.words, self.log = [str(word) for word in words], log
        log.touch()  # it is read even if the program ends before it begins
        self._process = fork(
            _main,
            (self.words, str(cwd or Path.cwd()), env or environment(), str(log), str(errors or log), session),
            name=" ".join(self.words),
        )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Its exit status; ends it and raises subprocess.TimeoutExpired when it takes longer."""
        self._process.join(timeout)
        if self.poll() is None:
            self.end()
            raise subprocess.TimeoutExpired(self.words, timeout, self.log.read_text())
        return self.poll()

    def end(self) -> None:
        """Not by force at first: torchrun ends its ranks."""
        if self.poll() is None:
            self._process.terminate()
            self._process.join(30)
            self._process.kill()
            self._process.join(10)


def run(*words: object, cwd: Path | None = None, env=None, timeout: float = 120) -> subprocess.CompletedProcess:
    """As subprocess.run does with `capture_output` and `text`."""
    with tempfile.TemporaryDirectory(prefix="fsdp2x-program-") as folder:
        log, errors = Path(folder) / "stdout", Path(folder) / "stderr"
        program = Program(*words, log=log, errors=errors, cwd=cwd, env=env)
        try:
            status = program.wait(timeout)
        finally:
            program.end()
        return subprocess.CompletedProcess(program.words, status, log.read_text(), errors.read_text())


def _main(words: list[str], cwd: str, env: dict[str, str], log: str, errors: str, session: bool) -> None:
    if session:
        os.setsid()
    for fd, path in ((1, log), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    os.chdir(cwd)
    _execute(words, env)


def _execute(words: list[str], env: dict[str, str]) -> None:
    """Runs the program in this process, and ends it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.current_process()._config["daemon"] = False  # a daemon could start no processes
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # the environment says where it is
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    for name in [
        name for name, module in sys.modules.items() if (getattr(module, "__file__", "") or "").startswith(TESTS)
    ]:
        del sys.modules[name]  # a program may have modules of the same names
    path = [entry for entry in sys.path if entry and not entry.startswith(TESTS)]
    sys.path[:] = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *path]
    subprocess.Popen = subprocess_handler.Popen = ForkedPopen
    status: object = 0
    try:
        _run_words(words)
    except SystemExit as end:
        status = end.code
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
        traceback.print_exc()
    except BaseException:
        status = 1
        traceback.print_exc()
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        if isinstance(status, str):
            print(status, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status if isinstance(status, int) else 0 if status is None else 1)


def _run_words(words: list[str]) -> None:
    while words[0] == "-u":
        words = words[1:]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


class ForkedPopen(subprocess.Popen):
    """Runs `python WORDS` in a fork of this process, and other programs as usual."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
        if args[0] != sys.executable:
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
        _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_, start_new_session, _ = more
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if start_new_session:
                    os.setsid()
                if cwd is not None:
                    os.chdir(cwd)
                for source, target in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2)):
                    if source != -1:
                        os.dup2(source, target)
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                    signal.signal(number, signal.SIG_DFL)
                _execute(list(map(str, args[1:])), dict(os.environ if env is None else env))
            finally:
                os._exit(1)
        self._child_created = True
        # Files that the caller passed stay open, because it closes them itself.
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
