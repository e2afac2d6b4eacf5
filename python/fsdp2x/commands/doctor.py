"""`fsdp2x doctor`: what this machine has, what a training would use of it, and whether one can run."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from fsdp2x.commands.shared import show

if TYPE_CHECKING:
    from fsdp2x.commands.doctor_facts import Finding


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "doctor",
        help="say what this machine would use, and whether it can run",
        description=(
            "Versions, the build, limits, and what a training would use of them, with the reason. Starts nothing; "
            "`fsdp2x selftest` trains. Exit status 1: nothing can run."
        ),
    )
    command.add_argument("--json", action="store_true", help="everything as one JSON object")
    command.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from fsdp2x.commands.doctor_facts import can_run, findings

    found = findings()
    runs = can_run(found)
    if args.json:
        rows = [dataclasses.asdict(finding) for finding in found]
        show(json.dumps({"can_run": runs, "findings": rows}, indent=1))
    else:
        show(_table(found, runs))
    return 0 if runs else 1


def _table(found: list[Finding], runs: bool) -> str:
    """Topics as headings, values in one column; what is not well has a mark in front and advice behind."""
    marks = {"ok": " ", "note": "!", "wrong": "x"}
    width = max(len(finding.name) for finding in found)
    lines, topic = [], ""
    for finding in found:
        if finding.topic != topic:
            topic = finding.topic
            lines += [*([""] if lines else []), topic]
        advice = f"  ({finding.advice})" if finding.advice else ""
        lines.append(f"{marks[finding.verdict]} {finding.name.ljust(width)}  {finding.value}{advice}")
    wrong = ", ".join(finding.name for finding in found if finding.verdict == "wrong")
    lines += ["", "can run: yes; `fsdp2x selftest` shows it" if runs else f"can run: no, because of {wrong}"]
    return "\n".join(lines)
