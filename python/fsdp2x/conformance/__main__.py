"""Prints a table of engines and behaviors: ``python -m fsdp2x.conformance MODULE:FUNCTION ...``."""

from __future__ import annotations

import argparse

from fsdp2x.conformance.behavior import BEHAVIORS, cases
from fsdp2x.conformance.ranks import Ranks


def judge(engine: str, worlds: list[int]) -> dict[tuple[str, str], tuple[str, list[str]]]:
    """Returns for each behavior the cell of the engine, and what fails."""
    found: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for world in worlds:
        ranks = Ranks(world, engine)
        for module, name, row in cases():
            outcomes = found.setdefault((module, name), [])
            behavior = BEHAVIORS[module, name]
            if not behavior.why_skipped(engine, world):
                result = ranks.run(module, name, row)
                outcomes.append((result.status, row, behavior.why_lacking(engine, row) or result.reason))
        ranks.close()
    return {key: (_cell(outcomes), _failures(outcomes)) for key, outcomes in found.items()}


def _cell(outcomes: list[tuple[str, str, str]]) -> str:
    num_passed = sum(status == "passed" for status, *_ in outcomes)
    return "newer" if not outcomes else "yes" if num_passed == len(outcomes) else f"{num_passed} of {len(outcomes)}"


def _failures(outcomes: list[tuple[str, str, str]]) -> list[str]:
    """Returns each reason once, with its rows if others pass."""
    rows: dict[str, list[str]] = {}
    for status, row, reason in outcomes:
        if status == "failed" and row not in rows.setdefault(reason, []):
            rows[reason].append(row)
    is_part = any(status == "passed" for status, *_ in outcomes)
    return [f"{', '.join(names)}: {reason}" if is_part else reason for reason, names in rows.items()]


def table(columns: dict[str, dict[tuple[str, str], tuple[str, list[str]]]]) -> list[str]:
    """Returns the lines of a page: a table for each module, and what fails."""
    lines, section = [], ""
    for key in next(iter(columns.values())):
        module = key[0].rpartition(".")[2]
        if module != section:
            section = module
            engines = " | ".join(f"`{engine}`" for engine in columns)
            lines += ["", f"### {section}", "", f"| behavior | {engines} |", "| --- |" + " --- |" * len(columns)]
        cells = " | ".join(column[key][0] for column in columns.values())
        lines.append(f"| {key[1].replace('_', ' ')} | {cells} |")
    lines += ["", "### What fails", ""]
    for engine, column in columns.items():
        for (_, name), (_, failures) in column.items():
            lines += [f"- `{engine}`, {name.replace('_', ' ')}: {reason}" for reason in failures]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fsdp2x.conformance")
    parser.add_argument("engines", nargs="+", metavar="MODULE:FUNCTION", help="functions like fully_shard")
    parser.add_argument("--world", default="1,2", help="Numbers of ranks. Default: 1,2")
    options = parser.parse_args()
    worlds = [int(size) for size in options.world.split(",")]
    print("\n".join(table({engine: judge(engine, worlds) for engine in options.engines})))


if __name__ == "__main__":
    main()
