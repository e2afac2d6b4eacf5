"""Reference pages of the site that the package describes itself: commands from their help, settings from their keys."""

from __future__ import annotations

import argparse
import os

from fsdp2x.train.parse import show

INTRO = "`fsdp2x train` reads these keys from a YAML file. On the command line, write `section.key=value`."


def commands(parser: argparse.ArgumentParser) -> str:
    """The page of all commands, with the help of each in a fence."""
    os.environ["COLUMNS"] = "100"
    parts = ["# Commands", "All commands of `fsdp2x`, with the text of their `--help`."]
    for name, command in sorted(_subcommands(parser).items()):
        parts.append(f"## fsdp2x {name}")
        nested = _subcommands(command)
        for title, each in (nested or {"": command}).items():
            parts += [f"### fsdp2x {name} {title}"] * bool(title)
            parts.append(f"```console\n{each.format_help().rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def settings(rows: dict[str, dict]) -> str:
    """The page of all keys of ``fsdp2x train``."""
    return "\n\n".join(["# Settings", INTRO, *_sections(rows)]) + "\n"


def _sections(rows: dict[str, dict]) -> list[str]:
    by_section: dict[str, list[str]] = {}
    for key, row in rows.items():
        default = f"Default: `{show(row['default'])}`." if "default" in row else ""
        item = f"- `{key}` ({row['type']}): {row['help'].rstrip('.')}. {default}"
        by_section.setdefault(key.partition(".")[0], []).append(item.rstrip())
    return [f"## {name}\n\n" + "\n".join(items) for name, items in by_section.items()]
