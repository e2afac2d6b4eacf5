"""`fsdp2x train`: a training run from a YAML file."""

from __future__ import annotations

import argparse

from fsdp2x.commands.shared import mistake


def add(commands: argparse._SubParsersAction) -> None:
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
        "--resume-from", metavar="PATH", help="a checkpoint, or a folder of them whose latest is taken"
    )
    command.add_argument(
        "--report", action="store_true", help="list every parameter with its placement, global and local shape"
    )
    command.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    from fsdp2x.errors import CheckpointError
    from fsdp2x.train import ConfigError, TrainingError, load_config, train

    try:
        overrides = [*args.overrides, *(["logging.report=true"] if args.report else [])]
        config = load_config(args.config, overrides, resume_from=args.resume_from)
        train(config)
    except (ConfigError, CheckpointError) as error:
        return mistake(error)
    except TrainingError as error:
        mistake(error)
        return 1
    return 0
