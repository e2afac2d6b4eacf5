"""The command line `fsdp2x COMMAND ...`. Each command is a module of `train/commands`."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from fsdp2x.base.errors import CheckpointError, ConfigError
from fsdp2x.train.commands import compare, config, convert, doctor, plan, selftest, train, trl
from fsdp2x.train.commands.shared import mistake, unexpected

COMMANDS = (train, trl, config, plan, convert, compare, selftest, doctor)
EXAMPLES = """\
examples:
  fsdp2x train run.yaml --nproc auto                      train on all GPUs of this host, or on two CPU ranks
  fsdp2x train run.yaml optimizer.lr=1e-4 --resume_from out/run
  fsdp2x trl sft --config sft.yaml                        train on conversations with TRL, on all devices
  fsdp2x config explain run.yaml --world-size 8           show what it means, without running anything
  fsdp2x config translate old.yaml > run.yaml             translate the config of another trainer
  fsdp2x plan config.json --world-size 32 --memory 80GiB  predict whether it fits
  fsdp2x export out/run folder                            write a checkpoint for from_pretrained
  fsdp2x compare --against unsharded train.py             name the first tensor that sharding changes
  fsdp2x doctor                                           show what this machine would use, and why

`fsdp2x COMMAND --help` lists the options of a command."""


class _Parser(argparse.ArgumentParser):
    """Accepts options with underscores in place of dashes, as torchrun does, also in subcommands.

    Its errors are one line, and name what is nearest to a misspelled word.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.set_defaults(parser=self)  # the innermost one is in the arguments

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message)
        word = re.match(r"unrecognized arguments: ([^\s=]+)", message)
        known: list[str] = []
        if choice:
            known = [one.strip("'") for one in choice[2].split(", ")]
        elif word and "." in word[1]:
            message += f". Write settings without dashes: {word[1].lstrip('-')}=VALUE"
        elif word:
            known = [option.replace("_", "-") for option in re.findall(r"--\w[\w-]*", self.format_help())]
        wrong = choice[1] if choice else word[1].replace("_", "-") if word else ""
        near = difflib.get_close_matches(wrong, known, n=1)
        hint = f". Did you mean {near[0]}?" if near else "."
        self.exit(2, f"fsdp2x: error: {message}{hint} See {self.prog} --help.\n")

    def add_argument(self, *names: str, **more: Any) -> argparse.Action:
        if more.get("nargs") == "*":
            more.setdefault("default", [])  # without one, argparse calls it required
        both = [spelt for name in names for spelt in (name, "--" + name[2:].replace("-", "_")) if name[:2] == "--"]
        return super().add_argument(*(dict.fromkeys([*names, *both])), **more)


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of all commands."""
    parser = _Parser(
        prog="fsdp2x",
        description="Sharded training of HuggingFace models.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fsdp2x {version('fsdp2x')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 done, 1 failed, 2 a mistake in the arguments.

    As in a shell, it is 130 after Ctrl-C, 143 after SIGTERM, and 141 if the output is closed.
    """
    parser = make_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return 2
    args, rest = parser.parse_known_args(argv)
    # argparse does not continue a list after an option: `train c.yaml a=1 --resume_from p b=2`.
    if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    rank = os.environ.get("RANK")
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s " + (f"[rank {rank}] " if rank else "") + "%(message)s",
        datefmt="%H:%M:%S",
    )
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except (ConfigError, CheckpointError, FileExistsError) as error:
        return mistake(error)
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"fsdp2x: {str(stop) or 'interrupted'}\n")
        return 128 + getattr(stop, "number", signal.SIGINT)
    except BrokenPipeError:
        # The rest of the buffer cannot be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        return unexpected(error)
