"""`fsdp2x config`: what a training config means, and all keys that there are."""

from __future__ import annotations

import argparse
import json

from fsdp2x.commands.shared import mistake, show


def add(commands: argparse._SubParsersAction) -> None:
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
        type=_positive,
        metavar="N",
        help="number of ranks; default what the config says",
    )
    explain.add_argument(
        "--local-world-size",
        type=_positive,
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


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a positive number")
    return number


def _explain(args: argparse.Namespace) -> int:
    from fsdp2x.train import ConfigError
    from fsdp2x.train.explain_config import explain

    try:
        found = explain(args.config, args.overrides, world_size=args.world_size, local_world_size=args.local_world_size)
    except ConfigError as error:
        return mistake(error)
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
