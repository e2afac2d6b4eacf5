"""Reports which instructions of each kernel the bodies execute: `ptx_coverage.py sm_90 --missed KERNEL`."""

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import ptx_build
from ptx_reader import Entry, stable_name
from ptx_translation import executed

LEAST = 0.95  # of the instructions of each kernel


def measure(architecture: str, kernels: Path | None = None) -> list[tuple[Entry, list[bool]]]:
    """Runs all bodies. Returns the kernels, by name, with whether each instruction was executed."""
    kernels = kernels or ptx_build.library(architecture)
    entries = {stable_name(entry.name): entry for entry in ptx_build.entries(architecture)}
    reached = {name: [False] * len(entry.instructions) for name, entry in entries.items()}
    with tempfile.TemporaryDirectory() as folder:
        for program in ptx_build.PROGRAMS:
            file = Path(folder) / program
            result = ptx_build.run(program, kernels, reached=file)
            if result.returncode != 0:
                raise RuntimeError(f"{program}: {result.stdout[-2000:]}{result.stderr[-2000:]}")
            for name, marks in (line.split() for line in file.read_text().splitlines()):
                reached[name] = [old or mark == "1" for old, mark in zip(reached[name], marks, strict=True)]
    found = [(entry, executed(entry, reached[name])) for name, entry in entries.items()]
    return sorted(found, key=lambda item: item[0].title)


def table(found: list[tuple[Entry, list[bool]]]) -> str:
    lines = [f"{'kernel':24} {'instructions':>12} {'executed':>9}"]
    rows = [(entry.title, done) for entry, done in found]
    rows.append(("all", [flag for _, done in rows for flag in done]))
    for title, done in rows:
        lines.append(f"{title:24} {len(done):12} {sum(done) / len(done):9.1%}")
    return "\n".join(lines)


def missed_lines(entry: Entry, done: list[bool]) -> list[str]:
    """Returns lines of C++ with instructions that were not executed, and their number."""
    missed = Counter(i.source for i, flag in zip(entry.instructions, done, strict=True) if not flag)
    return [f"{number:5}  {source}" for source, number in sorted(missed.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description="Instructions of the kernels that the bodies execute.")
    parser.add_argument("architecture", nargs="?", default="sm_90", choices=ptx_build.ARCHITECTURES)
    parser.add_argument("--missed", metavar="KERNEL", help="the lines of C++ whose instructions were not executed")
    arguments = parser.parse_args()
    found = measure(arguments.architecture)
    print(table(found))
    for entry, done in found:
        if entry.title == arguments.missed:
            print("\n".join(missed_lines(entry, done)))


if __name__ == "__main__":
    main()
