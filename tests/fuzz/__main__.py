"""`python -m fuzz`: run one program, reduce it, search for one that diverges, or survey all kinds of difference."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from fuzz.execute import SIDES
from fuzz.program import parse
from fuzz.search import Ranks, explain, search, shrink, survey


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("run", "run one program and say in what its sides differ"),
        ("reduce", "find a smaller program that shows the same"),
    ):
        one = commands.add_parser(name, help=text)
        one.add_argument("program")
        one.add_argument("--seconds", type=float, default=120.0)
    for name, text in (
        ("search", "draw programs until one diverges, and shrink it"),
        ("survey", "draw programs, and show the shortest one of each kind of difference"),
    ):
        many = commands.add_parser(name, help=text)
        many.add_argument("--num", type=int, default=1000)
        many.add_argument("--seed", type=int, default=0, help="of the first program; the next ones follow")
    for command in commands.choices.values():
        command.add_argument("--world", type=int, default=2)
        command.add_argument("--only", default="", help="count differences that match this regular expression")
        command.add_argument("--sides", default=",".join(SIDES), help="unsharded must be among them")
    arguments = parser.parse_args()
    ranks, sides = Ranks(arguments.world), tuple(arguments.sides.split(","))
    try:
        return {"run": _run, "reduce": _reduce, "search": _search, "survey": _survey}[arguments.command](
            arguments, ranks, sides
        )
    finally:
        ranks.close()


def _run(arguments, ranks: Ranks, sides: tuple[str, ...]) -> int:
    program = parse(arguments.program)
    found = ranks.run(program, sides)
    print(explain(program, arguments.world, found) if found else "no difference")
    return bool(found)


def _reduce(arguments, ranks: Ranks, sides: tuple[str, ...]) -> int:
    program = shrink(ranks, parse(arguments.program), sides, arguments.only, arguments.seconds)
    print(explain(program, arguments.world, ranks.run(program, sides)))
    return 0


def _search(arguments, ranks: Ranks, sides: tuple[str, ...]) -> int:
    try:
        search(ranks, _seeds(arguments), sides, only=arguments.only)
    except AssertionError as error:
        print(error)
        return 1
    print(f"{arguments.num} programs, no difference")
    return 0


def _survey(arguments, ranks: Ranks, sides: tuple[str, ...]) -> int:
    start = time.monotonic()
    kinds = survey(ranks, _seeds(arguments), sides)
    for kind, count in kinds.most_common():
        print(f"{count} times: {kind}")
    print(f"{arguments.num} programs in {time.monotonic() - start:.0f} s, {len(kinds)} kinds of difference")
    return bool(kinds)


def _seeds(arguments) -> range:
    return range(arguments.seed, arguments.seed + arguments.num)


if __name__ == "__main__":
    sys.exit(main())
