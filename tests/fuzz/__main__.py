"""`python -m fuzz`: run one program, or search for one that diverges and reduce it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

from fuzz.execute import SIDES
from fuzz.program import parse
from fuzz.search import Ranks, explain, search


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="run one program and say in what its sides differ")
    one.add_argument("program")
    many = commands.add_parser("search", help="draw programs until one diverges, and shrink it")
    many.add_argument("--num", type=int, default=1000)
    many.add_argument("--seed", type=int, default=0, help="of the first program; the next ones follow")
    many.add_argument("--only", default="", help="count differences that match this regular expression")
    for command in commands.choices.values():
        command.add_argument("--world", type=int, default=2)
        command.add_argument("--sides", default=",".join(SIDES), help="unsharded must be among them")
    arguments = parser.parse_args()
    ranks, sides = Ranks(arguments.world), tuple(arguments.sides.split(","))
    try:
        return (_run if arguments.command == "run" else _search)(arguments, ranks, sides)
    finally:
        ranks.close()


def _run(arguments, ranks: Ranks, sides: tuple[str, ...]) -> int:
    program = parse(arguments.program)
    found = ranks.run(program, sides)
    print(explain(program, arguments.world, found) if found else "no difference")
    return bool(found)


def _search(arguments, ranks: Ranks, sides: tuple[str, ...]) -> int:
    try:
        search(ranks, range(arguments.seed, arguments.seed + arguments.num), sides, only=arguments.only)
    except AssertionError as error:
        print(error)
        return 1
    print(f"{arguments.num} programs, no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
