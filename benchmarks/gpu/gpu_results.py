"""Stores the numbers of the GPU benchmarks: one file per GPU and day, with an entry for each benchmark."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import harness

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Target:
    """A number that was measured against what it is to be, as `targets.py` shows them."""

    what: str
    got: str
    wanted: str
    held: bool

    @property
    def verdict(self) -> str:
        return "held" if self.held else "MISSED"


def times(what: str, stock: float, ours: float, wanted: float) -> Target:
    """That ours is `wanted` times less than stock's."""
    got = "none" if ours <= 0 else f"{stock / ours:.2f}x"
    return Target(what, got, f"{wanted:.1f}x", ours <= 0 or stock / ours >= wanted)


def results_file(device: str, directory: Path) -> Path:
    """`<gpu>-<date>.json`, the GPU's name in lower case with dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return directory / f"{name}-{datetime.date.today().isoformat()}.json"


def keep(path: Path, entry: str, value: list | dict) -> None:
    """Writes `value` as `entry` of the results in `path`; other entries of it stay."""
    results = json.loads(path.read_text())["results"] if path.is_file() else {}
    harness.save(path, "gpu", {**results, entry: value})


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments of every benchmark that trains on a GPU."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny models, to see that it runs")
    made.add_argument("--quick", action="store_true", help="fewer cases and steps")
    made.add_argument("--json", type=Path, help="file for the numbers; benchmarks/results/<gpu>-<date>.json if absent")
    return made


def publish(arguments: argparse.Namespace, device, entry: str, value: list | dict, rows: list[list[str]]) -> None:
    """Prints the table and keeps the numbers; those of a dry run only where a file is named. Rank 0 does."""
    if os.environ.get("RANK", "0") != "0":
        return
    path = arguments.json
    if path is None and not device.is_dry_run:
        path = results_file(device.name, RESULTS)
    where = "not kept" if path is None else f"kept in {path}"
    if path is not None:
        keep(path, entry, value)
    print(f"{device.name}; {where}\n\n{harness.table(rows)}\n", flush=True)
