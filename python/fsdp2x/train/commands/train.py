"""`fsdp2x train` and `fsdp2x config`: a training run from a YAML file, what the file means, and all keys."""

from __future__ import annotations

import argparse
import json

from fsdp2x.train.commands.shared import mistake, positive, show


def add(commands: argparse._SubParsersAction) -> None:
    _add_train(commands)
    _add_config(commands)


def _add_train(commands: argparse._SubParsersAction) -> None:
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
        "--resume-from", "--resume-from-checkpoint", "--checkpoint.resume-from",
        metavar="PATH", help="a checkpoint, or a folder of them whose latest is taken",
    )  # fmt: skip
    command.add_argument(
        "--report", action="store_true", help="list every parameter with its placement, global and local shape"
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
    command = commands.add_parser("config", help="explain a training config, list all keys")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    explain = actions.add_parser(
        "explain",
        help="what each key became",
        description=(
            "What each key of a training YAML became, which keys have no effect, what is missing before it can run, "
            "the mesh, and the units of the model. Nothing is trained and no process group is made."
        ),
    )
    explain.add_argument("config", metavar="CONFIG.yaml")
    explain.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    explain.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="number of ranks; default what the config says",
    )
    explain.add_argument(
        "--local-world-size",
        type=positive,
        metavar="N",
        help="ranks of one node; default all, or 8 if there are more and 8 divides them",
    )
    explain.add_argument("--json", action="store_true", help="everything as one JSON object")
    explain.set_defaults(run=_explain)
    listing = actions.add_parser("list", help="all keys with type, default and meaning")
    listing.add_argument(
        "--dialect",
        choices=("sections", "flat", "strategy", "nested", "all"),
        default="sections",
        help="keys of another spelling, and what they become",
    )
    listing.add_argument("--json", action="store_true", help="as one JSON object")
    listing.set_defaults(run=_list)


def _explain(args: argparse.Namespace) -> int:
    from fsdp2x.train.explain_config import explain

    found = explain(args.config, args.overrides, world_size=args.world_size, local_world_size=args.local_world_size)
    show(json.dumps(found.to_dict(), indent=1, default=str) if args.json else str(found))
    return 0


def _list(args: argparse.Namespace) -> int:
    from fsdp2x.train.load_config import list_keys
    from fsdp2x.train.parse import show as shown

    rows = list_keys(args.dialect)
    if args.json:
        show(json.dumps({key: {"default": None, **row} for key, row in rows.items()}, indent=1))
        return 0
    for key, row in rows.items():
        default = f" = {shown(row['default'])}" if "default" in row else ""
        show(f"{key}: {row['type']}{default}\n    {row['help']}")
    return 0
