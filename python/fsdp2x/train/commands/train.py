"""`fsdp2x train` and `fsdp2x config`: run training from a YAML file, explain the file, and list all keys."""

from __future__ import annotations

import argparse
import json

from fsdp2x.base.failures import ConfigError
from fsdp2x.train.commands.shared import add_resume_from, mistake, positive, show


def add(commands: argparse._SubParsersAction) -> None:
    _add_train(commands)
    _add_config(commands)


def _add_train(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "train",
        help="train a model",
        description="Train by the settings of a YAML file. Under torchrun it uses all ranks, else this process.",
    )
    command.add_argument("config", metavar="CONFIG.yaml")
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Settings that replace the file's: train.steps=100."
    )
    add_resume_from(command)
    command.add_argument(
        "--report", action="store_true", help="List every parameter with its placement, global and local shape."
    )
    command.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    from fsdp2x.train import TrainConfig, TrainingError, train
    from fsdp2x.train.load_config import config_of, translate_file

    overrides = [*args.overrides, *(["logging.report=true"] if args.report else [])]
    translation = translate_file(args.config, overrides)
    config = config_of(translation, TrainConfig, resume_from=args.resume_from)
    try:
        with translation.told():
            train(config)
    except TrainingError as error:
        mistake(error)
        return 1
    return 0


def _add_config(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("config", help="explain a config, list all keys")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    explain = actions.add_parser(
        "explain",
        help="show the meaning of each key",
        description=(
            "Show what each key of a training YAML means, which keys have no effect, what is missing to run it, "
            "the mesh, and the units of the model. Trains nothing and makes no process group."
        ),
    )
    explain.add_argument("config", metavar="CONFIG.yaml")
    explain.add_argument("overrides", nargs="*", metavar="key=value", help="Settings that replace the file's.")
    explain.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="Number of ranks. Default: from the config.",
    )
    explain.add_argument(
        "--local-world-size",
        type=positive,
        metavar="N",
        help="Ranks of one node. Default: all, or 8 if there are more and 8 divides them.",
    )
    explain.add_argument("--json", action="store_true", help="Print everything as one JSON object.")
    explain.set_defaults(run=_explain)
    listing = actions.add_parser("list", help="list all keys with type, default and meaning")
    listing.add_argument(
        "--dialect",
        default="sections",
        help="List keys of another format and what they become: flat, strategy, nested, or all. Default: sections, "
        "fsdp2x's own.",
    )
    listing.add_argument("--json", action="store_true", help="Print one JSON object.")
    listing.set_defaults(run=_list)


def _explain(args: argparse.Namespace) -> int:
    from fsdp2x.train.explain_config import explain

    found = explain(args.config, args.overrides, world_size=args.world_size, local_world_size=args.local_world_size)
    show(json.dumps(found.to_dict(), indent=1, default=str) if args.json else str(found))
    return 0


def _list(args: argparse.Namespace) -> int:
    from fsdp2x.train.dialects import DIALECTS
    from fsdp2x.train.load_config import list_keys
    from fsdp2x.train.parse import show as shown

    rows = list_keys(args.dialect)
    if not rows:
        known = ", ".join(["sections", *(dialect.name for dialect in DIALECTS), "all"])
        raise ConfigError(f"--dialect: expected one of {known}, got {args.dialect!r}")
    if args.json:
        show(json.dumps({key: {"default": None, **row} for key, row in rows.items()}, indent=1))
        return 0
    for key, row in rows.items():
        default = f" = {shown(row['default'])}" if "default" in row else ""
        show(f"{key}: {row['type']}{default}\n    {row['help']}")
    return 0
