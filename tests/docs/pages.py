"""Runs a page as a reader would: writes the files that it shows, runs its commands, and compares their output.

A fence whose information has a title is a file of that name. The lines of a `sh` fence are commands, which run one
after the other in the folder of the files. One that ends with `|| echo "exit status $?"` must fail. A `text` fence has
their output. `bash` fences are commands that a page only shows.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from harness import programs

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')
CODE = re.compile(r"`([^`\n]+)`")
# Numbers with a point differ between machines and versions of torch.
NUMBER = re.compile(r"\d+\.\d+(e[+-]\d+)?")
SECONDS = 240
# Ends a command whose failure a page shows.
FAILS = ' || echo "exit status $?"'


@dataclass(frozen=True)
class Fence:
    """One fenced block: its language, the title of a file or "", and its text without the page's indentation."""

    language: str
    title: str
    text: str


def pages() -> list[Path]:
    """README.md and every page of docs/, which readers meet as one."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fences(text: str) -> list[Fence]:
    found = []
    for indent, information, block in FENCE.findall(text):
        title = TITLE.search(information)
        lines = [line.removeprefix(indent) for line in block.splitlines()]
        language = information.split()[0] if information.strip() else ""
        found.append(Fence(language, title[1] if title else "", "\n".join(lines) + "\n"))
    return found


def tables(text: str) -> dict[str, list[list[str]]]:
    """Header of each table's first two columns -> the cells of its rows; tables of one header are one."""
    found: dict[str, list[list[str]]] = {}
    rows: list[list[str]] | None = None
    for line in text.splitlines():
        if not line.startswith("|"):
            rows = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if rows is None:
            rows = found.setdefault(" | ".join(cells[:2]), [])
        elif set(cells[0]) != {"-"}:
            rows.append(cells)
    return found


def commands(block: str) -> list[str]:
    """Commands of a fence; a backslash at the end of a line continues it."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in (line.partition("  #")[0].strip() for line in lines) if line and line[0] != "#"]


def words_of(command: str) -> list[str]:
    """Returns the arguments of `programs.run` for a shell command."""
    program, *words = shlex.split(command)
    if program == "torchrun":
        # The system chooses the ports, because pages run at the same time.
        return [*programs.TORCHRUN, "--standalone", *words]
    if program == "fsdp2x":
        return ["-m", "fsdp2x", *words]
    if program == "python":
        return words
    raise ValueError(f"{command}: pages run python, torchrun and fsdp2x alone; show others in a bash fence")


def unseen(expected: str, printed: str) -> list[str]:
    """Returns the expected lines that are not printed in this order. "..." stands for any number of lines."""
    rest = iter([_comparable(line) for line in printed.splitlines()])
    return [line for line in expected.splitlines() if line.strip() not in ("", "...") and _comparable(line) not in rest]


def _comparable(line: str) -> str:
    return " ".join(NUMBER.sub("#", line).split())


def run_page(text: str, folder: Path) -> int:
    """Runs a page in an empty folder and returns the number of commands; AssertionError where it does not hold."""
    num_commands, printed = 0, ""
    for fence in fences(text):
        if fence.title:
            path = folder / fence.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(fence.text)
        elif fence.language == "sh":
            printed = ""
            for command in commands(fence.text):
                words, _, file = command.removesuffix(FAILS).partition(" > ")
                done = programs.run(*words_of(words), cwd=folder, timeout=SECONDS)
                is_right = (done.returncode != 0) == command.endswith(FAILS)
                assert is_right, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
                if done.returncode:
                    done.stderr += f"exit status {done.returncode}\n"
                if file:
                    (folder / file).write_text(done.stdout)
                printed += done.stderr if file else done.stdout + done.stderr
                num_commands += 1
        elif fence.language == "text" and num_commands:
            missing = unseen(fence.text, printed)
            assert not missing, f"not printed: {missing}, but\n{printed}"
    return num_commands
