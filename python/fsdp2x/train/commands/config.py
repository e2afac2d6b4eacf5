"""`fsdp2x config`: explains a config, lists all keys, and translates the config of another trainer."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping

from fsdp2x.base.errors import ConfigError, reworded
from fsdp2x.train.commands.shared import positive, show


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("config", help="explain a config, list all keys, translate another trainer's")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    explain = actions.add_parser(
        "explain",
        help="show what a config means",
        description=(
            "Show the settings of a training YAML, which have no effect, what is missing to run it, the mesh, and the "
            "units of the model. Trains nothing and makes no process group."
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
    listing.add_argument("section", nargs="?", metavar="SECTION", help="A section, or a key. Default: all sections.")
    listing.add_argument("--json", action="store_true", help="Print one JSON object.")
    listing.set_defaults(run=_list)
    _add_translate(actions)


def _add_translate(actions: argparse._SubParsersAction) -> None:
    translate = actions.add_parser(
        "translate",
        help="translate the config of another trainer",
        description=(
            "Print the config of another trainer in fsdp2x's keys, or in TRL's. Its trainer is recognized by its keys: "
            "flat keys of a GPT trainer, ROLL, ChatLearn, or slime, whose flags follow --. Standard error lists what "
            "was dropped, and why."
        ),
    )
    translate.add_argument("config", nargs="?", default="", metavar="FILE")
    translate.add_argument("overrides", nargs="*", metavar="key=value", help="Keys that replace the file's.")
    translate.add_argument("--role", metavar="NAME", help="The role to translate, such as actor_train.")
    translate.add_argument(
        "--to",
        choices=("train", "sft", "grpo"),
        help="Command that reads the result: fsdp2x train, fsdp2x trl sft, or fsdp2x trl grpo. Default: grpo if a key "
        "of the file samples responses, else train.",
    )
    translate.set_defaults(run=_translate)


def _explain(args: argparse.Namespace) -> int:
    from fsdp2x.train.explain_config import explain

    found = explain(args.config, args.overrides, world_size=args.world_size, local_world_size=args.local_world_size)
    show(json.dumps(found.to_dict(), indent=1, default=str) if args.json else str(found))
    return 0


def _list(args: argparse.Namespace) -> int:
    from fsdp2x.train.config import SECTIONS, list_keys
    from fsdp2x.train.parse import say_unknown
    from fsdp2x.train.parse import show as shown

    rows, wanted = list_keys(), args.section
    if wanted is not None:
        found = {key: row for key, row in rows.items() if wanted in (key, key.partition(".")[0])}
        if not found:
            raise ConfigError(say_unknown(wanted, wanted, [*rows, *SECTIONS]))
        rows = found
    if args.json:
        show(json.dumps(rows, indent=1))
        return 0
    for key, row in rows.items():
        show(f"{key}: {row['type']} = {shown(row['default'])}\n    {row['help']}")
    return 0


def _translate(args: argparse.Namespace) -> int:
    import yaml

    from fsdp2x.train.config import SECTIONS
    from fsdp2x.train.config_file import ConfigFile, parse_config
    from fsdp2x.train.translate import translate

    path, overrides, flags = _split_words([args.config, *args.overrides])
    file = ConfigFile.read_any(path, [*overrides, *flags])
    missing: list[str] = []
    with file.located():
        found = translate(file.settings, to=args.to, role=args.role)
        settings = found.settings
        if found.to == "train":
            settings = {section: settings[section] for section in SECTIONS if section in settings}
            with reworded(ConfigError, lambda error: _in_keys_of(found.made_by, str(error)), ConfigError):
                missing = parse_config(settings).missing
    command = "train" if found.to == "train" else f"trl {found.to} --config"
    head = f"# {found.title}, translated for fsdp2x {command}\n"
    show(head + yaml.safe_dump(settings, sort_keys=False).rstrip())
    for key, why in found.dropped.items():
        _tell(f"{file.line_of(key)}dropped {key}: {why}")
    for note, keys in found.notes.items():
        _tell(f"{file.line_of(keys[0])}note on {', '.join(keys)}: {note}")
    for need in missing:
        _tell(f"to run it needs {need}")
    return 0


def _in_keys_of(made_by: Mapping[str, str], message: str) -> str:
    """Returns a message about settings with the keys that made them."""
    parts = (line.partition(":") for line in message.split("\n"))
    return "\n".join(made_by.get(setting, setting) + colon + problem for setting, colon, problem in parts)


def _tell(sentence: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{sentence}\n")


def _split_words(words: Iterable[str]) -> tuple[str, list[str], list[str]]:
    """Returns the path of a file, `key=value` words, and the flags of a command line as such words.

    The program may come before the flags: `train_async.py` is a setting of slime.
    """
    plain: list[str] = []
    flags: dict[str, list[str]] = {}
    last: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            last = flags[flag.replace("-", "_").lower()] = [value] if equals else []
        elif last is not None:
            last.append(word)
        elif word.endswith("train_async.py"):
            flags["train_async"] = []
        elif word and not word.endswith(("train.py", "python", "python3")):
            plain.append(word)
    path = plain.pop(0) if plain and "=" not in plain[0] else ""
    return path, plain, [f"{flag}={_value(values)}" for flag, values in flags.items()]


def _value(values: list[str]) -> str:
    return f"[{', '.join(values)}]" if len(values) > 1 else values[0] if values else "true"
