"""`fsdp2x compare SCRIPT`: runs a training script in two ways and names the first tensor that differs."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import replace

from fsdp2x.base.errors import ConfigError
from fsdp2x.train.commands.shared import positive

_ENGINES = ("script", "unsharded", "fsdp2", "fsdp2x", "ddp")
_DESCRIPTION = """\
Run a training script in two ways, record the tensors of some steps, and name the first one that differs by more than
rounding. The first run (a) shards as the script does. The second one (b) shards as --against says. Both have the same
ranks, seeds, and data. With --b-nproc, run b has fewer ranks, which train on the rows of all ranks of run a. The script
needs no changes.

  fsdp2x compare --against unsharded train.py --lr 1e-3
  fsdp2x compare --engine fsdp2x --against fsdp2 -m package.train
  fsdp2x compare --a 'train.py --new' --b 'train.py --old'
  fsdp2x compare --nproc 4 --b-nproc 1 train.py

Exit status: 0 if all tensors agree, 1 if one differs, 2 if a run failed."""


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "compare",
        help="name the first tensor in which two runs of a script differ",
        usage="fsdp2x compare [options] --against ENGINE (SCRIPT | -m MODULE) [ARGS ...]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--against", choices=_ENGINES, help="How run b shards. Default: as its script does.")
    command.add_argument("--engine", choices=_ENGINES, default="script", help="The same for run a.")
    command.add_argument("--a", metavar="COMMAND", help="Script and arguments of run a, in quotes.")
    command.add_argument("--b", metavar="COMMAND", help="Script and arguments of run b, in quotes.")
    command.add_argument("--nproc", type=positive, metavar="N", help="Number of ranks. Default: one per GPU, else 2.")
    command.add_argument("--b-nproc", type=positive, metavar="M", help="Number of ranks of run b. Default: the same.")
    command.add_argument(
        "--steps", type=positive, default=3, metavar="K", help="Optimizer steps to record. Default: 3."
    )
    command.add_argument(
        "--timeout", type=positive, default=600, metavar="S", help="Seconds that each run may take. Default: 600."
    )
    command.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    command.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    words = ["-m", *args.module] if args.module else args.words
    a, b = (_words(one, words) for one in (args.a, args.b))
    import torch

    from fsdp2x.compare.launch import Side, SideFailedError
    from fsdp2x.compare.report import compare_sides

    num_ranks = args.nproc or torch.accelerator.device_count() or 2
    num_ranks_of_b = args.b_nproc or num_ranks
    if num_ranks % num_ranks_of_b:
        raise ConfigError(f"fsdp2x compare: --b-nproc must divide {num_ranks}, the ranks of run a, got {args.b_nproc}.")
    sides = Side("a", args.engine, a, num_ranks), Side("b", args.against or "script", b, num_ranks_of_b)
    if replace(sides[0], label="b") == sides[1]:
        raise ConfigError("fsdp2x compare: both runs are the same. Choose --against unsharded, fsdp2, fsdp2x, or ddp.")
    try:
        agree = compare_sides(*sides, args.steps, args.timeout)
    except SideFailedError as error:
        sys.stderr.write(f"fsdp2x: error: {error}\n")
        return 2
    return 0 if agree else 1


def _words(command: str | None, words: list[str]) -> tuple[str, ...]:
    """Returns the script or `-m MODULE` of a run, and its arguments."""
    chosen = shlex.split(command) if command else words
    if command and words:
        raise ConfigError("fsdp2x compare: pass either --a and --b, or a script.")
    script = chosen[1:2] if chosen[:1] == ["-m"] else chosen[:1]
    if not script:
        raise ConfigError("fsdp2x compare: no script. Pass its path or -m MODULE, or both --a and --b.")
    if chosen[0] != "-m" and not os.path.exists(chosen[0]):
        raise ConfigError(f"fsdp2x compare: no such script: {chosen[0]}. Pass the path of a Python file or -m MODULE.")
    return tuple(chosen)
