"""The command line: `fsdp2x COMMAND ...`; each command is a module of `fsdp2x.commands`."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence

from fsdp2x.commands import config, convert, export, plan, selftest, train

COMMANDS = (train, export, convert, config, plan, selftest)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 done, 1 failed, 2 a mistake in what was asked for."""
    parser = argparse.ArgumentParser(prog="fsdp2x", description="Sharded training of HuggingFace models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    args, rest = parser.parse_known_args(argv)
    # argparse does not take up a list again after an option: `train c.yaml a=1 --resume_from p b=2`.
    if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    rank = os.environ.get("RANK")
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s " + (f"[rank {rank}] " if rank else "") + "%(message)s",
        datefmt="%H:%M:%S",
    )
    return args.run(args)
