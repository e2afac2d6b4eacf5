"""The command line: `fsdp2x train` and `fsdp2x export`; parses, calls, and turns mistakes into one sentence."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 done, 1 failed, 2 a mistake in what was asked for."""
    parser = argparse.ArgumentParser(prog="fsdp2x", description="Sharded training of HuggingFace models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_export(commands)
    args, rest = parser.parse_known_args(argv)
    # argparse does not take up a list again after an option: `train c.yaml a=1 --resume_from p b=2`.
    if rest and (args.command != "train" or any(word.startswith("-") for word in rest)):
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


def _add_train(commands) -> None:
    command = commands.add_parser(
        "train",
        help="train a model",
        description="Train as a YAML file says; under torchrun on all its ranks, else in this process alone.",
    )
    command.add_argument("config", metavar="CONFIG.yaml")
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace the file's: train.steps=100"
    )
    command.add_argument(
        "--resume_from", "--resume-from", metavar="PATH", help="a checkpoint, or a folder of them whose latest is taken"
    )
    command.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    from .checkpoint import CheckpointError
    from .train import ConfigError, load_config, train

    try:
        config = load_config(args.config, args.overrides, resume_from=args.resume_from)
        train(config)
    except (ConfigError, CheckpointError) as error:
        return _mistake(error)
    return 0


def _add_export(commands) -> None:
    command = commands.add_parser(
        "export",
        help="write a checkpoint in HuggingFace form",
        description="Read a checkpoint in this one process and write what from_pretrained loads.",
    )
    command.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a folder of them whose latest is taken")
    command.add_argument("out", metavar="OUT", help="folder to write; must not exist")
    command.add_argument("--force", action="store_true", help="replace OUT when it exists")
    command.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    from .checkpoint import CheckpointError
    from .hf.export import export_checkpoint

    try:
        out = export_checkpoint(args.checkpoint, args.out, force=args.force)
    except (CheckpointError, FileExistsError) as error:
        return _mistake(error)
    logging.getLogger(__name__).info("exported to %s", out)
    return 0


def _mistake(error: Exception) -> int:
    # All ranks raise the same sentence; the first rank says it. A cause is a slip of ours: show where it happened.
    if error.__cause__ is not None:
        logging.getLogger(__name__).error("unexpected failure", exc_info=error)
    elif os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"fsdp2x: error: {error}\n")
    return 2
