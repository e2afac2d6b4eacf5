"""Runs of benchmarks, one after the other, and what their medians are worth: ranges over processes, days and machines.

    python benchmarks/history.py record [--runs 5] [--only step_cpu_2ranks ...]    appends to benchmarks/history.jsonl
    python benchmarks/history.py show                                              ratios of every row, with their range
    python benchmarks/history.py check out/bench                                   results of a run against that range
    python benchmarks/history.py write                                             the table of steps in README.md

A line of the history is one run in processes of its own: when, where, of which commit, and for each row the ratio of
the other side's median to ours; the last run's result itself stays in results/. `check` names rows below the range of
at least five runs, and fails then. The file tells of one engine: a change of its speed begins it anew.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import plots
import run_all

HERE = Path(__file__).parent
HISTORY = HERE / "history.jsonl"
README = HERE.parent / "README.md"
# Fewer say nothing of a range.
LEAST_RUNS = 5


def ratios(record: Mapping) -> dict[str, float]:
    """Row -> how many times ours the other side takes, of one result; rows are those of its bars."""
    found = {}
    for panel in plots.PANELS.get(record["benchmark"], lambda _: [])(record["results"]):
        if isinstance(panel, plots.Bars) and panel.bars[0].value:
            for bar in panel.bars[1:]:
                found[f"{panel.title}: {bar.label}"] = bar.value / panel.bars[0].value
    return found


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def machine() -> str:
    """What tells machines apart in a history, without their names."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{cpu}, {len(os.sched_getaffinity(0))} cores"


def entry(name: str, record: Mapping, load: float) -> dict:
    """One line of the history. ``load``: of the machine before the run, without which a ratio cannot be judged."""
    return {
        "name": name,
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "load": round(load, 2),
        "commit": record["environment"]["commit"],
        "torch": record["environment"]["torch"],
        "ratios": {row: round(value, 3) for row, value in ratios(record).items()},
    }


def ranges(lines: Iterable[Mapping]) -> dict[tuple[str, str], list[float]]:
    """(result, row) -> ratios of all runs."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        for row, value in line["ratios"].items():
            found.setdefault((line["name"], row), []).append(value)
    return found


def days_and_machines(lines: Iterable[Mapping]) -> tuple[int, int]:
    """On how many days, and on how many machines."""
    days, machines = zip(*((line["day"], line["machine"]) for line in lines), strict=True)
    return len(set(days)), len(set(machines))


def table(lines: list[Mapping]) -> list[str]:
    """Rows of Markdown: the median of all runs, their range, how many, on how many days and machines."""
    rows = [
        "| result | row | median | range | runs | days | machines |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (name, row), values in ranges(lines).items():
        days, machines = days_and_machines(line for line in lines if line["name"] == name and row in line["ratios"])
        middle, spread = f"{statistics.median(values):.2f}x", f"{min(values):.2f}x to {max(values):.2f}x"
        rows.append(f"| {name} | {row} | {middle} | {spread} | {len(values)} | {days} | {machines} |")
    return rows


# What the columns of README.md are called, and the bars behind them.
PEERS = {"stock FSDP2": "FSDP2", "FSDP1": "FSDP1", "DeepSpeed ZeRO-3": "ZeRO-3", "DDP, unsharded": "DDP, unsharded"}


def steps_table(lines: list[Mapping]) -> str:
    """Markdown for README.md: a row for each model of bench_step, and how many times our step each peer takes."""
    of = [line for line in lines if line["name"] == "step_cpu_2ranks"]
    found = ranges(of)
    models = list(dict.fromkeys(row.partition(": ")[0] for _, row in found))
    days, machines = days_and_machines(of)
    head = f"| runs: {len(of)}, days: {days}, machines: {machines} | {' | '.join(PEERS)} |"
    rows = [head, f"| --- |{' ---: |' * len(PEERS)}"]
    for model in models:
        cells = []
        for peer in PEERS.values():
            values = found.get(("step_cpu_2ranks", f"{model}: {peer}"), [])
            cells.append(
                f"{statistics.median(values):.1f}x ({min(values):.1f} to {max(values):.1f})" if values else "–"
            )
        rows.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(rows)


def written(text: str, lines: list[Mapping]) -> str:
    """README.md with that table in the place of its first one."""
    return re.sub(r"(^\|.*\n)+", lambda _: steps_table(lines) + "\n", text, count=1, flags=re.MULTILINE)


def regressions(lines: list[Mapping], results: Mapping[str, Mapping]) -> list[str]:
    """Rows of results that are below every run of the history, where it has enough of them."""
    known, found = ranges(lines), []
    for name, record in results.items():
        for row, value in ratios(record).items():
            values = known.get((name, row), [])
            if len(values) >= LEAST_RUNS and value < min(values):
                found.append(
                    f"{name}, {row}: {value:.2f}x, the {len(values)} runs before had {min(values):.2f}x and more"
                )
    return found


def record(names: Iterable[str], num_runs: int, path: Path) -> int:
    """Runs each benchmark so often, each time in processes of its own, and appends what came out; 1 if one failed."""
    status = 0
    for _ in range(num_runs):
        for name in names:
            script, *options = run_all.FULL[name]
            load = Path("/proc/loadavg").read_text().split()[0]
            out = path.parent / "results" / f"{name}.json"
            command = [sys.executable, str(HERE / script), *options, "--json", str(out)]
            if subprocess.run(command, check=False).returncode != 0:
                status = 1
                continue
            line = entry(name, json.loads(out.read_text()), float(load))
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "show", "check", "write"))
    parser.add_argument("folder", nargs="?", type=Path, help="of results, for check")
    parser.add_argument("--runs", type=int, default=LEAST_RUNS)
    parser.add_argument("--only", nargs="+", choices=sorted(run_all.FULL), help="default: steps, optimizers and memory")
    parser.add_argument("--history", type=Path, default=HISTORY)
    args = parser.parse_args()
    if args.action == "record":
        return record(
            args.only or ["step_cpu_2ranks", "optimizer_cpu_2ranks", "memory_cpu_2ranks"], args.runs, args.history
        )
    lines = read(args.history)
    if args.action == "show":
        print("\n".join(table(lines)) if lines else "no runs are recorded yet: python benchmarks/history.py record")
        return 0
    if args.action == "write":
        README.write_text(written(README.read_text(), lines))
        return 0
    if args.folder is None:
        parser.error("check: name the folder of the results")
    results = {file.stem: json.loads(file.read_text()) for file in sorted(args.folder.glob("*.json"))}
    found = regressions(lines, results)
    print("\n".join(found) if found else f"nothing is below the range of {len(lines)} recorded runs")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
