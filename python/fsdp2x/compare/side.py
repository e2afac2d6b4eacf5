"""``python -m fsdp2x.compare.side REQUEST (SCRIPT | -m MODULE) [ARGS ...]``: a rank that records a script."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fsdp2x.compare.engines import ENGINES
from fsdp2x.compare.joining import Joined, Source
from fsdp2x.compare.recorder import Recorder, StepsDone
from fsdp2x.compare.trace import Key
from fsdp2x.ranks import follow, run_script


@dataclass(frozen=True)
class Request:
    """What the ranks of a run do, as JSON. They write to ``folder``. ``supervisor``: the process that started them.

    ``num_parts``: how many ranks of run a each process of run b stands for. If there are several, ``source`` is the
    folder of run a for run b, and "" for run a.
    """

    engine: str
    folder: str
    num_steps: int
    supervisor: int
    noise_seed: int | None = None
    keep: tuple[Key, ...] = ()
    num_parts: int = 1
    source: str = ""

    @classmethod
    def parse(cls, text: str) -> Request:
        said = json.loads(text)
        return cls(**said | {"keep": tuple(Key(*key) for key in said["keep"])})


def main(argv: Sequence[str]) -> int:
    """Runs the script under a recorder and writes its trace. Exceptions go to the launcher."""
    request, words = Request.parse(argv[0]), list(argv[1:])
    if not follow(request.supervisor):
        return 1
    random.seed(0)
    torch.manual_seed(0)
    rank, rows = int(os.environ["RANK"]), None
    if request.num_parts > 1:
        rows = Joined(rank, request.num_parts, Path(request.source)) if request.source else Source(rank)
    engine = ENGINES[request.engine]()
    recorder = Recorder(
        engine, num_steps=request.num_steps, noise_seed=request.noise_seed, keep=request.keep, rows=rows
    )
    try:
        with recorder, contextlib.suppress(StepsDone):
            run_script(words)
    except (Exception, SystemExit) as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            with contextlib.suppress(OSError):
                get_error_handler().record_exception(error)
            raise
    if rows is not None:
        rows.save(Path(request.folder))
    recorder.finish().save(Path(request.folder, f"trace-{rank}.pt"))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
