"""`fsdp2x train`: runs training from a YAML file."""

from __future__ import annotations

import argparse

from fsdp2x.train.commands.shared import mistake


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "train",
        help="train a model",
        description="Train by the settings of a YAML file. Under torchrun it uses all ranks, else this process.",
    )
    command.add_argument("config", metavar="CONFIG.yaml")
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Settings that replace the file's: train.steps=100."
    )
    command.add_argument(
        "--resume-from", metavar="PATH", help="Checkpoint, or a folder of checkpoints, whose latest is used."
    )
    command.add_argument(
        "--report", action="store_true", help="List every parameter with its placement, global and local shape."
    )
    command.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    from fsdp2x.train import TrainingError, train
    from fsdp2x.train.config_file import ConfigFile

    overrides = [*args.overrides, *(["logging.report=true"] if args.report else [])]
    file = ConfigFile.read(args.config, overrides)
    config = file.parse(resume_from=args.resume_from)
    try:
        with file.located():
            train(config)
    except TrainingError as error:
        mistake(error)
        return 1
    return 0
