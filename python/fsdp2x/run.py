"""``python -m fsdp2x.run script.py args``: installs fsdp2x, then runs an unchanged script or module as ``__main__``.

    torchrun --nproc_per_node=2 -m fsdp2x.run train.py --lr 1e-3
    python -m fsdp2x.run -m package.train --lr 1e-3
    torchrun --nproc_per_node=2 -m fsdp2x.run --auto-wrap train.py

--auto-wrap: if the script shards a HuggingFace model by one call for the root, split it into units.

The script gets the same ``sys.argv`` and ``sys.path[0]`` as with ``python script.py args``. Its exit status and
exceptions are those of the process. torchrun reports the first exception. Processes that it spawns (not forks) start
without fsdp2x.

Rank 0 reports on standard error what was sharded, at the first forward, or at the end that nothing was.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fsdp2x.base.failures import has_sharded
from fsdp2x.ranks import run_script

USAGE = "usage: python -m fsdp2x.run [-h] [--auto-wrap] (SCRIPT | -m MODULE) [ARGS ...]"


def main(argv: Sequence[str]) -> int:
    """Runs the script or module of ``argv`` (without the program's name). Returns 0, or 2 for a usage error."""
    words = list(argv)
    if words[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"{USAGE}\n\n{__doc__}")
        return 0
    auto_wrap = words[:1] == ["--auto-wrap"]
    words = words[1:] if auto_wrap else words
    as_module = words[:1] == ["-m"]
    if not words[as_module:] or (words[0].startswith("-") and not as_module):
        got = f"got the option {words[0]}" if words[as_module:] else "got nothing"
        sys.stderr.write(f"{USAGE}\nfsdp2x.run: a script or -m MODULE must come first, {got}.\n")
        return 2
    if not as_module and not os.path.exists(words[0]):
        sys.stderr.write(f"fsdp2x.run: no such script: {words[0]}. Pass the path of a Python file or -m MODULE.\n")
        return 2
    _install_aloud(auto_wrap)
    report = _Report()
    try:
        run_script(words)
    except SystemExit as stop:
        if stop.code in (None, 0):
            report.end()
        raise
    except Exception as error:
        if not os.path.exists(os.environ.get("TORCHELASTIC_ERROR_FILE", "")):  # the script has not written it
            with contextlib.suppress(OSError):
                get_error_handler().record_exception(error)
        raise
    report.end()
    return 0


class _Report(logging.Handler):
    """Writes the first message about a sharded model to standard error, on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = mmap.mmap(-1, 1)  # whether there was one, also in forks of this process
        roots = logging.getLogger("fsdp2x.roots")
        roots.addHandler(self)
        roots.setLevel(logging.DEBUG)
        roots.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._seen[0]:
            _say(record.getMessage())
        self._seen[0] = 1

    def end(self) -> None:
        """Says that nothing was sharded, if it was so."""
        if has_sharded() and not self._seen[0]:
            _say("fsdp2x.run: the script called fully_shard, but no forward of a sharded model ran.")
        elif not self._seen[0]:
            _say(
                "fsdp2x.run: the script never called fully_shard: nothing was sharded. Call it in the script, or ask "
                "for FSDP version 2: fsdp_version: 2 in accelerate's file, fsdp_config={'version': 2} for the Trainer. "
                "Processes that the script spawns must call fsdp2x.install() themselves."
            )


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{text}\n")


def _install_aloud(auto_wrap: bool) -> None:
    """Installs fsdp2x and reports it on standard error, because logging is not set up yet."""
    from fsdp2x import install

    logger = logging.getLogger("fsdp2x")
    handler, level = logging.StreamHandler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        install(auto_wrap=auto_wrap)
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
